"""Step time under `dsplan run` with supervision and monitoring against the same without, by turns in one process.

    python -m scripts.bench.supervision                           # two ranks on the CPU, or every GPU
    python -m scripts.bench.supervision --nproc 4 --hidden 512 --turns 40

`dsplan run` starts the ranks. A rank trains in short blocks: with everything, and without: then its engine has no
observers, the sampler's and the watchdog's threads sleep, and the launcher's processes are stopped (SIGSTOP). Blocks of
both kinds take turns, so that a machine that is slow for a while is slow to both; the ratio is the median over pairs of
neighbours, with the interval that holds it in 95 of 100 resamplings. It needs a machine that is not shared: where
others take most of the cores, it says little. The parts need less: processor seconds that a step spends in observers
(on a GPU they include waiting for the loss) as a share of all that it takes, and the share of one core that the threads
and the launcher's processes take. They add up to what is lost where no core is spare.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts" / "examples"))

RESULT = "overhead.json"
_WARM_UP = 10


def main() -> None:
    """Measure supervision's share of a step and print it."""
    arguments = _arguments()
    if "RANK" in os.environ:
        _train(arguments)
        return
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "-m", "dsplan", "run", "--json", "--run-dir", str(run)]
        command += [] if arguments.nproc is None else ["--nproc", str(arguments.nproc)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "DSPLAN_HOME": str(Path(folder) / "home")}
        finished = subprocess.run([*command, __file__, *sys.argv[1:]], env=environment, capture_output=True, text=True)
        if finished.returncode:
            sys.exit(finished.stderr)
        figures = json.loads((run / RESULT).read_text())
    print(json.dumps(figures) if arguments.json else _report(figures))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, help="ranks; as many as dsplan run starts where it is left out")
    parser.add_argument("--turns", type=int, default=30, help="pairs of blocks")
    parser.add_argument("--seconds", type=float, default=2.0, help="of a block")
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _train(arguments: argparse.Namespace) -> None:
    """One rank."""
    import torch
    from train_gpt import VOCABULARY, Gpt

    import dsplan

    torch.manual_seed(0)
    length, heads = arguments.sequence_length, max(1, arguments.hidden // 64)
    model = Gpt(layers=arguments.layers, width=arguments.hidden, heads=heads, length=length)
    config = {"train_micro_batch_size_per_gpu": arguments.micro_batch, "gradient_accumulation_steps": 1}
    data = [torch.randint(0, VOCABULARY, (length,))]
    engine, *_ = dsplan.initialize(
        model=model, config=config, strategy=None if os.environ["WORLD_SIZE"] == "1" else arguments.strategy,
        training_data=[{"input_ids": data[0], "labels": data[0]}] * 64,
    )  # fmt: skip
    batch = torch.randint(0, VOCABULARY, (arguments.micro_batch, length), device=engine.device)
    engine.dataloader = None

    def step() -> None:
        engine.backward(engine(batch, batch))
        engine.step()

    for _ in range(_WARM_UP):
        step()
    figures = Measurement(engine, arguments).run(step)
    if engine.is_main:
        Path(os.environ["DSPLAN_RUN_DIR"], RESULT).write_text(json.dumps(figures))


class Measurement:
    """The blocks of one rank. Every rank makes the same number of steps, which rank 0's clock decided once."""

    def __init__(self, engine: Any, arguments: argparse.Namespace) -> None:
        self._engine, self._arguments = engine, arguments
        self._switch = Switch(engine)
        self._parts = Parts(engine)

    def run(self, step: Callable[[], None]) -> dict[str, Any]:
        """Return the figures of all pairs of blocks."""
        steps = self._same_on_all_ranks(max(5, round(self._arguments.seconds / self._block(step, 20))))
        pairs, processor = [], []
        for turn in range(self._arguments.turns):
            seconds: dict[bool, float] = {}
            for on in (True, False) if turn % 2 else (False, True):
                self._switch.turn(on)
                self._wait_for_all()
                with self._parts.counted(steps) if on else nullcontext():
                    began = time.process_time()
                    seconds[on] = self._block(step, steps)
                    if not on:
                        processor.append((time.process_time() - began) / steps)
            pairs.append((seconds[True], seconds[False]))
        self._switch.turn(True)
        return {
            "ranks": self._engine.environment.world_size,
            "ranks_of_node": self._engine.environment.local_world_size,
            "device": self._engine.device.type,
            "steps_of_block": steps,
            "pairs": pairs,
            "processor_seconds": statistics.median(processor),
            **self._parts.shares(),
        }

    def _block(self, step: Callable[[], None], steps: int) -> float:
        """Seconds of a step: on a GPU, which runs behind, the mean of the block; else the median."""
        import torch

        if self._engine.device.type == "cuda":
            torch.cuda.synchronize()
            before = time.perf_counter()
            for _ in range(steps):
                step()
            torch.cuda.synchronize()
            return (time.perf_counter() - before) / steps
        times = []
        for _ in range(steps):
            before = time.perf_counter()
            step()
            times.append(time.perf_counter() - before)
        return statistics.median(times)

    def _same_on_all_ranks(self, value: int) -> int:
        from strategies.distributed.consensus import on_rank_zero

        return int(on_rank_zero(lambda: value)) if self._engine.environment.world_size > 1 else value

    def _wait_for_all(self) -> None:
        import torch.distributed as dist

        if self._engine.environment.world_size > 1:
            dist.barrier()


class Gate(threading.Event):
    """The event by which a thread of the monitor is told to end, and to sleep while the gate is shut."""

    def __init__(self) -> None:
        super().__init__()
        self._open = threading.Event()
        self._open.set()

    def turn(self, on: bool) -> None:
        """Let waiting threads go on, or hold them back."""
        (self._open.set if on else self._open.clear)()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait as an event does, and then while the gate is shut."""
        ended = super().wait(timeout)
        self._open.wait()
        return ended


class Switch:
    """Turns supervision and monitoring of this process on and off, and on local rank 0 the launcher's processes."""

    def __init__(self, engine: Any) -> None:
        from strategies.supervision.hang_detection import Watchdog
        from strategies.telemetry.monitor import RunMonitor

        self._engine, self._observers = engine, list(engine.observers)
        self._gates = []
        (monitor,) = (observer for observer in engine.observers if isinstance(observer, RunMonitor))
        for thread in threading.enumerate():
            if isinstance(thread, Watchdog):
                thread._ended = self._gate()
        monitor._sampler._ends = self._gate()
        assert len(self._gates) == 2, "the watchdog and the sampler run"

    def _gate(self) -> Gate:
        self._gates.append(Gate())
        return self._gates[-1]

    def turn(self, on: bool) -> None:
        """Switch supervision on or off."""
        self._engine.observers[:] = self._observers if on else []
        for gate in self._gates:
            gate.turn(on)
        if os.environ["LOCAL_RANK"] == "0":
            for process in launcher_processes():
                process.send_signal(signal.SIGCONT if on else signal.SIGSTOP)


@cache
def launcher_processes() -> list[psutil.Process]:
    """Return the agent that started this rank, and `dsplan run` above it."""
    parents = psutil.Process().parents()
    return [process for process in parents[:2] if "dsplan" in " ".join(process.cmdline())]


class Parts:
    """The cost of supervision and monitoring, piece by piece, while they are on."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._seconds = (
            engine,
            dict.fromkeys((type(observer).__name__ for observer in engine.observers), 0.0),
        )
        self._steps, self._wall, self._processor = 0, 0.0, {"threads": 0.0, "launcher": 0.0}
        for observer in engine.observers:
            for name in ("forward_starts", "loss_is", "starts", "ends", "step_ended"):
                setattr(observer, name, self._timed(getattr(observer, name), type(observer).__name__))

    def _timed(self, call: Callable[..., object], owner: str) -> Callable[..., object]:
        def timed(*positional: object, **named: object) -> object:
            before = time.thread_time()
            result = call(*positional, **named)
            self._seconds[owner] += time.thread_time() - before
            return result

        return timed

    @contextmanager
    def counted(self, steps: int) -> Iterator[None]:
        """Count what a block of `steps` steps uses with everything on."""
        before, began = _processor_seconds(), time.perf_counter()
        yield
        self._wall += time.perf_counter() - began
        self._steps += steps
        for name, value in _processor_seconds().items():
            self._processor[name] += value - before[name]

    def shares(self) -> dict[str, Any]:
        """Microseconds of a step in each observer, and parts of one core that threads and launcher take."""
        return {
            "observer_microseconds": {name: 1e6 * value / self._steps for name, value in self._seconds.items()},
            "cores": {name: value / self._wall for name, value in self._processor.items()},
        }


def _processor_seconds() -> dict[str, float]:
    watchers = {thread.native_id for thread in threading.enumerate() if thread.name.startswith("dsplan")}
    ticks = os.sysconf("SC_CLK_TCK")
    threads = 0.0
    for ident in watchers:
        fields = Path(f"/proc/self/task/{ident}/stat").read_text().rpartition(")")[2].split()
        threads += (int(fields[11]) + int(fields[12])) / ticks
    times = [process.cpu_times() for process in launcher_processes()]
    return {"threads": threads, "launcher": sum(spent.user + spent.system for spent in times)}


def _report(result: dict[str, Any]) -> str:
    pairs = result["pairs"]
    off = statistics.median(off for _, off in pairs)
    processor = result["processor_seconds"]
    observers = sum(result["observer_microseconds"].values()) / processor / 1e6
    cores = result["cores"]["threads"] + result["cores"]["launcher"] / result["ranks_of_node"]
    lines = [
        f"{result['ranks']} ranks on {result['device']}, {len(pairs)} pairs of blocks"
        f" of {result['steps_of_block']} steps",
        f"step without: {1e3 * off:.3f} ms; with / without: {_ratio(pairs)}",
        *(
            f"{name}: {value:.1f} us of the {1e3 * processor:.1f} ms of a step, {value / processor / 1e4:.3f} %"
            for name, value in result["observer_microseconds"].items()
        ),
        *(f"{name}: {100 * value:.2f} % of one core" for name, value in result["cores"].items()),
        f"together, where no core is spare: {100 * (observers + cores):.2f} % of a step",
    ]
    return "\n".join(lines)


def _ratio(pairs: Sequence[tuple[float, float]]) -> str:
    ratios = [on / off for on, off in pairs]
    low, high = _interval(ratios)
    return f"{statistics.median(ratios):.4f} ({low:.4f} to {high:.4f})"


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the middle 95 % of medians of resamplings."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[1949]


if __name__ == "__main__":
    main()
