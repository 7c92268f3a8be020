"""Rewrites the frozen configs of tests/planner/emit/frozen. Nothing else does; look at the diff before committing it.

python -m scripts.generate.refresh_frozen
"""

from __future__ import annotations

import shutil

from tests.planner.emit.canaries import CANARIES, FROZEN, frozen_files


def main() -> None:
    """Write the frozen files anew."""
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
