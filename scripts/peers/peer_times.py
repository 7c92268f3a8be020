"""Answers of other tools for the published runs, as shipped, and the reasons of those that cannot say."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from planner.cost.timing.efficiency import device_rates
from planner.cost.timing.flops import model_flops
from scripts.fit.published_rows import MEASUREMENTS, PublishedRun
from scripts.fit.time_scores import Scored

PATH = MEASUREMENTS / "time_peers.csv"
LLM_ANALYSIS, LLM_ANALYSIS_HALF, RULE = "llm-analysis", "llm-analysis at 0.5", "model FLOPs at 40 % MFU"

EFFICIENCIES: Mapping[str, float | None] = {LLM_ANALYSIS: None, LLM_ANALYSIS_HALF: 0.5}
"""Share of the peak that llm-analysis is told: its default, and what its own source says that Megatron-LM achieves."""

FIXED_MFU = 0.40
"""The rule of thumb: a dense model trains at 40 % of the peak (PaLM's appendix B tabulates 21 to 46 %)."""

WITHOUT_TIME: Mapping[str, str] = {
    "accelerate, DeepSpeed": "estimate memory only",
    "vTrain, Galvatron, Alpa": "need kernels profiled on the GPU in question",
    "torch's RuntimeEstimator": "prices operators with the GPU it runs on",
    "Calculon": "is on no package index, and needs hand-made efficiency curves per system",
}
"""Tools that were asked and have no answer without the hardware."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PeerTime:
    """Seconds of a step that a tool says, or the reason why it does not."""

    run: str
    peer: str
    version: str
    seconds: float
    reason: str


def read_peer_times() -> list[PeerTime]:
    """Return the shipped answers, in file order."""
    with PATH.open(newline="", encoding="utf-8") as lines:
        return [_peer_time(row) for row in csv.DictReader(lines)]


def _peer_time(row: Mapping[str, str]) -> PeerTime:
    seconds = float(row["seconds"] or 0)
    return PeerTime(run=row["run"], peer=row["peer"], version=row["version"], seconds=seconds, reason=row["reason"])


def peer_scores(runs: Sequence[PublishedRun]) -> dict[str, list[Scored]]:
    """By peer, the runs that it answers for."""
    runs_by_name = {run.name: run for run in runs}
    scores: dict[str, list[Scored]] = {peer: [] for peer in EFFICIENCIES}
    for answer in read_peer_times():
        if answer.seconds and answer.run in runs_by_name:
            scores[answer.peer].append(Scored(run=runs_by_name[answer.run], predicted_seconds=answer.seconds))
    scores[RULE] = [Scored(run=run, predicted_seconds=at_fixed_mfu(run)) for run in runs]
    return scores


def at_fixed_mfu(run: PublishedRun) -> float:
    """Seconds of the step's model operations at FIXED_MFU of the peak."""
    plan = run.job.configuration
    peak = device_rates(run.job.cluster, plan.precision).peak_flops
    assert peak, run.name
    return model_flops(run.job) * plan.global_batch_size / plan.micro_batch_size / plan.world_size / peak / FIXED_MFU
