"""Writes `schemas/schema-N.db`, a real database file of the present schema N, for the tests of later schemas.

Run it once when a schema is released: `python tests/hardware_db/store/freeze_schema.py`. It refuses to replace a file.
"""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
SCHEMAS = Path(__file__).parent / "schemas"


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from hardware_db.store import open_store
    from hardware_db.store.migrations import MIGRATIONS
    from tests.hardware_db.store.records import (
        FROZEN,
        FROZEN_CALIBRATION,
        FROZEN_RATE,
        FROZEN_REPORT,
        FROZEN_RUN,
        FROZEN_TRACE,
    )

    path = SCHEMAS / f"schema-{len(MIGRATIONS)}.db"
    if path.exists():
        sys.exit(f"{path} exists; a released schema does not change, add a migration instead")
    SCHEMAS.mkdir(exist_ok=True)
    with open_store(path) as store:
        store.add(*FROZEN, FROZEN_RATE, FROZEN_RUN)
        store.add_trace(FROZEN_TRACE)
        store.add_calibration(FROZEN_CALIBRATION)
        store.report(FROZEN_REPORT)
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = delete")
    connection.execute("PRAGMA page_size = 512")
    connection.execute("VACUUM")
    connection.close()


if __name__ == "__main__":
    main()
