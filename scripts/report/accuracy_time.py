"""The time part of the accuracy report: runs that no constant has seen, by publication."""

from __future__ import annotations

import csv
import statistics
from collections.abc import Callable, Iterator, Sequence

from scripts.fit.published_rows import MEASUREMENTS
from scripts.fit.time_accuracy import GRID, read_left_out
from scripts.fit.time_scores import Choice, Scored, choices, errors, percentile
from scripts.peers.peer_times import WITHOUT_TIME, peer_scores
from scripts.report.accuracy_tables import table

READINGS = {
    "stated": "the document has the whole plan",
    "interpreted": "part of the plan comes from elsewhere in the repository",
    "vendor": "tuned by the vendor until best, recomputation and sharding not stated",
    "disclaimed": "its authors say that its figures cannot be compared (network shared with others, +/-40 %)",
}

HEAD = """
## Step time against published runs

Errors are of tokens per second and GPU, predicted / measured - 1: above zero dsplan promises too much. **No constant
has seen the publication that it predicts**: the free constants (products, attention and memory of an architecture, each
kind of link, launching) are fitted on all other publications, shrunk to what kernels measured alone and the link
catalogue say, and then predict the one left out. Tables and versions of one document stay together. vTrain's grid of
761 plans is fitted on half of its model shapes and predicts the other half.

The time model's structure was made with these runs in view, so what is tested here is its constants, and what it makes
of machines and code it was not fitted to. `python -m scripts.fit.time_accuracy` makes the predictions.
"""
CHOOSING = """
### Choosing

Groups of stated runs that share model, sequence, GPUs, precision and global batch and differ only in plan. A group of
at least four plans has a rank correlation (Spearman) of predicted and measured speed; what the plan that dsplan puts
first loses to the fastest is of every group.
"""
PEERS = """
### Other tools on the same runs

llm-analysis is asked at its default efficiency, which is the datasheet's peak, and at the 0.5 that its own source gives
for Megatron-LM; the rule of thumb prices model operations at 40 % of the peak. Their constants were not fitted here.
"""
LEFT_OUT = """
### Rows that no fit has seen

What the tables above and the fits leave out. The command line is asked what is marked *(asked)* all the same: 8-bit
products, adapters, mixtures of experts, context parallelism and interleaved pipelines. *Asked through the command line*
has them, and the reasons of what cannot be asked.
"""
COLUMNS = ("", "runs", "median size", "90 % within", "median error")


def times() -> Iterator[str]:
    """The lines of the section."""
    rows = read_left_out()
    public = [row for row in rows if row.run.source != GRID]
    stated, grid = _read_as(public, "stated"), [row for row in rows if row.run.source == GRID]
    yield HEAD
    yield from table(
        COLUMNS,
        (
            _cells("**stated, all publications**", stated),
            _cells("with disclaimed rows", stated + _read_as(public, "disclaimed")),
            _cells("vTrain's grid, other half of the shapes", grid),
        ),
    )
    for reading, meaning in READINGS.items():
        yield f"\n{reading.capitalize()}: {meaning}.\n"
        yield from _by(_read_as(public, reading), lambda row: row.run.source)
    yield CHOOSING
    yield from _choosing(choices(stated), choices(grid))
    yield PEERS
    yield from _peers(stated, grid)
    yield LEFT_OUT
    yield from _left_out()


def _read_as(rows: Sequence[Scored], reading: str) -> list[Scored]:
    return [row for row in rows if row.run.reading == reading]


def _cells(name: str, rows: Sequence[Scored]) -> list[str]:
    summary = errors(rows)
    return [name, str(summary.runs), f"{summary.median:.1%}", f"{summary.p90:.1%}", f"{summary.bias:+.1%}"]


def _by(rows: Sequence[Scored], of: Callable[[Scored], str]) -> Iterator[str]:
    names = dict.fromkeys(of(row) for row in rows)
    yield from table(
        ("source", *COLUMNS[1:]), (_cells(name, [row for row in rows if of(row) == name]) for name in names)
    )


def _choosing(public: Sequence[Choice], grid: Sequence[Choice]) -> Iterator[str]:
    groups = {"**stated, all publications**": list(public)}
    for source in dict.fromkeys(choice.source for choice in public):
        groups[source] = [choice for choice in public if choice.source == source]
    groups["vTrain's grid"] = list(grid)
    columns = ("", "groups", "median correlation", "median loss", "90 % of losses within")
    yield from table(columns, (_choice_cells(name, listed) for name, listed in groups.items()))


def _choice_cells(name: str, listed: Sequence[Choice]) -> list[str]:
    ranked = [choice.correlation for choice in listed if choice.correlation is not None]
    order = f"{statistics.median(ranked):.2f} of {len(ranked)}" if ranked else "-"
    losses = [choice.loss for choice in listed]
    return [name, str(len(listed)), order, f"{statistics.median(losses):.1%}", f"{percentile(losses, 0.9):.1%}"]


def _peers(stated: Sequence[Scored], grid: Sequence[Scored]) -> Iterator[str]:
    runs = [row.run for row in stated], [row.run for row in grid]
    scores = [peer_scores(part) for part in runs]
    rows = [["dsplan, left out", *_pair(stated), *_pair(grid)]]
    rows += [[peer, *_pair(scores[0][peer]), *_pair(scores[1][peer])] for peer in scores[0]]
    yield from table(("", "stated runs", "median size", "90 % within", "grid", "median size", "90 % within"), rows)
    yield ""
    for tool, reason in WITHOUT_TIME.items():
        yield f"* {tool}: no answer, {reason}."


def _pair(rows: Sequence[Scored]) -> list[str]:
    summary = errors(rows)
    return [str(summary.runs), f"{summary.median:.1%}", f"{summary.p90:.1%}"]


def _left_out() -> Iterator[str]:
    with (MEASUREMENTS / "published_training_left_out.csv").open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    yield from table(("source", "why", "rows"), ([row["source"], row["why"], row["rows"]] for row in rows))
