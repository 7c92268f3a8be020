"""What a trace could not follow."""

from __future__ import annotations

from planner.errors import DsplanError


class TraceFailed(DsplanError):
    """A step that could not be run on fake tensors; the message is one line.

    `operation` is torch's name of what failed (empty where it was Python code), `module_path` the innermost module that
    was running, `reason` the first line of what was raised.
    """

    def __init__(self, operation: str, module_path: str, reason: str) -> None:
        self.operation, self.module_path, self.reason = operation, module_path, reason
        what = operation or "the code"
        where = f" in {module_path}" if module_path else ""
        super().__init__(f"the trace cannot follow {what}{where}: {reason}")
