"""Rewrites the frozen configs of tests/emit/frozen. Nothing else does; look at the diff before committing it.

python scripts/refresh_frozen.py
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "emit"))

from emit_canaries import CANARIES, FROZEN, frozen_files


def main() -> None:
    if FROZEN.exists():
        shutil.rmtree(FROZEN)
    for case, plan in CANARIES.items():
        for name, text in frozen_files(plan).items():
            path = FROZEN / case / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    print(f"{len(CANARIES)} cases written to {FROZEN}")


if __name__ == "__main__":
    main()
