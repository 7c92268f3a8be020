"""Errors of published runs asked through the command line, by code base and publication, as tables.

    python -m scripts.report.accuracy_asked

prints them; `accuracy_report.py` puts them on the page. The answers are those that `scripts/fit/asked.py` kept.
"""

from __future__ import annotations

import csv
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from planner.cost.code_bases import of_any_year
from scripts.fit.asked import BEFORE, Answer, PublishedQuestion, kept, questions
from scripts.fit.asked_rows import NO_SPEED
from scripts.fit.published_rows import MEASUREMENTS, document_of
from scripts.fit.time_scores import percentile
from scripts.report.accuracy_tables import table

GRID = "vtrain_a100"
HEAD = """
## Asked through the command line

Every row of the collection of published runs, and vTrain's grid, asked as a person asks: as flags of `dsplan estimate`
with `--code`, a config.json and a cluster file, through the command line's own question. `published_asked.csv` holds
the flags of each row, `asked_answers.csv` what was said (`python -m scripts.fit.asked`, a few seconds). Errors are
predicted / measured - 1, of tokens/s/GPU and of the memory that the row's kind means. Speeds are those of constants
that have not seen the publication: an answer is scaled by what its publication's rows move by when the constants are
fitted without it. No constant was fitted to memory.

*Ran* counts runs whose plan is stated and that ran; a *false reject* is one of them that is called "does not fit", a
*false fit* a run that went out of memory and is called "fits"; others of those are called "tight", which is where one
real run in ten goes beyond the capacity. Runs tuned by a vendor (Megatron-Bridge,
NeMo, dgxc) state neither recomputation nor how the optimizer is sharded: they are asked with the modules that
Megatron-Bridge's recipe of the same plan recomputes (`scripts/fit/asked_rows.yaml`), with none elsewhere, and with the
distributed optimizer; their verdicts are not counted. Versions of a code base by year (`torchtitan-2024`) count
with it; the tables by publication name them.
"""
BEFORE_HEAD = """
### Before `--code` had an effect

The same questions on the day the flags were first read, when every code base was answered for as eager transformers,
and cp, ep, virtual stages, fp8 and adapters changed nothing.
"""
PUBLICATIONS = """
### By publication
"""
THE_GRID = """
### vTrain's grid

{runs} plans of Megatron-DeepSpeed on A100. Regret is what the plan that is put first loses to the fastest of its group
(the same GPUs, model, sequence length and batch; {groups} groups).
"""
GAINS = """
### What fp8 and fp4 gain

Pairs of runs of one document that differ in nothing but the precision: the step in 8 bits over the same in bf16, in
4 bits over the one in bf16, or where there is none in 8 bits. Errors are of that gain, so that what both runs share
does not count. *Twice* is what a plain ratio of peaks would be off by.
"""
REFUSED = """
### What the command line refuses or cannot say
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """Questions with their answers."""

    pairs: Sequence[tuple[PublishedQuestion, Answer]]

    def errors(self, figure: str) -> list[float]:
        """Signed errors of a figure over the rows that print it and ran."""
        return [
            getattr(answer, figure) / getattr(run, figure) - 1
            for run, answer in self.pairs
            if getattr(run, figure) and run.ran and run.reading != "disclaimed" and not answer.refused
        ]

    @property
    def speed(self) -> list[float]:
        return self.errors("tokens_per_s_per_gpu")

    @property
    def memory(self) -> list[float]:
        return self.errors("memory_bytes")

    def verdicts(self, *, ran: bool) -> Counter[str]:
        """Verdicts of runs whose plan is stated, that ran or ran out of memory."""
        held = [answer for run, answer in self.pairs if run.ran == ran and _plan_is_stated(run)]
        return Counter(answer.verdict or "refused" for answer in held)


def _plan_is_stated(run: PublishedQuestion) -> bool:
    return run.reading != "vendor" and run.source != GRID


def answered(by_case: Mapping[str, Answer]) -> list[tuple[PublishedQuestion, Answer]]:
    """Questions with their answers, speeds as constants say that have not seen the publication."""
    moved = moves()
    pairs = ((run, by_case[run.case]) for run in questions() if run.case in by_case)
    return [(run, answer.scaled(moved.get(run.publication, 1.0))) for run, answer in pairs]


@cache
def moves() -> Mapping[str, float]:
    """Return what leaving a publication out makes of its speeds: median over rows of shipped over left-out seconds."""
    ratios_of: defaultdict[str, list[float]] = defaultdict(list)
    with (MEASUREMENTS / "time_left_out.csv").open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            source = row["run"].rpartition("-")[0]
            ratios_of[document_of(source)].append(float(row["shipped_seconds"]) / float(row["left_out_seconds"]))
    return {publication: statistics.median(ratios) for publication, ratios in ratios_of.items()}


Key = tuple[str, ...]


def by(
    pairs: Iterable[tuple[PublishedQuestion, Answer]], key: Callable[[PublishedQuestion], Key]
) -> list[tuple[Key, Rows]]:
    """Rows by a key, in alphabetical order."""
    groups: defaultdict[Key, list[tuple[PublishedQuestion, Answer]]] = defaultdict(list)
    for run, answer in pairs:
        groups[key(run)].append((run, answer))
    return [(group, Rows(pairs=groups[group])) for group in sorted(groups)]


FIGURES = ("rows", "median", "90 % within", "bias")
COLUMNS = (
    *(f"speed: {name}" if name == "rows" else name for name in FIGURES),
    *(f"memory: {name}" if name == "rows" else name for name in FIGURES),
    "ran",
    "false rejects",
    "out of memory",
    "false fits",
    "called tight",
)


def figures(errors: Sequence[float]) -> list[str]:
    """Rows, median and 90th percentile of the sizes, and the median with its sign."""
    if not errors:
        return ["0", "-", "-", "-"]
    sizes = [abs(error) for error in errors]
    middle, most, bias = statistics.median(sizes), percentile(sizes, 0.9), statistics.median(errors)
    return [str(len(errors)), f"{middle:.1%}", f"{most:.1%}", f"{bias:+.1%}"]


def scores(rows: Rows) -> list[str]:
    """The cells of a group."""
    ran, out = rows.verdicts(ran=True), rows.verdicts(ran=False)
    rejected = f"{ran['does_not_fit']} ({ran['does_not_fit'] / ran.total():.0%})" if ran else "-"
    wrong = [str(out["fits"]), str(out["tight"])] if out else ["-", "-"]
    return [*figures(rows.speed), *figures(rows.memory), str(ran.total()), rejected, str(out.total()), *wrong]


def losses(pairs: Iterable[tuple[PublishedQuestion, Answer]]) -> list[float]:
    """Return what the plan put first loses to the fastest, in each group that shares GPUs, model, length and batch."""
    groups: defaultdict[Key, list[tuple[float, float]]] = defaultdict(list)
    for run, answer in pairs:
        flags, gpus = run.flags, run.cluster["nodes"] * run.cluster["gpus_per_node"]
        batch = flags["micro_batch"] * flags["grad_accum"] * gpus // flags["tp"] // flags["pp"]
        group = run.model, run.config["n_head"], flags["seq_len"], gpus, batch
        groups[tuple(map(str, group))].append((answer.tokens_per_s_per_gpu, run.tokens_per_s_per_gpu))
    several = (plans for plans in groups.values() if len(plans) > 1)
    return [1 - max(plans)[1] / max(measured for _, measured in plans) for plans in several]


def asked_section() -> Iterator[str]:
    """The lines of the section."""
    pairs, before = answered(kept()), answered(kept(BEFORE))
    yield HEAD
    yield from _by_code(pairs)
    yield BEFORE_HEAD
    yield from _by_code(before)
    yield PUBLICATIONS
    groups = by(_without_grid(pairs), lambda run: (run.code, run.publication, run.reading))
    yield from table(("code", "publication", "reading", *COLUMNS), ([*key, *scores(rows)] for key, rows in groups))
    yield from _grid(pairs, before)
    yield GAINS
    yield from _gains(pairs)
    yield REFUSED
    yield from _not_said(pairs)


def _without_grid(pairs: Iterable[tuple[PublishedQuestion, Answer]]) -> list[tuple[PublishedQuestion, Answer]]:
    return [pair for pair in pairs if pair[0].source != GRID]


def _by_code(pairs: Iterable[tuple[PublishedQuestion, Answer]]) -> Iterator[str]:
    own = _without_grid(pairs)
    groups = [*by(own, lambda run: (of_any_year(run.code),)), (("**all**",), Rows(pairs=own))]
    yield from table(("code", *COLUMNS), ([*key, *scores(rows)] for key, rows in groups))


def _grid(
    pairs: Sequence[tuple[PublishedQuestion, Answer]], before: Sequence[tuple[PublishedQuestion, Answer]]
) -> Iterator[str]:
    own = [[pair for pair in some if pair[0].source == GRID] for some in (pairs, before)]
    yield THE_GRID.format(runs=len(own[0]), groups=len(losses(own[0])))
    yield from table(
        ("plans", "when", *FIGURES, "median regret", "90 % of regret within"),
        (_grid_row(kind, when, some) for kind in _KINDS for when, some in zip(("now", "before"), own, strict=True)),
    )


_KINDS: Mapping[str, Callable[[Mapping[str, int]], bool]] = {
    "all": lambda flags: True,
    "tp 1, pp 1": lambda flags: flags["tp"] == flags["pp"] == 1,
    "tp": lambda flags: flags["tp"] > 1 and flags["pp"] == 1,
    "pp": lambda flags: flags["tp"] == 1 and flags["pp"] > 1,
    "tp x pp": lambda flags: flags["tp"] > 1 and flags["pp"] > 1,
}


def _grid_row(kind: str, when: str, pairs: Sequence[tuple[PublishedQuestion, Answer]]) -> list[str]:
    own = [pair for pair in pairs if _KINDS[kind](pair[0].flags)]
    regret = losses(own) if kind == "all" else []
    chosen = [f"{statistics.median(regret):.1%}", f"{percentile(regret, 0.9):.1%}"] if regret else ["-", "-"]
    return [kind, when, *figures(Rows(pairs=own).speed), *chosen]


_PLAN = ("strategy", "tp", "pp", "cp", "ep", "virtual_stages", "seq_len", "micro_batch", "grad_accum", "checkpointing")


def gains(pairs: Iterable[tuple[PublishedQuestion, Answer]]) -> Iterator[tuple[PublishedQuestion, float, float, float]]:
    """Runs in 8 or 4 bits that have a twin in wider products: what they measured and predicted of its rate, and the
    ratio of the peaks."""
    groups: defaultdict[Key, dict[str, list[tuple[PublishedQuestion, Answer]]]] = defaultdict(lambda: defaultdict(list))
    for run, answer in pairs:
        if run.tokens_per_s_per_gpu and not answer.refused and run.source != GRID:
            plan = (str(run.flags.get(name)) for name in _PLAN)
            where = run.source.replace("_fp8", ""), run.model, run.cluster["gpu"], str(run.cluster["nodes"])
            key = (*where, str(run.config), *plan)
            groups[key][run.flags["precision"]].append((run, answer))
    for by_precision in groups.values():
        for narrow, wider in (("fp8", ("bf16",)), ("fp4", ("bf16", "fp8"))):
            name = next((name for name in wider if by_precision[name]), None)
            for run, answer in by_precision[narrow] if name else ():
                twin, twins_answer = min(
                    by_precision[name], key=lambda pair: abs(_read_number(pair[0]) - _read_number(run))
                )
                measured = run.tokens_per_s_per_gpu / twin.tokens_per_s_per_gpu
                peaks = 4.0 if (narrow, name) == ("fp4", "bf16") else 2.0
                yield run, measured, answer.tokens_per_s_per_gpu / twins_answer.tokens_per_s_per_gpu, peaks


def _read_number(run: PublishedQuestion) -> int:
    return int(run.case.rpartition("-")[2])


def _gains(pairs: Iterable[tuple[PublishedQuestion, Answer]]) -> Iterator[str]:
    groups: defaultdict[Key, list[tuple[float, float, float]]] = defaultdict(list)
    for run, *ratios in gains(pairs):
        groups[(run.code, run.source, run.flags.get("fp8_recipe", ""))].append((ratios[0], ratios[1], ratios[2]))
    cells = []
    for key, ratios_of in sorted(groups.items()):
        errors = [predicted / measured - 1 for measured, predicted, _ in ratios_of]
        plain = statistics.median(peaks / measured - 1 for measured, _, peaks in ratios_of)
        lowest, most = min(measured for measured, *_ in ratios_of), max(measured for measured, *_ in ratios_of)
        cells.append([*key, f"{lowest:.2f} to {most:.2f}", *figures(errors), f"{plain:+.0%}"])
    yield from table(("code", "source", "recipe", "measured gain", "pairs", *FIGURES[1:], "twice"), cells)


def _not_said(pairs: Sequence[tuple[PublishedQuestion, Answer]]) -> Iterator[str]:
    runs = questions()
    total = sum(one.source != GRID for one in runs)
    unanswered = Counter((one.source, one.why_not) for one in runs if one.why_not)
    unanswered += Counter((one.source, f"refused: {answer.refused}") for one, answer in pairs if answer.refused)
    yield f"{total - unanswered.total()} of {total} rows of the collection are answered; the others:\n"
    reasons: defaultdict[str, list[str]] = defaultdict(list)
    for (source, why), count in unanswered.items():
        reasons[why].append(f"{count} of {source}")
    ordered = sorted(reasons.items(), key=lambda item: -sum(int(text.split()[0]) for text in item[1]))
    cells = ([why, str(sum(int(text.split()[0]) for text in of)), ", ".join(of)] for why, of in ordered)
    yield from table(("why", "rows", "where"), cells)
    yield ""
    slow = Counter(
        (one.source, part.removeprefix(NO_SPEED))
        for one in runs
        for part in one.assumed.split("; ")
        if part.startswith(NO_SPEED)
    )
    yield f"Of {slow.total()} others only memory and verdict are asked, their speed being no measure of the plan:\n"
    yield from table(("why", "rows", "where"), ([why, str(count), source] for (source, why), count in slow.items()))
    yield ""


if __name__ == "__main__":
    print("\n".join(asked_section()))
