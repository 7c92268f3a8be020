"""Checkpoints that somebody damaged or made on purpose: the kinds, and what tests run with each."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from strategies.checkpoint import reading
from strategies.errors import DsplanError
from tests.strategies import training_bodies
from tests.strategies.training_bodies import Recipe, Samples, TinyModel

RANK_FILE = "rank-00000.safetensors"
UP = "model/blocks.0.up.weight"
MOMENT = "optimizer/exp_avg/blocks.0.up.weight"
Damage = Callable[[Path], None]


class Counted(TinyModel):
    """Keeps a number beside its tensors, and takes nothing else back."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(ids, targets)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"] + 0


def make_engine(recipe: Recipe, model: type[nn.Module] = Counted) -> Any:
    """An engine with all that a checkpoint holds."""
    for generator in (random.seed, numpy.random.seed, torch.manual_seed):
        generator(5)
    section = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 20}}
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3}}
    engine, *_ = training_bodies.initialize(
        model=model(),
        plan=recipe.plan(),
        training_data=Samples(),
        config={"scheduler": section, **(fp16 if recipe.precision == "fp16" else {})},
    )
    return engine


def state_of(engine: Any) -> dict[str, Any]:
    """Everything of an engine that loading changes, on this rank; tensors as their bytes."""
    optimizer = getattr(engine.optimizer, "optimizer", engine.optimizer)
    numpys = [bytes(part) if isinstance(part, numpy.ndarray) else part for part in numpy.random.get_state()]
    loader = {key: value for key, value in vars(engine.dataloader).items() if isinstance(value, (int, bool))}
    scheduler = engine.lr_scheduler
    return {
        "tensors": [_bytes(tensor) for kind in engine.state_tensors().values() for tensor in kind],
        "states": [{key: _plain(entry) for key, entry in state.items()} for state in optimizer.state.values()],
        "options": [{k: _plain(v) for k, v in group.items() if k != "params"} for group in optimizer.param_groups],
        "progress": copy.deepcopy(engine._progress()),
        "scheduler": None if scheduler is None else copy.deepcopy(scheduler.state_dict()),
        "data": loader,
        "random": [_bytes(torch.get_rng_state()), random.getstate(), numpys],
        "extra": getattr(engine.module, "calls", None),
        "client_state": copy.deepcopy(engine.client_state),
    }


def _plain(value: Any) -> Any:
    return _bytes(value) if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _bytes(tensor: torch.Tensor) -> bytes:
    local = getattr(tensor, "_local_tensor", tensor).detach().cpu().contiguous()
    return bytes(local.reshape(-1).view(torch.uint8).numpy())


# How checkpoints are changed, with sums that match what they have become.


def seal(folder: Path) -> None:
    """Give a changed checkpoint the checksums that dsplan would have written."""
    sums = {
        path.name: {"bytes": path.stat().st_size, "crc32": zlib.crc32(path.read_bytes())}
        for path in folder.iterdir()
        if path.is_file() and not path.is_symlink() and path.suffix in (".json", ".safetensors")
        if path.name != "checksums.json"
    }
    seal_with(folder, sums)


def seal_with(folder: Path, sums: dict[str, Any]) -> None:
    crc = zlib.crc32(json.dumps(sums, sort_keys=True).encode())
    (folder / "checksums.json").write_text(json.dumps({"files": sums, "crc32": crc}))


def sums_of(folder: Path) -> dict[str, Any]:
    by_file: dict[str, Any] = json.loads((folder / "checksums.json").read_text())["files"]
    return by_file


def sums(change: Callable[[dict[str, Any]], object]) -> Damage:
    def damage(folder: Path) -> None:
        values = sums_of(folder)
        change(values)
        seal_with(folder, values)

    return damage


def edited(name: str, change: Callable[[Any], object]) -> Damage:
    """Change a JSON file; a list that `change` returns replaces it."""

    def damage(folder: Path) -> None:
        values = json.loads((folder / name).read_text())
        changed = change(values)
        (folder / name).write_text(json.dumps(changed if isinstance(changed, list) else values))
        seal(folder)

    return damage


def state(change: Callable[[Any], object]) -> Damage:
    return edited("state.json", change)


def index(change: Callable[[Any], object]) -> Damage:
    return edited("tensors.json", change)


def box(name: str, **values: Any) -> Damage:
    return index(lambda all: all[name]["boxes"][0].update(values))


def progress(**values: Any) -> Damage:
    return state(lambda all: all["progress"].update(values))


def options(**values: Any) -> Damage:
    return state(lambda all: all["optimizer"]["groups"][0]["options"].update(values))


def text(name: str, change: Callable[[str], str]) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).write_text(change((folder / name).read_text()))
        seal(folder)

    return damage


def data(name: str, content: bytes) -> Damage:
    def damage(folder: Path) -> None:
        (folder / name).write_bytes(content)
        seal(folder)

    return damage


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    """Change the tensors themselves, and the list with them."""

    def damage(folder: Path) -> None:
        values = load_file(folder / RANK_FILE)
        change(values)
        save_file({name: tensor.contiguous() for name, tensor in values.items()}, folder / RANK_FILE)
        listed, words = {}, {torch.int64: "I64", torch.float64: "F64", torch.uint8: "U8", torch.float32: "F32"}
        for name, tensor in values.items():
            offsets, sizes = [0] * tensor.dim(), list(tensor.shape)
            whole = {"offsets": offsets, "sizes": sizes, "file": RANK_FILE, "key": name}
            listed[name] = {"dtype": words[tensor.dtype], "shape": sizes, "boxes": [whole]}
        (folder / "tensors.json").write_text(json.dumps(listed))
        seal(folder)

    return damage


def header(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Change the header of the file of tensors, and nothing else of it."""

    def damage(folder: Path) -> None:
        content = (folder / RANK_FILE).read_bytes()
        length = int.from_bytes(content[:8], "little")
        values = json.loads(content[8 : 8 + length])
        change(values)
        head = json.dumps(values).encode()
        (folder / RANK_FILE).write_bytes(len(head).to_bytes(8, "little") + head + content[8 + length :])
        seal(folder)

    return damage


def replaced(name: str, make: Callable[[Path], object]) -> Damage:
    """Put something else where a file was."""

    def damage(folder: Path) -> None:
        path = folder / name
        path.unlink()
        make(path)

    return damage


def latest(make: Callable[[Path], object]) -> Damage:
    def damage(folder: Path) -> None:
        path = folder.parent / "latest"
        path.unlink()
        make(path)

    return damage


def outside(path: Path) -> None:
    """A link to a good file that lies elsewhere."""
    path.symlink_to(path.parent.parent.parent / "outside")


def hole(folder: Path) -> None:
    """24 of 64 rows are in no box, and in no file."""
    rows = load_file(folder / RANK_FILE)[UP][:40]
    tensors(lambda all: all.update({UP: rows}))(folder)
    index(lambda all: all[UP].update(shape=[64, 16]))(folder)


def overlap(folder: Path) -> None:
    """Two boxes of 40 and 24 rows, the second from row 30 on."""
    values = load_file(folder / RANK_FILE)
    whole = values.pop(UP)
    parts = {"one": whole[:40], "two": whole[40:]}
    tensors(lambda all: (all.pop(UP), all.update({f"model/{key}": part for key, part in parts.items()})))(folder)

    def list_both(all: Any) -> None:
        del all["model/one"], all["model/two"]
        places = [([0, 0], [40, 16], "model/one"), ([30, 0], [24, 16], "model/two")]
        boxes = [{"offsets": o, "sizes": s, "file": RANK_FILE, "key": k} for o, s, k in places]
        all[UP] = {"dtype": "F32", "shape": [64, 16], "boxes": boxes}

    index(list_both)(folder)


def sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(2**41)


def linked_out(folder: Path) -> None:
    elsewhere = folder.parent.parent / "elsewhere"
    folder.rename(elsewhere)
    folder.symlink_to(elsewhere)


def new_line_in_name(folder: Path) -> None:
    name = "rank\n00001.safetensors"
    (folder / name).write_bytes(b"x")
    seal(folder)


class Bomb:
    """Leaves a mark that shows afterwards that it was unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.canary),)


def canary_of(folder: Path) -> Path:
    return folder.parent.parent / "canary"


def planted(name: str, *, is_listed: bool) -> Damage:
    def damage(folder: Path) -> None:
        content = pickle.dumps(Bomb(canary_of(folder)))
        (folder / name).write_bytes(content)
        if is_listed:
            sums(lambda all: all.update({name: {"bytes": len(content), "crc32": zlib.crc32(content)}}))(folder)

    return damage


def nan_step(all: dict[str, torch.Tensor]) -> None:
    all["optimizer/step/positions"] = torch.tensor(float("nan"))


def _flipped(folder: Path) -> None:
    content = bytearray((folder / RANK_FILE).read_bytes())
    content[-5] ^= 16
    (folder / RANK_FILE).write_bytes(content)


def _cut(folder: Path) -> None:
    content = (folder / RANK_FILE).read_bytes()
    (folder / RANK_FILE).write_bytes(content[: len(content) // 2])


def _span(key: str, change: Callable[[list[int]], list[int]]) -> Damage:
    return header(lambda all: all[key].update(data_offsets=change(all[key]["data_offsets"])))


_DEEP = "[" * 5000 + "]" * 5000
_FILE = {"bytes": 1, "crc32": 1}
KINDS: dict[str, tuple[str, Damage]] = {
    # checksums.json
    "no checksums": ("checksums.json", replaced("checksums.json", lambda path: None)),
    "checksums empty": ("checksums.json", replaced("checksums.json", lambda path: path.write_text(""))),
    "checksums not UTF-8": ("checksums.json", replaced("checksums.json", lambda path: path.write_bytes(b"{\xff}"))),
    "checksums a directory": ("checksums.json", replaced("checksums.json", Path.mkdir)),
    "checksums edited": (
        "checksums.json",
        lambda folder: (
            (folder / "checksums.json").write_text(json.dumps({"files": sums_of(folder), "crc32": 1})) and None
        ),
    ),
    "a size that is a text": ("checksums.json", sums(lambda all: all[RANK_FILE].update(bytes="12"))),
    "a size that is negative": ("checksums.json", sums(lambda all: all[RANK_FILE].update(bytes=-1))),
    "an absolute path with a checksum": ("/etc/hostname", sums(lambda all: all.update({"/etc/hostname": _FILE}))),
    "a path that leads up with a checksum": ("../../outside", sums(lambda all: all.update({"../../outside": _FILE}))),
    "a file without a checksum": (RANK_FILE, sums(lambda all: all.pop(RANK_FILE))),
    "a planted pickle with a checksum": ("model.pt", planted("model.pt", is_listed=True)),
    "a new line in a name": ("\\n", new_line_in_name),
    # state.json
    "no state": ("state.json", replaced("state.json", lambda path: None)),
    "state empty": ("state.json", data("state.json", b"")),
    "state a pipe": ("state.json", replaced("state.json", os.mkfifo)),
    "state a link out": ("state.json", replaced("state.json", outside)),
    "state a device": ("state.json", replaced("state.json", lambda path: path.symlink_to("/dev/zero"))),
    "state of two terabytes": ("state.json", replaced("state.json", sparse)),
    "state not UTF-8": ("state.json", data("state.json", b'{"format": 2, "\xff": 1}')),
    "state with a key twice": ("state.json", text("state.json", lambda old: old.replace("{", '{"format": 2,', 1))),
    "state nested 5,000 deep": ("state.json", text("state.json", lambda old: old.replace("{", f'{{"x": {_DEEP},', 1))),
    "state a list": ("state.json", state(lambda all: [all])),
    "another version": ("state.json", state(lambda all: all.update(format=99))),
    "an unknown field": ("state.json", state(lambda all: all.update(run="rm"))),
    "client_state a list": ("state.json", state(lambda all: all.update(client_state=[1]))),
    "progress emptied": ("state.json", state(lambda all: all["progress"].clear())),
    "progress without a loss scale": ("state.json", state(lambda all: all["progress"].pop("scaler"))),
    "steps as a text": ("state.json", progress(global_steps="1")),
    "steps negative": ("state.json", progress(global_steps=-1)),
    "steps infinite": (
        "state.json",
        text("state.json", lambda old: old.replace('global_steps": 1', 'global_steps": 1e400')),
    ),
    "steps true": ("state.json", progress(skipped_steps=True)),
    "a loss scale that is no number": ("state.json", progress(scaler={"scale": float("nan"), "_growth_tracker": 0})),
    "a loss scale of nothing": ("state.json", progress(scaler={"scale": 0, "_growth_tracker": 0})),
    "the scheduler's method replaced": (
        "state.json",
        state(lambda all: all["progress"]["scheduler"].update(step="os.system")),
    ),
    "the scheduler's steps a text": (
        "state.json",
        state(lambda all: all["progress"]["scheduler"].update(last_epoch="x")),
    ),
    "the scheduler's rates too many": (
        "state.json",
        state(lambda all: all["progress"]["scheduler"].update(starting=[0.1, 0.1])),
    ),
    "a place before the data": ("samples", state(lambda all: all["progress"]["data"].update(samples=-12))),
    "a place behind the data": ("samples", state(lambda all: all["progress"]["data"].update(samples=10**12))),
    "a place that is a text": ("epoch", state(lambda all: all["progress"]["data"].update(epoch="two"))),
    "a rate that is a text": ("state.json", options(lr="0.1")),
    "a rate that is no number": ("state.json", options(lr=float("nan"))),
    "betas of three": ("state.json", options(betas=[0.9, 0.9, 0.9])),
    "groups as an object": ("state.json", state(lambda all: all["optimizer"].update(groups={"a": 1}))),
    "another optimizer": ("step-00000001", state(lambda all: all["optimizer"].update({"class": "SGD"}))),
    "an alias of a number": ("state.json", state(lambda all: all.update(aliases={"head.weight": 7}))),
    "a model's file that leads up": ("state.json", state(lambda all: all.update(model_files={"../config.json": {}}))),
    "a module that refuses its state": ("state.json", state(lambda all: all.update(extra={"_extra_state": {}}))),
    # tensors.json
    "no list of tensors": ("tensors.json", replaced("tensors.json", lambda path: None)),
    "a hole": ("tensors.json", hole),
    "an overlap": ("tensors.json", overlap),
    "a box outside": ("tensors.json", box(UP, offsets=[10, 0])),
    "an offset that is negative": ("tensors.json", box(UP, offsets=[-1, 0])),
    "an offset with a fraction": ("tensors.json", box(UP, offsets=[0.5, 0])),
    "a box of other dimensions": ("tensors.json", box(UP, offsets=[0], sizes=[1024])),
    "a shape that is a text": ("tensors.json", index(lambda all: all[UP].update(shape="64"))),
    "boxes as a number": ("tensors.json", index(lambda all: all[UP].update(boxes=3))),
    "an unknown dtype": ("tensors.json", index(lambda all: all[UP].update(dtype="F128"))),
    "10^15 elements": ("tensors.json", index(lambda all: all[UP].update(shape=[10**15]))),
    "10^15 elements in a box": (
        RANK_FILE,
        index(
            lambda all: (
                all[UP].update(shape=[10**15, 1]),
                all[UP]["boxes"][0].update(sizes=[10**15, 1], offsets=[0, 0]),
            )
        ),
    ),
    "a file by an absolute path": ("tensors.json", box(UP, file="/etc/hostname")),
    "a file by a path that leads up": ("tensors.json", box(UP, file="../../outside")),
    "a file that is no file of tensors": ("tensors.json", box(UP, file="state.json")),
    "a key that is not there": (RANK_FILE, box(UP, key="ghost")),
    "a tensor not listed": (RANK_FILE, index(lambda all: all.pop(UP))),
    "a tensor of no kind": ("tensors.json", index(lambda all: all.update(ghost=all[UP]))),
    "one box for two tensors": ("tensors.json", index(lambda all: all.update({"model/ghost": all[UP]}))),
    "a weight missing": ("step-00000001", tensors(lambda all: all.pop(UP))),
    "a weight too many": ("step-00000001", tensors(lambda all: all.update({"model/ghost": torch.ones(2)}))),
    "a weight of another shape": ("step-00000001", tensors(lambda all: all.update({UP: torch.ones(8, 128)}))),
    "a weight of whole numbers": (
        "step-00000001",
        tensors(lambda all: all.update({UP: torch.ones(64, 16, dtype=torch.int64)})),
    ),
    "a moment missing": ("step-00000001", tensors(lambda all: all.pop(MOMENT))),
    "a moment of another shape": ("step-00000001", tensors(lambda all: all.update({MOMENT: torch.ones(3)}))),
    "a moment of no weight": (
        "step-00000001",
        tensors(lambda all: all.update({"optimizer/exp_avg/ghost": torch.ones(3)})),
    ),
    "a step that is no number": ("step-00000001", tensors(nan_step)),
    "a step that is negative": (
        "step-00000001",
        tensors(lambda all: all.update({"optimizer/step/positions": torch.tensor(-1.0)})),
    ),
    "random numbers of torch that are none": (
        "step-00000001",
        tensors(lambda all: all.update({"rng/torch/0": torch.ones(9, dtype=torch.uint8)})),
    ),
    "random numbers of Python that are none": ("step-00000001", tensors(lambda all: all["rng/python/0"].zero_())),
    "random numbers of numpy beyond their end": ("step-00000001", tensors(lambda all: all["rng/numpy/0"].fill_(10**9))),
    # the file of tensors
    "no file of tensors": (RANK_FILE, replaced(RANK_FILE, lambda path: None)),
    "a flipped bit": (RANK_FILE, _flipped),
    "a file that is cut": (RANK_FILE, _cut),
    "a file that is empty": (RANK_FILE, data(RANK_FILE, b"")),
    "a file that is a pipe": (RANK_FILE, replaced(RANK_FILE, os.mkfifo)),
    "a file that is a link out": (RANK_FILE, replaced(RANK_FILE, outside)),
    "a file that is a directory": (RANK_FILE, replaced(RANK_FILE, Path.mkdir)),
    "a header longer than the file": (RANK_FILE, data(RANK_FILE, (10**6).to_bytes(8, "little") + b"{}")),
    "a header of 2^63 bytes": (RANK_FILE, data(RANK_FILE, (2**63).to_bytes(8, "little") + b"{}")),
    "a header that is cut": (RANK_FILE, data(RANK_FILE, (2).to_bytes(8, "little") + b'{"')),
    "a header with a key twice": (RANK_FILE, data(RANK_FILE, (14).to_bytes(8, "little") + b'{"a":1,"a":1} ')),
    "two tensors in the same bytes": (RANK_FILE, _span(UP, lambda old: [old[0] - 64, old[1] - 64])),
    "a tensor shorter than its box": (RANK_FILE, _span(UP, lambda old: [old[0], old[1] - 64])),
    "a tensor of another dtype": (RANK_FILE, header(lambda all: all[UP].update(dtype="I32"))),
    # what names the checkpoint
    "a pickle of before": ("step-00000001", planted(".metadata", is_listed=False)),
    "latest absolute": ("latest", latest(lambda path: path.write_text("/etc"))),
    "latest leads up": ("latest", latest(lambda path: path.write_text("../run/step-00000001"))),
    "latest empty": ("latest", latest(lambda path: path.write_text(""))),
    "latest not UTF-8": ("latest", latest(lambda path: path.write_bytes(b"step-\xff\xfe"))),
    "latest of ten megabytes": ("latest", latest(lambda path: path.write_text("x" * 10**7))),
    "latest a pipe": ("latest", latest(os.mkfifo)),
    "latest a device": ("latest", latest(lambda path: path.symlink_to("/dev/zero"))),
    "the checkpoint a link out": ("step-00000001", linked_out),
}
"""By name: the file that has to be named, and what is done to the checkpoint `step-00000001`."""


@contextmanager
def failing_reads(*, fails: bool) -> Iterator[None]:
    """Inside, this rank's disk gives back none of the large files."""
    original = reading._exactly

    def broken(file: Any, path: Path, size: int) -> bytes:
        if path.suffix == ".safetensors":
            raise OSError(5, "Input/output error")
        return original(file, path, size)

    reading._exactly = broken if fails else original  # type: ignore[assignment]
    try:
        yield
    finally:
        reading._exactly = original  # type: ignore[assignment]


def save_one(recipe: Recipe, directory: str) -> None:
    """A checkpoint after one step."""
    engine = make_engine(recipe)
    training_bodies.one_step(engine, 0)
    engine.save_checkpoint(directory)


def refused(recipe: Recipe, hostile: dict[str, str]) -> tuple[dict[str, str], list[str], list[list[float]]]:
    """Try to load checkpoints that no rank may load, with an engine that has made two steps.

    What each refusal said, the names of those that changed something on this rank, and the next two losses of an engine
    that never tried and of this one.
    """
    messages, changed, losses = dict[str, str](), list[str](), list[list[float]]()
    for directories in ({}, hostile):
        engine = make_engine(recipe)
        for step in range(2):
            training_bodies.one_step(engine, step)
        for name, directory in directories.items():
            before = state_of(engine)
            try:
                with failing_reads(fails=name == DISK_FAILS and engine.environment.rank == 1):
                    engine.load_checkpoint(directory)
                messages[name] = "loaded"
            except DsplanError as problem:
                messages[name] = str(problem)
            if state_of(engine) != before:
                changed.append(name)
        losses.append([training_bodies.one_step(engine, step) for step in (2, 3)])
    return messages, changed, losses


def a_box_missing(folder: Path) -> None:
    """The last box of the first tensor that has several; where none has, half of one."""

    def change(all: Any) -> None:
        boxes = next((entry["boxes"] for entry in all.values() if len(entry["boxes"]) > 1), None)
        if boxes is not None:
            boxes.pop()
        else:
            all[UP]["boxes"][0]["sizes"][0] //= 2

    index(change)(folder)


def rank_1_draws_nothing(folder: Path) -> None:
    """Damage what only rank 1 reads."""
    for path in folder.glob("*.safetensors"):
        values = load_file(path)
        if "rng/torch/1" in values:
            values["rng/torch/1"].zero_()
            save_file(values, path)
    seal(folder)


def rank_1s_file_flipped(folder: Path) -> None:
    content = bytearray((folder / "rank-00001.safetensors").read_bytes())
    content[-5] ^= 16
    (folder / "rank-00001.safetensors").write_bytes(content)


DISK_FAILS = "a disk that fails on one rank"
ON_RANKS: dict[str, tuple[str, Damage]] = {
    "a box missing": ("tensors.json", a_box_missing),
    "random numbers of rank 1": ("step-00000001", rank_1_draws_nothing),
    "a bit of rank 1's file": ("rank-00001.safetensors", rank_1s_file_flipped),
    DISK_FAILS: (".safetensors", lambda folder: None),
    **{
        name: KINDS[name] for name in ("progress emptied", "the scheduler's method replaced", "a place behind the data")
    },
    "a module that refuses its state": KINDS["a module that refuses its state"],
}
"""For two ranks; some of these only one of them can find."""
