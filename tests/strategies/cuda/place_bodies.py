"""Functions that processes with cards run in `test_places.py`."""

from __future__ import annotations

import contextlib
import csv
import gc
import io
import json
import math
import os
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import torch

from dsplan.mpi.arrays import own_memory, write_into
from hardware_db.fingerprint import fingerprint
from hardware_db.microbench.grid import Point, Rate
from hardware_db.microbench.runner import measure_on_rank
from hardware_db.probe import probe
from strategies.autoplan.live import machine_rates
from strategies.data.loader import DistributedDataLoader
from strategies.engine.initialize import initialize
from strategies.engine.telemetry import MemoryProfiler
from strategies.errors import CannotRun
from strategies.modules.kernels import install_kernels
from strategies.supervision.failures import NotFinite, failure_of
from strategies.supervision.not_finite import FiniteWatch
from strategies.telemetry.step_rows import StepRows
from strategies.telemetry.training_monitor import TrainingMonitor
from strategies.torch_compat.dispatch import TorchDispatchMode
from strategies.variables import REQUEST
from tests.strategies import adapter_bodies, checkpoint_bodies, engine_bodies, training_bodies
from tests.strategies.training_bodies import Recipe

CARD = "cuda"
PAUSE = 0.2


def written_through_mpi(folder: Path) -> tuple[bool, list[float]]:
    """Return whether MPI may receive into a tensor's own memory, and the tensor after values are written to it."""
    tensor = torch.zeros(3, device=CARD)
    into = own_memory(tensor)
    write_into(tensor, np.arange(3, dtype=np.float32), "weights")
    return into is not None, tensor.tolist()


def ended(folder: Path) -> tuple[str, bool]:
    """The kind of ending that an error of the driver is, and whether it counts as expected."""
    failure = failure_of(RuntimeError("Found no NVIDIA driver on your system"), folder)
    return failure.kind, failure.expected


def measured(folder: Path) -> tuple[str, str]:
    """The answer of a rank of `dsplan bench` to a copy that only a card makes."""
    rate = cast("Rate", measure_on_rank(Point(operation="host_to_device", size=1 << 20), 1))
    return type(rate).__name__, rate.unit


def random_numbers_beside_measuring(folder: Path) -> tuple[list[str], bool]:
    """Return what is measured of a card before a first plan, and whether the script's numbers go on as they were."""
    torch.cuda.manual_seed(3)
    expected = torch.rand(4, device=CARD)
    torch.cuda.manual_seed(3)
    with mock.patch("strategies.autoplan.live.wanted_points", return_value=(Point(operation="memory", size=4096),)):
        rates = machine_rates(torch.device(CARD, 0), fingerprint(probe()))
    return [rate.operation for rate in rates], torch.equal(torch.rand(4, device=CARD), expected)


def monitored(folder: Path) -> tuple[bool, bool]:
    """Return whether a monitor that is made without an engine looks at the card of its process."""
    held = torch.zeros(1 << 20, device=CARD)
    monitor = TrainingMonitor(log_dir=folder, save_logs=False, quiet=True, sample_seconds=60)
    stats = monitor.get_system_stats()
    monitor.close()
    return (stats["gpu_memory"] or 0) >= held.nbytes, "gpu_temperature_celsius" in stats


def ended_by_its_losses(folder: Path) -> tuple[list[bool], str]:
    """Return whether a run is clean after each step of losses that lie on the card, and the line that ends it."""
    engine = SimpleNamespace(configuration=SimpleNamespace(backend="torch"), global_steps=7)
    watch, clean = FiniteWatch(engine, limit=3, sees_gradients=False), list[bool]()
    for value in (math.nan, 1.0, math.inf, math.nan, math.nan):
        watch.loss_is(torch.tensor(value, device=CARD))
        try:
            watch.step_ended()
        except NotFinite as ending:
            return clean, str(ending)
        clean.append(watch.is_clean)
    return clean, ""


def saved_in_the_background(folder: Path) -> tuple[bool, bool]:
    """Return whether a checkpoint has the weights of its request, and whether those of the card changed since."""
    engine = training_bodies.make_engine(Recipe())
    training_bodies.one_step(engine, 0)
    expected = training_bodies.whole_parameters(engine)
    path = engine.save_checkpoint(folder, asynchronous=True)
    training_bodies.one_step(engine, 1)
    later = training_bodies.whole_parameters(engine)
    engine.wait_for_checkpoint()
    engine.load_checkpoint(path)
    saved = training_bodies.whole_parameters(engine)
    first, second = (all(torch.equal(saved[name], other[name]) for name in saved) for other in (expected, later))
    return first, second


def pinned_by_the_engine(folder: Path) -> bool:
    """Return whether batches of an engine's own loader are in pinned memory, which nobody asked for."""
    plan, data = Recipe().plan(), checkpoint_bodies.Numbers()
    _, _, loader, _ = initialize(model=torch.nn.Linear(1, 1), plan=plan, training_data=data)
    assert loader is not None
    return bool(next(iter(loader)).is_pinned())


def pinned(folder: Path) -> list[bool]:
    """Return whether batches of a script's own loader are in pinned memory, where it asks for that and where not."""
    data = cast("Any", torch.arange(8.0))
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with mock.patch.dict(os.environ, alone):
        return [next(iter(DistributedDataLoader(data, 4, pin_memory=pins))).is_pinned() for pins in (True, False)]


def timed_steps(folder: Path) -> list[tuple[float, float | None]]:
    """Seconds of two steps, and those of them before the first loss, which nothing shows in the second."""
    rows, model = StepRows(torch.device(CARD, 0), sequence_length=0), torch.nn.Linear(4, 4, device=CARD)
    steps = []
    for shows in (True, False):
        time.sleep(PAUSE)  # no part of a step: an engine is built, or a profile is written
        rows.begin(None) if shows else rows.restart_clock()
        batch = torch.randn(2, 4, device=CARD)
        rows.forward_starts(model, ((batch,), {}))
        loss = model(batch).sum()
        if shows:
            rows.loss_is(loss)
        loss.backward()
        torch.cuda.synchronize()
        row = rows.step_ended()
        steps.append((row["seconds"], row["ready_seconds"]))
    return steps


def split_by_the_script(folder: Path) -> tuple[str, str]:
    """Return what is printed of a Trainer that splits its model itself, and how another plan is refused beside it."""
    from strategies.launch.hooks import huggingface

    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        huggingface._require_own_split("from_pretrained(tp_plan=...) (tp 2)")
    with mock.patch.dict(os.environ, {REQUEST: '{"strategy": "zero3"}'}):
        try:
            huggingface._require_own_split("from_pretrained(tp_plan=...) (tp 2)")
        except CannotRun as refusal:
            return output.getvalue(), str(refusal)
    return output.getvalue(), ""


def without_its_library(folder: Path) -> tuple[str, ...]:
    """Return what is said of kernels whose library is not there."""
    with mock.patch("strategies.modules.kernels.find_spec", return_value=None):
        return install_kernels(adapter_bodies.llama(), {"rms_norm": "liger"}, torch.device(CARD)).notes


def losses_in_16_bits(folder: Path) -> tuple[float, float, list[torch.dtype]]:
    """The loss of a model under autocast with and without its logits, and the dtype of the products of the latter."""
    model, ids = adapter_bodies.llama().to(CARD).train(), adapter_bodies.batch_of(0).to(CARD)
    with torch.autocast(CARD, torch.bfloat16):
        usual = model(input_ids=ids, labels=ids).loss
        install_kernels(model, {"linear_cross_entropy": "chunked"}, torch.device(CARD))
        with _Products() as products:
            loss = model(input_ids=ids, labels=ids).loss
    return usual.item(), loss.item(), products.dtypes


class _Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the dtypes of matrix products."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.dtypes.append(args[-1].dtype)
        return function(*args, **(kwargs or {}))


def resumed_fused(folder: Path) -> tuple[list[float], list[float]]:
    """Losses of an unbroken run and of one that resumes, with an optimizer that counts its steps on the card."""
    with mock.patch("torch.optim.AdamW", partial(torch.optim.AdamW, fused=True)):
        unbroken, resumed, _ = training_bodies.save_and_resume(Recipe(), str(folder))
    return unbroken, resumed


def logged(folder: Path) -> tuple[dict[str, float], list[str]]:
    """The figures of a step log's last interval, and the names of what was traced of a step."""
    losses = engine_bodies.logged(Recipe(), str(folder))
    assert losses[-1] < losses[0]
    figures = {}
    for table in (folder / "tables").rglob("*.csv"):
        with open(table, newline="") as file:
            figures[table.stem] = float([*csv.DictReader(file)][-1][table.stem])
    [trace] = (folder / "traces").glob("*.json")
    return figures, [event.get("name", "") for event in json.loads(trace.read_text())["traceEvents"]]


def reported(folder: Path) -> dict[str, Any]:
    """A report and a timeline of memory beside what torch's allocator says."""
    gc.collect()
    others = torch.cuda.memory_allocated()
    engine = training_bodies.make_engine(Recipe())
    profiler = MemoryProfiler(engine)
    profiler.profile_training(steps=1)  # the allocator counts already
    training_bodies.one_step(engine, 0)
    report = profiler.get_memory_report()
    allocated = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(), torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    with engine.memory_timeline(folder / "step.svg"):
        training_bodies.one_step(engine, 1)
    return {
        "report": (report.device, report.live_bytes, report.peak_bytes, report.reserved_bytes),
        "allocator": (str(engine.device), *allocated),
        "counted": engine.counted_peak_bytes,
        "peak": torch.cuda.max_memory_allocated() - others,
    }
