"""Guards around every test: nothing it sets up may outlive it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

# Variables through which one test could change what the next one does.
_GUARDED = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "CUDA_VISIBLE", "DSPLAN_", "DS_", "ACCELERATE_", "FSDP_")

# Libraries tell the threads of a pool to end and do not wait for it (transformers, where it loads weights).
_THREAD_SECONDS = 5.0


def _guarded_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_GUARDED)}


def _lasting_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.daemon}


def _process_group_is_up() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


@pytest.fixture(autouse=True)
def _nothing_leaks() -> Iterator[None]:
    environment, threads, files = _guarded_environment(), _lasting_threads(), set(os.listdir())
    yield
    assert _guarded_environment() == environment, "the test left environment variables changed"
    for thread in _lasting_threads() - threads:
        thread.join(_THREAD_SECONDS)
    assert not _lasting_threads() - threads, "the test left a thread running"
    assert not _process_group_is_up(), "the test left a process group"
    left = {name for name in set(os.listdir()) - files if not name.startswith(".")}
    assert not left, f"the test left files in the working directory: {sorted(left)}"


@pytest.fixture(autouse=True)
def dsplan_home(_nothing_leaks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user data directory of the test's own."""
    home = tmp_path / "dsplan-home"
    monkeypatch.setenv("DSPLAN_HOME", str(home))
    return home
