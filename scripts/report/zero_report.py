"""Write docs/reference/benchmarks.md from the rows that scripts/bench/zero.py measured; `--check` compares only."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import astuple

from hardware_db.measured_rows import SHIPPED
from scripts.generate.generated import REFERENCE, write_or_check
from scripts.measure.zero_rows import STAGES, Row, Rows, Setting, read

PARAMETERS = {"gpt2-14m": 13_989_888, "gpt2-101m": 101_177_856}
"""Elements of the models, the tied embedding once."""
_PAIRS = [(stage, f"{stage} / DeepSpeed", (stage, "deepspeed")) for stage in STAGES]
PAIRS = (*_PAIRS, ("zero3", "zero3 / FSDP2", ("fsdp", "torch")))
"""Our stage, the title of the column, and the engine that it is compared with."""

PAGE = """# Our own ZeRO beside DeepSpeed and FSDP2

<!-- written by scripts/report/zero_report.py from hardware_db/measurements/zero_cpu.csv -->

`python -m scripts.bench.zero` trains GPT-2 models of 14 M and 101 M parameters with real text on CPU ranks, all engines
of a setting by turns in one run, and writes `hardware_db/measurements/zero_cpu.csv`;
`python -m scripts.report.zero_report` writes this page from it.

Machine: {cores} cores of one processor ({cpu}), no GPU; gloo, one thread per rank; torch 2.13,
DeepSpeed 0.19.8, AdamW as torch runs it on a CPU; micro-batch 1 of 128 words (14 M) or 64 (101 M).

## Seconds of a step on two ranks, ours / theirs

{seconds}

Medians over {steps} timed steps of each engine in each setting, in {turns} turns; nothing else ran on the machine. The
file has the fastest and the slowest step of each engine, and what forward, backward and optimizer took.

## Live bytes of a rank, gpt2-101m, one micro-batch per step

What [ZeRO's arithmetic](../explanation/zero.md) says beside what is alive between steps and when the last gradient
has been made, in MB, and the peak of the whole step, which includes what the states do not: activations, the buckets in
which gradients travel, stage 3's all-gathered weights and the temporaries of AdamW.

{states}

{peaks}

The largest peak over DeepSpeed's of the same stage is {worst:.2f}, and stage 3's over FSDP2's {sharded:.2f}. With four
micro-batches per step gradients of 16-bit weights are added up in fp32, which DeepSpeed does not do:

{several}

`python -m scripts.bench.zero --bytes` measures these; `--ranks 4` on four ranks.
"""


def main() -> int:
    return write_or_check(REFERENCE / "benchmarks.md", page(read(SHIPPED / "zero_cpu.csv")))


def page(rows: Rows) -> str:
    """The page, from rows of both kinds."""
    timed = [row for row in rows.values() if row.steps]
    single = [row for row in rows.values() if row.peak_bytes and row.accumulation == 1 and row.model == "gpt2-101m"]
    several = [row for row in rows.values() if row.peak_bytes and row.accumulation > 1 and row.model == "gpt2-101m"]
    ratios = {title: _peak_ratios(rows, single, title) for _, title, _ in PAIRS}
    ((cpu, cores),) = {(row.cpu, row.cores) for row in rows.values()}
    return PAGE.format(
        cpu=cpu,
        cores=cores,
        seconds="\n".join(_against(rows, _settings(timed), _seconds)),
        steps=_range([row.steps for row in timed]),
        turns=_range([row.turns for row in timed]),
        states="\n".join(_states([row for row in single if row.backend == "native"])),
        peaks="\n".join(_against(rows, _settings(single), _peak)),
        worst=max(ratio for title, own in ratios.items() if "DeepSpeed" in title for ratio in own),
        sharded=max(ratios["zero3 / FSDP2"]),
        several="\n".join(_against(rows, _settings(several), _peak)),
    )


def _range(numbers: list[int]) -> str:
    least, most = min(numbers), max(numbers)
    return str(least) if least == most else f"{least} to {most}"


def _settings(rows: list[Row]) -> list[Setting]:
    """From the smallest to the largest."""
    return sorted({row.setting for row in rows}, key=lambda setting: (PARAMETERS[setting.model], *astuple(setting)[1:]))


def _seconds(row: Row) -> tuple[float, str]:
    return row.step_seconds, f"{row.step_seconds:.3f}"


def _peak(row: Row) -> tuple[float, str]:
    return row.peak_bytes, f"{row.peak_bytes / 1e6:.0f}"


def _against(rows: Rows, settings: list[Setting], value: Callable[[Row], tuple[float, str]]) -> Iterator[str]:
    """Markdown: a figure of ours over that of each other engine, setting by setting, and the median and the largest."""
    ratios: dict[str, list[float]] = {title: [] for _, title, _ in PAIRS}
    yield "| model | precision | accumulation | ranks | " + " | ".join(title for _, title, _ in PAIRS) + " |"
    yield "|---|---|---|---|" + "---|" * len(PAIRS)
    for setting in settings:
        cells = []
        for stage, title, other in PAIRS:
            (ours, our_text), (theirs, their_text) = (
                value(rows[setting, (stage, "native")]),
                value(rows[setting, other]),
            )
            ratios[title].append(ours / theirs)
            cells.append(f"{our_text} / {their_text} = {ours / theirs:.2f}")
        names = (setting.model, setting.precision, str(setting.accumulation), str(setting.ranks))
        yield "| " + " | ".join([*names, *cells]) + " |"
    for name, choose in (("median", statistics.median), ("largest", max)) if len(settings) > 1 else ():
        yield f"| **{name}** | | | | " + " | ".join(f"**{choose(each):.2f}**" for each in ratios.values()) + " |"


def _peak_ratios(rows: Rows, ours: list[Row], title: str) -> list[float]:
    stage, _, other = next(pair for pair in PAIRS if pair[1] == title)
    return [row.peak_bytes / rows[row.setting, other].peak_bytes for row in ours if row.key[1] == (stage, "native")]


def _states(rows: list[Row]) -> Iterator[str]:
    yield "| stage | precision | ranks | between steps | measured | | with gradients | measured | |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in sorted(rows, key=lambda row: (row.ranks, row.precision, row.strategy)):
        between, full = arithmetic(row.strategy, row.precision, row.ranks, PARAMETERS[row.model])
        cells = [row.strategy, row.precision, str(row.ranks)]
        for expected, measured in ((between, row.resident_bytes), (full, row.states_bytes)):
            cells += [f"{expected / 1e6:.1f}", f"{measured / 1e6:.1f}", f"{measured / expected - 1:+.1%}"]
        yield "| " + " | ".join(cells) + " |"


def arithmetic(stage: str, precision: str, ranks: int, parameters: int) -> tuple[float, float]:
    """Bytes of a rank's states between steps, and with its part of the gradients (Rajbhandari et al. 2020, figure 1).

    Weights and gradients take 2 bytes in 16 bits and 4 in fp32, what the optimizer keeps K = 12 and 8. Stage 3 gathers
    16-bit weights from the masters among the 12, so that it has no others.
    """
    width, kept = (2, 12) if precision == "bf16" else (4, 8)
    weights = 1.0 if stage != "zero3" else 1 / ranks if precision == "fp32" else 0.0
    between = parameters * (width * weights + kept / ranks)
    return between, between + parameters * width / ranks


if __name__ == "__main__":
    sys.exit(main())
