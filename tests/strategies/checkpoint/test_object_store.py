"""Checkpoints in an object store, here fsspec's in memory: whole or not there, whatever fails, and in bounded room."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from strategies.checkpoint import loading, object_store, outbox, retention, storage
from strategies.checkpoint.content import Content, text_of
from strategies.checkpoint.object_store import ObjectFile, ObjectPath, Unreachable, location
from strategies.checkpoint.saving import Saved, SaveOptions, Saver
from strategies.distributed.environment import Environment
from strategies.errors import BackendMissing, BrokenFile, CannotRun, DsplanError, UnknownName
from strategies.run_directory.spec import SupervisionOptions
from strategies.supervision import lineage
from tests.strategies import checkpoint_bodies, training_bodies
from tests.strategies.training_bodies import Recipe

SECRET = "AKIAsecret/with+signs"
CALLS = ("put_file", "pipe_file", "rm_file", "rm", "ls", "info", "find", "cat_file", "cat_ranges", "exists")
"""What dsplan calls of a store; the first four change something."""


class Killed(BaseException):
    """The process ends at this call."""


class Faults:
    """Stands before every call of the store: counts them, and does to them what a test says."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.before: Callable[[str], object] = lambda name: None
        self.pauses: list[float] = []

    def call(self, name: str) -> None:
        self.calls.append(name)
        self.before(name)

    @property
    def changes(self) -> int:
        """Return how many calls have changed something."""
        return sum(name in CALLS[:4] for name in self.calls)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Faults]:
    """An empty bucket at `memory://bucket`, reached through faults."""
    faults = Faults()
    inside = threading.local()

    def guarded(name: str, original: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            if getattr(inside, "call", False):  # the memory's own of itself
                return original(*arguments, **named)
            faults.call(name)
            inside.call = True
            try:
                return original(*arguments, **named)
            finally:
                inside.call = False

        return call

    monkeypatch.setattr(outbox, "_SENDERS", 1)  # one after the other, so that calls can be counted
    for name in CALLS:
        monkeypatch.setattr(MemoryFileSystem, name, guarded(name, getattr(MemoryFileSystem, name)))
    monkeypatch.setattr(object_store, "sleep", faults.pauses.append)
    monkeypatch.setenv("DSPLAN_STAGING", str(tmp_path / "staging"))
    system = fsspec.filesystem("memory")
    system.store.clear()
    system.pseudo_dirs[:] = ["", "/bucket"]
    yield faults
    system.store.clear()
    system.pseudo_dirs[:] = [""]


RUN = ObjectPath("memory://bucket/run")


def objects() -> list[str]:
    """Everything in the bucket, by name below the run."""
    return sorted(name.removeprefix("/bucket/run/") for name in MemoryFileSystem.store)


def saver() -> Saver:
    return Saver(Environment(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu")))


def what(step: int, tensors: int = 3) -> Saved:
    """Of a step: tensors of 4 KB that hold its number."""
    return Saved(
        step=step,
        tensors=lambda: {f"model/weight{number}": torch.full((1024,), float(step)) for number in range(tensors)},
        state=lambda: text_of(Content(progress={}, client_state={"step": step})),
    )


def step_of(path: Path | None) -> float | None:
    """The step of a checkpoint that is whole, in all of its tensors."""
    if path is None:
        return None
    checkpoint = loading.open_whole(path)
    values = set()
    for name, tensor in checkpoint.index.items():
        for box in tensor.boxes:
            with storage.BoxFile.open(path, box.file) as file:
                target = torch.empty(box.sizes)
                file.read(name, (0,), target)
                values |= set(target.tolist())
    assert values == {float(checkpoint.content.client_state["step"])}
    return values.pop()


def test_an_engine_saves_and_resumes(store: Faults) -> None:
    writer, reader = training_bodies.make_engine(Recipe()), training_bodies.make_engine(Recipe())
    for step in range(3):
        training_bodies.one_step(writer, step)
        path = writer.save_checkpoint("memory://bucket/run", {"at": step}, keep_last=2, asynchronous=step == 1)
    files = ["checksums.json", "rank-00000.safetensors", "state.json", "tensors.json"]
    assert str(path) == "memory://bucket/run/step-00000003"
    assert objects() == [f"step-0000000{step}/{name}" for step in (2, 3) for name in files]
    assert reader.load_checkpoint("memory://bucket/run") == (path, {"at": 2})
    assert checkpoint_bodies.values_of(reader) == checkpoint_bodies.values_of(writer)
    assert training_bodies.one_step(reader, 3) == training_bodies.one_step(writer, 3)
    assert str(writer.save_checkpoint("memory://bucket/run", keep_last=1)).endswith("step-00000004")
    assert reader.load_checkpoint("memory://bucket/other") == (None, {})
    assert {name.split("/")[0] for name in objects()} == {"step-00000004"}


def test_a_step_that_is_saved_again_takes_the_place_of_the_one_before(store: Faults) -> None:
    for again in ("", "-2", "-3"):
        assert saver().write(RUN, what(1), SaveOptions()).name == f"step-00000001{again}"
        assert {name.split("/")[0] for name in objects()} == {f"step-00000001{again}"}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_killed_at_every_call_the_last_complete_checkpoint_loads(store: Faults) -> None:
    saver().write(RUN, what(1), SaveOptions(keep_last=1))
    before = store.changes
    saver().write(RUN, what(2), SaveOptions(keep_last=1))
    steps = 2
    seen = []
    for number in range(store.changes - before):
        count = store.changes

        def die(name: str, last: int = count + number) -> None:
            if store.changes > last and name in CALLS[:4]:
                raise Killed

        store.before = die
        steps += 1
        with suppress(Killed):
            saver().write(RUN, what(steps), SaveOptions(keep_last=1))
        store.before = lambda name: None
        seen.append(step_of(retention.named_latest(RUN)) == steps)
        assert step_of(retention.named_latest(RUN)) in (steps, steps - 1)
        assert all(step_of(path) for path in retention.published(RUN))
        steps = int(step_of(retention.named_latest(RUN)) or 0)
    assert len(seen) >= 8
    assert seen == sorted(seen), "only when its checksums are there is a checkpoint"
    assert {True, False} == set(seen)
    saver().write(RUN, what(99), SaveOptions(keep_last=1))
    assert {name.split("/")[0] for name in objects()} == {"step-00000099"}, "what was left behind is removed"


def test_what_fails_for_a_while_is_tried_again_after_longer_and_longer_pauses(store: Faults) -> None:
    failures = dict.fromkeys(CALLS, 2)

    def fail(name: str) -> None:
        if failures[name]:
            failures[name] -= 1
            raise ConnectionError(SECRET)

    store.before = fail
    path = saver().write(RUN, what(1), SaveOptions())
    assert step_of(path) == 1
    assert failures["put_file"] == failures["pipe_file"] == failures["cat_ranges"] == 0
    assert all(0.25 <= pause <= 0.75 for pause in store.pauses[::2])
    assert all(0.5 <= pause <= 1.5 for pause in store.pauses[1::2])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_store_that_is_gone_is_one_line_and_the_next_save_goes_well(store: Faults, asynchronous: bool) -> None:
    one = saver()
    one.write(RUN, what(1), SaveOptions(keep_last=1))

    def gone(name: str) -> None:
        if name == "put_file":
            raise ConnectionError(f"https://{SECRET}@host/?X-Amz-Signature={SECRET}")

    store.before = gone

    def save() -> None:
        one.write(RUN, what(2), SaveOptions(asynchronous=asynchronous))
        one.wait()

    with pytest.raises(Unreachable) as caught:
        save()
    line = "step-00000002/tensors.json: the object store does not answer (ConnectionError)"
    file = "step-00000002/rank-00000.safetensors: the object store does not answer (ConnectionError)"
    assert str(caught.value).split(";")[0] in (f"{RUN}/{line}", f"{RUN}/{file}")
    assert len(store.pauses) == len(object_store._PAUSES)
    store.before = lambda name: None
    assert step_of(retention.named_latest(RUN)) == 1
    one.write(RUN, what(3), SaveOptions(keep_last=1))
    assert {name.split("/")[0] for name in objects()} == {"step-00000003"}
    assert not list(Path(os.environ["DSPLAN_STAGING"]).rglob("*.safetensors"))


def test_no_text_of_a_failure_is_shown(store: Faults, capfd: pytest.CaptureFixture[str]) -> None:
    class ClientError(Exception):
        response: ClassVar = {"Error": {"Code": "InvalidAccessKeyId", "Message": SECRET}}

    class NoCredentialsError(Exception):
        pass

    lines = []
    for problem in (ClientError(SECRET), PermissionError(SECRET), NoCredentialsError(SECRET), OSError(5, SECRET)):

        def fail(name: str, problem: Exception = problem) -> None:
            raise problem

        store.before = fail
        with pytest.raises(Unreachable) as caught:
            saver().write(RUN, what(1), SaveOptions())
        lines.append(str(caught.value))
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__
    assert lines == [
        f"{RUN}: the object store denies access (InvalidAccessKeyId); see its library's own variables",
        f"{RUN}: the object store denies access (PermissionError); see its library's own variables",
        f"{RUN}: no credentials for the object store; give them by its library's own variables",
        f"{RUN}: the object store does not answer (OSError); look at the network and the address; what is there already"
        " stays",
    ]
    assert SECRET not in "".join([*lines, *capfd.readouterr()])


def test_a_bucket_that_is_not_there_is_named(store: Faults) -> None:
    nowhere = location("memory://nowhere/run")
    for use in (lambda: retention.begin(nowhere, 1), lambda: retention.named_latest(nowhere)):
        with pytest.raises(Unreachable, match="memory://nowhere/run: there is no bucket nowhere; make it, or name"):
            use()


def test_packages_and_schemes_that_are_not_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*arguments: Any, **named: Any) -> Any:
        raise ImportError("no such package")

    with pytest.raises(UnknownName, match="unknown object store 's4'; nearest: s3"):
        retention.named_latest(location("s4://bucket/run"))
    monkeypatch.setattr(fsspec, "filesystem", missing)
    for scheme, package, extra in (("s3", "s3fs", "s3"), ("gs", "gcsfs", "gs"), ("az", "adlfs", "az")):
        with pytest.raises(BackendMissing) as caught:
            object_store.require_usable(location(f"{scheme}://bucket/run"))
        assert str(caught.value).partition(": ")[2] == (
            f"needs {package}, which is not installed; pip install 'dsplan[{extra}]'"
        )


def test_addresses_are_paths_that_keep_their_address() -> None:
    path = location("s3://bucket/a/run/")
    assert (str(path), path.name, str(path.parent), str(path / "x")) == (
        "s3://bucket/a/run",
        "run",
        "s3://bucket/a",
        "s3://bucket/a/run/x",
    )
    assert path == location(Path("s3://bucket/a/run")) == pickle.loads(pickle.dumps(path)) == path.absolute()
    assert [type(location(text)) for text in ("runs/a", "/runs/s3:/a", "file:///runs")] == [type(Path())] * 3
    with pytest.raises(CannotRun, match="lies in an object store"):
        os.listdir(path)


@pytest.mark.parametrize("rest", [f"key:{SECRET}@bucket/run", f"bucket/run?secret={SECRET}", ""])
def test_an_address_with_a_secret_is_refused_without_it(rest: str) -> None:
    with pytest.raises(CannotRun) as caught:
        location(f"s3://{rest}")
    assert "secret" not in str(caught.value)
    assert "give s3://BUCKET/PREFIX" in str(caught.value)


def test_damage_is_found_before_anything_changes(store: Faults) -> None:
    path = saver().write(RUN, what(1), SaveOptions())
    whole = saver().write(RUN, what(2), SaveOptions())
    name = "/bucket/run/step-00000001/rank-00000.safetensors"
    data = bytearray(MemoryFileSystem.store[name].getvalue())
    data[-1] ^= 1
    fsspec.filesystem("memory").pipe_file(name, bytes(data))
    remedy = f"load {whole}, the newest that is whole"
    with pytest.raises(BrokenFile, match="its checksum is not what was written; " + remedy):
        loading.open_whole(path)
    fsspec.filesystem("memory").rm_file(name)
    with pytest.raises(BrokenFile, match="rank-00000.safetensors: is missing; " + remedy):
        loading.open_whole(path)


def test_files_wait_in_bounded_room(store: Faults, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    largest = 0

    def look(name: str) -> None:
        nonlocal largest
        sizes = [path.stat().st_size for path in tmp_path.rglob("*.safetensors")]
        largest = max(largest, sum(sizes))

    store.before = look
    monkeypatch.setenv("DSPLAN_STAGING_GB", "0.00005")
    one = saver()
    path = one.write(RUN, what(1, tensors=40), SaveOptions(asynchronous=True))
    last = one.write(RUN, what(2, tensors=40), SaveOptions())
    files = [name for name in object_store.names_in(last) if name.startswith("rank-")]
    assert files[:2] == ["rank-00000-00001.safetensors", "rank-00000-00002.safetensors"]
    assert len(files) > 5, "160 KB in files of at most 25 KB"
    assert 20_000 < largest <= 50_000 + 1_000, "headers are not counted"
    assert (step_of(path), step_of(last)) == (1, 2)
    for text in ("none", "-1", "nan"):
        monkeypatch.setenv("DSPLAN_STAGING_GB", text)
        with pytest.raises(CannotRun, match=f"DSPLAN_STAGING_GB={text} is no size"):
            saver().write(RUN, what(3), SaveOptions())


def test_what_a_killed_process_left_waiting_is_removed_and_what_another_sends_stays(
    store: Faults, tmp_path: Path
) -> None:
    left = tmp_path / "staging" / "sending-left"
    left.mkdir(parents=True)
    (left / "rank-00000.safetensors").write_text("half")
    other = outbox.Staging(1)
    outbox.Staging(1)
    assert not left.exists()
    assert other.folder.exists()


def test_a_save_without_room_for_a_copy_waits_for_files_and_not_for_the_store(store: Faults) -> None:
    may_send = threading.Event()
    store.before = lambda name: may_send.wait() if name == "put_file" else None
    values = torch.ones(1024)
    one = saver()
    saved = Saved(
        step=1,
        tensors=lambda: {"model/weight0": values},
        state=lambda: text_of(Content(progress={}, client_state={"step": 1})),
    )
    path = one.write(RUN, saved, SaveOptions(asynchronous=True, copies=False))
    values.zero_()  # training goes on
    assert not path.is_dir()
    may_send.set()
    one.wait()
    assert step_of(path) == 1


def test_ranges_are_read_and_more_at_once_from_end_to_end(store: Faults, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_RANGE_BYTES", 1000)
    monkeypatch.setattr(object_store, "_LEAST_BYTES", 100)
    data = os.urandom(100_000)
    path = RUN / "object"
    path.write_bytes(data)
    with ObjectFile.open(path) as file:
        file.seek(50_000)
        assert file.read(10) == data[50_000:50_010]
        assert store.calls.count("cat_ranges") == 1
        assert len(file._data) == 100  # type: ignore[attr-defined]
        file.seek(0)
        assert file.readall() == data  # type: ignore[attr-defined]
    assert store.calls.count("cat_ranges") <= 2 + 100_000 // 8000 + 4


def test_the_launcher_asks_no_store_and_a_run_keeps_two(store: Faults, tmp_path: Path) -> None:
    one = saver()
    rows = []
    for step in range(1, 5):
        path = one.write(RUN, what(step), SaveOptions())
        rows.append(lineage.RunCheckpoint(path=str(path), step=step, is_automatic=True, run="a"))
        lineage.note(tmp_path, rows[-1])
    calls = len(store.calls)
    lineage.note_complete(tmp_path, rows[0].path)
    lists = lineage.read_lineage(tmp_path)
    assert (list(lists.listed), lists.in_stores, lists.damaged_lines) == (rows, {rows[0].path}, 0)
    assert len(store.calls) == calls
    gone = lineage.outdated(lists.listed, retention.KEPT, run="a")
    assert [str(path) for path in gone] == [rows[1].path, rows[0].path]
    for path in gone:
        retention.remove(path)
    assert [checkpoint.step for checkpoint in lineage.newest_first(lists.listed)] == [4, 3]


def test_one_failure_of_every_kind_is_the_same_on_all_ranks() -> None:
    problem = Unreachable("s3://bucket/run", "does not answer", "wait")
    again = pickle.loads(pickle.dumps(problem))
    assert isinstance(again, Unreachable)
    assert isinstance(again, DsplanError)
    assert str(again) == str(problem)


def test_the_flag_names_a_store() -> None:
    from strategies.launch.options import DEFAULT_SUPERVISION, RequestedSupervision

    options = RequestedSupervision(checkpoint_dir=location("s3://bucket/run")).over(DEFAULT_SUPERVISION)
    assert isinstance(options, SupervisionOptions)
    assert options.checkpoint_directory == "s3://bucket/run"
