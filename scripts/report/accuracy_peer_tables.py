"""Other tools on the same cases, as tables of the accuracy report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from scripts.report.accuracy_cases import Case, Truth
from scripts.report.accuracy_peers import PEERS, PeerAnswer, read_peers
from scripts.report.accuracy_tables import spread, table

TRUTHS: dict[Truth, str] = {"traced": "traces", "cpu": "CPU ranks", "gpu": "GPUs", "published": "published runs"}
CLAIMS = {
    "accelerate": "Adam training at batch size 1: weights, gradients, optimizer states; no sharding",
    "deepspeed": "model states of ZeRO-2 and ZeRO-3",
    "llm-analysis": "states and activations of decoders, Adam, 16 bit",
    "torch": "the peak under fake tensors, of one device and of FSDP2",
}
STATES_ONLY = ("accelerate", "deepspeed")

HEAD = """
## Beside other tools

Each tool is asked only what it claims to answer, in the version named, and given the exact parameter count. The
columns of dsplan are on those same cases. "States" is the error against the optimizer's step alone, for the tools that
claim no more than model states.
"""


def peers(cases: Sequence[Case]) -> Iterator[str]:
    """A row for each tool and kind of truth that it has answers for, and why it has none for the rest."""
    measured = {case.name: case for case in cases if case.measured}
    answers = [item for item in read_peers() if item.case in measured]
    if not answers:
        return
    yield HEAD
    columns = ("tool", "truth", "cases", "median", "worst", "states: median", "states: worst")
    rows = [row for peer in PEERS for truth in TRUTHS for row in _row(peer, truth, answers, measured)]
    yield from table((*columns, "dsplan: median", "dsplan: worst"), rows)
    yield ""
    yield from table(("tool", "version", "what it claims", "cases without an answer"), _claims(answers, len(measured)))


def _row(peer: str, truth: Truth, answers: Sequence[PeerAnswer], measured: dict[str, Case]) -> Iterator[list[str]]:
    answered = [(item, measured[item.case]) for item in answers if item.peer == peer and item.bytes]
    answered = [(item, case) for item, case in answered if case.truth == truth]
    if not answered:
        return
    theirs = spread(item.bytes / case.measured - 1 for item, case in answered)
    cells = [PEERS[peer], TRUTHS[truth], str(theirs.cases), f"{theirs.median:.1%}", f"{theirs.worst:.1%}"]
    states = [item.bytes / case.states_measured - 1 for item, case in answered if case.states_measured]
    if peer in STATES_ONLY and states:
        cells += [f"{spread(states).median:.1%}", f"{spread(states).worst:.1%}"]
    else:
        cells += ["-", "-"]
    ours = spread(case.error for _, case in answered)
    yield [*cells, f"{ours.median:.1%}", f"{ours.worst:.1%}"]


def _claims(answers: Sequence[PeerAnswer], cases: int) -> Iterator[list[str]]:
    for peer, name in PEERS.items():
        own = [item for item in answers if item.peer == peer]
        if own:
            reasons = Counter(item.reason for item in own if item.reason)
            reasons.update({"not asked yet": cases - len(own)} if cases > len(own) else {})
            silent = "; ".join(f"{count}: {reason}" for reason, count in reasons.most_common())
            yield [name, ", ".join(sorted({item.version for item in own})), CLAIMS[peer], silent or "none"]
