"""Compiles each YAML catalogue to the JSON beside it, which is what dsplan reads; run it after editing a catalogue.

With `--check` it writes nothing and ends with status 1 if something is stale.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from hardware_db.files import replace_text

ROOT = Path(__file__).resolve().parents[2]


def devices() -> str:
    """Return the compiled devices."""
    from hardware_db.datasheets.compile import compile_devices

    return compile_devices()


def interconnects() -> str:
    """Return the compiled links and node types."""
    from hardware_db.datasheets.compile import compile_interconnects

    return compile_interconnects()


def architectures() -> str:
    """Return the compiled architectures."""
    from planner.models.compile import compile_architectures

    return compile_architectures()


def models() -> str:
    """Return the compiled catalogue of models."""
    from planner.models.compile import compile_catalogue

    return compile_catalogue()


def code_bases() -> str:
    """Return the compiled code bases."""
    from planner.cost.code_bases import compile_code_bases

    return compile_code_bases()


CATALOGUES: dict[str, Callable[[], str]] = {
    "hardware_db/datasheets/devices.json": devices,
    "hardware_db/datasheets/interconnects.json": interconnects,
    "planner/models/from_hf/architectures.json": architectures,
    "planner/models/catalogue.json": models,
    "planner/cost/code_bases.json": code_bases,
}


def stale() -> dict[Path, str]:
    """Every compiled catalogue that differs from its YAML, with the text it should hold."""
    fresh = {ROOT / name: compiled() for name, compiled in CATALOGUES.items()}
    return {path: text for path, text in fresh.items() if not path.exists() or path.read_text(encoding="utf-8") != text}


def main(arguments: list[str]) -> int:
    """Write the stale catalogues, or only name them with `--check`."""
    outdated = stale()
    for path, text in outdated.items():
        print(f"{path.relative_to(ROOT)} {'is stale' if '--check' in arguments else 'written'}")
        if "--check" not in arguments:
            replace_text(path, text)
    return 1 if outdated and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
