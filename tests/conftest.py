"""Guards around every test: nothing it sets up may outlive it. Also which cases the suite runs, and pools of ranks."""

from __future__ import annotations

import gc
import inspect
import itertools
import os
import signal
import sys
import tempfile
import threading
import zlib
from collections.abc import Callable, Generator, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import cast

import pytest
from xdist.scheduler import LoadFileScheduling

from dsplan.__main__ import COLLECT_AFTER
from dsplan.diagnostics.bench.rank_pool import RankPool
from tests.emulated_cuda.fixtures import CardPool, card, cuda_environment, emulated, two_cards  # noqa: F401
from tests.preload import PRELOAD, serve_forks, use_served_forks

# Variables through which one test could change what the next one does.
_GUARDED = ("RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "CUDA_VISIBLE", "DSPLAN_", "DS_", "ACCELERATE_", "FSDP_")

# Libraries tell the threads of a pool to end and do not wait for it (transformers, where it loads weights).
_THREAD_SECONDS = 30.0

# Folders with tests of half a minute each.
_STARTS_PROCESSES = ("run", "emit", "faults", "launchers", "launch", "bench")

# Folders whose tests share processes that start in seconds: one worker has all of a group.
_SHARING = {
    "tests/emulated_cuda/": "cards",
    "tests/strategies/cuda/": "cards",
    "tests/strategies/distributed/": "starter",
}


class _FilesAndGroups(LoadFileScheduling):  # type: ignore[misc]  # xdist's own are untyped
    """Hands out tests file by file, and all that share processes together."""

    def _split_scope(self, nodeid: str) -> str:
        shared = next((group for folder, group in _SHARING.items() if nodeid.startswith(folder)), None)
        return shared or str(super()._split_scope(nodeid))


def pytest_configure(config: pytest.Config) -> None:
    """Have all workers' processes forked from one that has imported what they need."""
    if hasattr(config, "workerinput"):
        use_served_forks()
    elif config.getvalue("dist") != "no":
        home = tempfile.TemporaryDirectory(prefix="dsplan-home-")
        config.add_cleanup(home.cleanup)
        serve_forks(Path(home.name))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadFileScheduling | None:
    """Return what hands out tests to workers."""
    return _FilesAndGroups(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark slow what a sweep leaves to the long checks. Files whose tests last longest come first, so that no worker
    is left alone with one.

    Raises:
        pytest.UsageError: a sweep picks no case, so that the suite would lose the behaviour, or names one that is none.
    """
    items.sort(key=lambda item: item.path.parent.name not in _STARTS_PROCESSES)
    swept: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sweep") is not None:
            swept.setdefault(item.nodeid.partition("[")[0], []).append(item)
    is_whole = not any("::" in argument for argument in config.args)
    for name, cases in swept.items():
        picked = _picked(cases)
        if is_whole and (not any(picked) or _unknown_cases(cases)):
            raise pytest.UsageError(
                f"the sweep of {name} picks no case, or names none of them: {_unknown_cases(cases)}"
            )
        for case, is_picked in zip(cases, picked, strict=True):
            if not is_picked:
                case.add_marker("slow")


def _picked(cases: list[pytest.Function]) -> list[bool]:
    """Return for each case of a test whether the suite runs it."""
    sweep = cases[0].get_closest_marker("sweep")
    assert sweep is not None
    suite, every = sweep.kwargs.get("suite", lambda: True), sweep.kwargs.get("every", 1)
    if callable(suite):
        names = inspect.signature(suite).parameters
        picked = [bool(suite(**{name: case.callspec.params[name] for name in names})) for case in cases]
    else:
        picked = [case.callspec.id in suite for case in cases]
    fast = [is_picked and not case.get_closest_marker("slow") for case, is_picked in zip(cases, picked, strict=True)]
    # Begun at a number from the test's name: else every table of strategies would be tried with its first alone.
    first = zlib.crc32(cases[0].originalname.encode()) % max(1, min(every, sum(fast)))
    numbers = itertools.count()
    return [is_fast and next(numbers) % every == first for is_fast in fast]


def _unknown_cases(cases: list[pytest.Function]) -> set[str]:
    sweep = cases[0].get_closest_marker("sweep")
    suite = sweep.kwargs.get("suite") if sweep is not None else None
    return set() if suite is None or callable(suite) else {*suite} - {case.callspec.id for case in cases}


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keeps the garbage collector from what test files import: looking through it was a sixth of the suite's time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(COLLECT_AFTER)
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
    return partial(RankPool, preload=PRELOAD)


@pytest.fixture(scope="session")
def new_card_pool(cuda_environment: Mapping[str, str]) -> Callable[..., RankPool]:  # noqa: F811
    """RankPool, whose ranks have a card each."""
    return lambda world_size, **options: CardPool(world_size, cuda_environment, **options)
