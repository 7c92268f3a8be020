"""Plays a recorded set of NVML answers back, so that all of pynvml runs in between."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pynvml
import pytest

from hardware_db.probe import nvml
from tests.emulated_cuda import describe, machine
from tests.emulated_cuda.emulated_nvml import EmulatedNvml, RecordedNvml

RECORDINGS = Path(__file__).parent / "recordings"


@contextmanager
def playing(recording: str | dict[str, Any]) -> Iterator[None]:
    """Have pynvml talk to the recording (a name in recordings/, or one that a test composed) while this is open."""
    if isinstance(recording, str):
        recording = json.loads((RECORDINGS / f"{recording}.json").read_text(encoding="utf-8"))
    with _answering(RecordedNvml(recording)):
        yield


@contextmanager
def emulating(name: str, folder: Path) -> Iterator[None]:
    """Have the probe see a machine of the emulated cards' `machines.json` while this is open."""
    described = describe(machine(name), folder)
    library = None if described["nvml"] is None else EmulatedNvml(described)
    with _answering(library), pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvml, "cuda_library_loads", lambda: True)
        yield


@contextmanager
def _answering(library: RecordedNvml | None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pynvml, "nvmlLib", library)
        patch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        patch.setattr(nvml, "driver_library_loads", lambda: library is not None)
        yield
