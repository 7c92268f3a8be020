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
from tests.emulated_cuda.emulated_nvml import RecordedNvml

RECORDINGS = Path(__file__).parent / "recordings"


@contextmanager
def playing(recording: str | dict[str, Any]) -> Iterator[None]:
    """Have pynvml talk to the recording (a name in recordings/, or one that a test composed) while this is open."""
    if isinstance(recording, str):
        recording = json.loads((RECORDINGS / f"{recording}.json").read_text(encoding="utf-8"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pynvml, "nvmlLib", RecordedNvml(recording))
        patch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        patch.setattr(nvml, "driver_library_loads", lambda: True)
        yield
