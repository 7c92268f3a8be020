"""Lets scripts that generate a page write it, or check that it is fresh."""

from __future__ import annotations

import sys
from pathlib import Path

from hardware_db.files import replace_text

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
"""The shelf that generated pages stand on."""


def write_or_check(target: Path, text: str) -> int:
    """Write `text` to `target`; with `--check` among the arguments only compare, and give 1 where they differ."""
    if "--check" not in sys.argv[1:]:
        replace_text(target, text)
    elif not target.exists() or target.read_text(encoding="utf-8") != text:
        module = ".".join(Path(sys.argv[0]).resolve().relative_to(ROOT).with_suffix("").parts)
        print(f"{target.name} is stale; run python -m {module}", file=sys.stderr)
        return 1
    return 0
