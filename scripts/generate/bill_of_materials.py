"""Writes a CycloneDX bill of materials of .venv, which holds the pinned versions, with the licence that each states.

    python -m scripts.generate.bill_of_materials [FILE]      build/dsplan.cdx.json where none is named

The same environment gives the same file.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from scripts.generate.generated import ROOT

DEFAULT = ROOT / "build" / "dsplan.cdx.json"


def write_bill(file: Path) -> None:
    """Write the bill of the interpreter's environment, checked against CycloneDX's schema."""
    file.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "cyclonedx_py", "environment", "--pyproject", str(ROOT / "pyproject.toml")]
    command += ["--mc-type", "application", "--short-PURLs", "--output-reproducible", "--output-file", str(file)]
    subprocess.run([*command, sys.executable], check=True)


if __name__ == "__main__":
    write_bill(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT)
