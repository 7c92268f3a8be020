"""`--exact`, and models of the user's own code (`--model package.module:factory`).

`strategies.tracing.step` runs the module itself. An answer is kept in the database under everything it depends on, so
that only the first question costs a trace.
"""

from __future__ import annotations
