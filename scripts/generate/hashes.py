"""Writes constraints.hashes.txt: the pinned versions of constraints.txt with the hash of every file of each.

    python -m scripts.generate.hashes

`pip install --require-hashes -r constraints.hashes.txt` then installs these files and no others. Asks the package index
through uv, which has to be installed (`pip install uv`); no package is downloaded.
"""

from __future__ import annotations

import subprocess
import sys

from scripts.generate.generated import ROOT

PINNED = ROOT / "constraints.txt"
HASHED = ROOT / "constraints.hashes.txt"
_OPTIONS = ("--no-deps", "--generate-hashes", "--no-header", "--no-emit-index-url", "--no-annotate", "--no-config")


def main() -> None:
    subprocess.run(
        [sys.executable, "-m", "uv", "pip", "compile", *_OPTIONS, str(PINNED), "-o", str(HASHED)],
        check=True,
        stdout=subprocess.DEVNULL,
    )


if __name__ == "__main__":
    main()
