"""Guards around every test: nothing it sets up may outlive it. Also which cases the suite runs, and pools of ranks."""

from __future__ import annotations

import gc
import inspect
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from dsplan.diagnostics.bench.rank_pool import RankPool
from tests.emulated_cuda.fixtures import CardPool, card, cuda_environment, emulated, two_cards  # noqa: F401

# Variables through which one test could change what the next one does.
_GUARDED = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "CUDA_VISIBLE", "DSPLAN_", "DS_", "ACCELERATE_", "FSDP_")

# Libraries tell the threads of a pool to end and do not wait for it (transformers, where it loads weights).
_THREAD_SECONDS = 30.0

# Folders with tests of half a minute each.
_STARTS_PROCESSES = ("run", "emit", "faults", "launchers", "launch", "bench")

# What every rank would import for itself, each in seconds of processor time.
_PRELOAD = (
    "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "strategies.engine.initialize",
    "transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks slow what a sweep leaves to the long checks: the cases that its `suite` does not pick. Files whose tests
    last longest come first, so that no worker is left alone with one.

    Raises:
        pytest.UsageError: a `suite` picks no case, so that the suite would lose the behaviour.
    """
    items.sort(key=lambda item: item.path.parent.name not in _STARTS_PROCESSES)
    picked: dict[str, int] = {}
    for item in items:
        sweep = item.get_closest_marker("sweep")
        if sweep is not None and isinstance(item, pytest.Function):
            suite = sweep.kwargs["suite"]
            in_suite = suite(**{name: item.callspec.params[name] for name in inspect.signature(suite).parameters})
            name = item.nodeid.partition("[")[0]
            picked[name] = picked.get(name, 0) + bool(in_suite)
            if not in_suite:
                item.add_marker("slow")
    empty = [name for name, cases in picked.items() if not cases]
    if empty and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"no case is left in the suite of {', '.join(empty)}")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keeps the garbage collector from what test files import: looking through it was a sixth of the suite's time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def _guarded_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_GUARDED)}


def _lasting_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.daemon}


def _process_group_is_up() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    """Tiny models train 25 times slower on two threads than on one where other processes use the cores too."""
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


# Programs that tests start import from `tests` too, wherever they run.
_ROOT = str(Path(__file__).parents[1])
if _ROOT not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))

# Where set-up compiled DeepSpeed's operators.
_compiled = Path(sys.prefix, "torch_extensions")
if _compiled.is_dir():
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(_compiled))

# What was started in the background of a shell, or with nohup, ignores these, and so would every process of a test.
for _number, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _handler)


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


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let any test of ranks run on cards: `pytest --cards tests/strategies/backends`."""
    parser.addoption("--cards", action="store_true", help="pools of ranks are on cards, emulated where there are none")


@pytest.fixture(scope="session")
def new_pool(request: pytest.FixtureRequest) -> Callable[..., RankPool]:
    """RankPool, with ranks that are forked from one process which has imported what all of them need."""
    if request.config.getoption("--cards"):
        return cast("Callable[..., RankPool]", request.getfixturevalue("new_card_pool"))
    return partial(RankPool, preload=_PRELOAD)


@pytest.fixture(scope="session")
def new_card_pool(cuda_environment: Mapping[str, str]) -> Callable[..., RankPool]:  # noqa: F811
    """RankPool, whose ranks have a card each."""
    return lambda world_size, **options: CardPool(world_size, cuda_environment, **options)
