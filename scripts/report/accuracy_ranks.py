"""The part of the accuracy report on real CPU ranks: step times after `dsplan bench`, and which strategy is fastest."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from hardware_db.measured_rows import TimeRun, read_time_runs
from scripts.fit.time_scores import percentile
from scripts.measure.rate_rows import read_rates
from scripts.measure.real_times import CPU_FILES, Contest, Timed, by_batch, contests, learning, shipped_bench
from scripts.measure.time_grid import STRATEGIES
from scripts.report.accuracy_tables import table

HEAD = """
## Step time on real ranks

Three models (GPT-2, Llama and BERT of 13 to 21 million parameters) trained through dsplan's engine by {ranks} processes
that share the {cores} cores of one machine ({cpu}, torch {torch}, DeepSpeed {deepspeed}, gloo), {settings} settings of
model, batch and ranks under every strategy. `dsplan bench --ranks 2,4` ran before; its rates are all that *rates alone*
knows, *calibrated* also knows its short training runs of two other models. No run below was learnt from, but what
the model counts of copies and dropout on a CPU was written with an earlier, noisier measurement of the same settings in
view.
`python -m scripts.report.check_times` prints every run; `scripts/measure/times.py` measured them.
"""
CHOOSING = """
### The fastest strategy

`order` is the rank correlation of predicted and measured step times of the five; `loses` what the strategy that dsplan
puts first takes longer than the fastest. On this machine DDP wins everywhere: the models fit whole, and collectives
cost the cores that compute.
"""
LEARNING = """
### Learning from one user's runs

Ten runs of one model and batch, then the median error on ten of another batch of it: *before* anything was measured
on the machine, with the few *rates* that a first run measures in three seconds, and *after* ten runs.
"""
COLUMNS = ("", "runs", "rates alone: median", "90 % within", "calibrated: median", "90 % within")


def ranks() -> Iterator[str]:
    """The section, line by line."""
    runs = read_time_runs(CPU_FILES.times)
    plain, learnt = (contests(runs, shipped_bench(calibrated=calibrated)) for calibrated in (False, True))
    yield from _head(runs, len(plain)).splitlines()
    yield ""
    yield from table(COLUMNS, _by_strategy(plain, learnt))
    yield from CHOOSING.splitlines()
    yield ""
    columns = ("model, batch, ranks", "fastest", "named", "loses", "order")
    yield from table(columns, [_contest_cells(contest) for contest in learnt])
    yield from LEARNING.splitlines()
    yield ""
    yield from table(("model", "before", "rates", "after"), _learning(runs))


def _head(runs: Sequence[TimeRun], settings: int) -> str:
    run = runs[0]
    sizes = " or ".join(str(size) for size in sorted({run.world_size for run in runs}))
    return HEAD.format(
        ranks=sizes, cores=run.cores, cpu=run.cpu, torch=run.torch, deepspeed=run.deepspeed, settings=settings
    )


def _by_strategy(plain: Sequence[Contest], learnt: Sequence[Contest]) -> Iterator[list[str]]:
    for strategy in ("", *STRATEGIES):
        sides = [
            [entry for entry in _entries(side) if strategy in ("", entry.run.strategy)] for side in (plain, learnt)
        ]
        yield [strategy or "all", str(len(sides[0])), *(cell for side in sides for cell in _sizes(side))]


def _entries(listed: Iterable[Contest]) -> list[Timed]:
    return [entry for contest in listed for entry in contest.entries]


def _sizes(timed: Sequence[Timed]) -> list[str]:
    sizes = [abs(run.error) for run in timed]
    return [f"{percentile(sizes, share):.1%}" for share in (0.5, 0.9)]


def _contest_cells(contest: Contest) -> list[str]:
    fastest, named = contest.fastest.run.strategy, contest.chosen.run.strategy
    return [contest.name, fastest, named, f"{contest.loss:.1%}", f"{contest.order:.2f}"]


def _learning(runs: Sequence[TimeRun]) -> Iterator[list[str]]:
    rates = read_rates(CPU_FILES.rates)
    for own in by_batch(runs).values():
        learnt = learning(own, rates)
        yield [learnt.model, *(f"{error:.1%}" for error in (learnt.before, learnt.measured, learnt.after))]
