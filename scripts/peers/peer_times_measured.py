"""Asks llm-analysis how long the published runs take and keeps its answers in `time_peers.csv`.

python -m scripts.peers.peer_times_measured PYTHON        # an interpreter that can import llm_analysis

"""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hardware_db.files import replace_text
from scripts.fit.published_rows import PublishedRun, published_runs
from scripts.peers.peer_times import EFFICIENCIES, PATH, PeerTime
from scripts.peers.peers import LLM_ANALYSIS, NoAnswer, _question

GPUS: Mapping[str, str] = {
    "A100-SXM4-80GB": "a100-sxm-80gb",
    "H100-SXM5-80GB": "h100-sxm-80gb",
    "V100-SXM2-16GB": "v100-sxm-16gb",
    "V100-SXM2-32GB": "v100-sxm-32gb",
}


def main() -> None:
    """Ask the peer about the published runs and write its answers."""
    runs = list(published_runs())
    answers = [item for peer, share in EFFICIENCIES.items() for item in _ask(runs, peer, share, sys.argv[1])]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=["run", "peer", "version", "seconds", "reason"], lineterminator="\n")
    writer.writeheader()
    writer.writerows({**asdict(item), "seconds": f"{item.seconds:.4g}" if item.seconds else ""} for item in answers)
    replace_text(PATH, text.getvalue())


def _ask(runs: Sequence[PublishedRun], peer: str, share: float | None, interpreter: str) -> list[PeerTime]:
    """One run of the other interpreter for all runs."""
    questions_of_runs: list[tuple[PublishedRun, dict[str, Any]]] = []
    refused: list[tuple[PublishedRun, str]] = []
    for run in runs:
        try:
            questions_of_runs.append((run, _timed_question(run, share)))
        except NoAnswer as error:
            refused.append((run, str(error)))
    questions = json.dumps([question for _, question in questions_of_runs])
    process = subprocess.run(
        [interpreter, "-I", LLM_ANALYSIS], input=questions, capture_output=True, text=True, check=True
    )
    reply = json.loads(process.stdout)
    times = [
        PeerTime(
            run=run.name,
            peer=peer,
            version=reply["version"],
            seconds=answer.get("seconds", 0.0),
            reason=answer.get("reason", ""),
        )
        for (run, _), answer in zip(questions_of_runs, reply["answers"], strict=True)
    ]
    return times + [
        PeerTime(run=run.name, peer=peer, version=reply["version"], seconds=0.0, reason=why) for run, why in refused
    ]


def _timed_question(run: PublishedRun, share: float | None) -> dict[str, Any]:
    """Return the question about memory, with the GPU and the share of its peak."""
    device = run.job.cluster.device.name
    if device not in GPUS:
        raise NoAnswer(f"has no {device}")
    return {**_question(run.job), "gpu": GPUS[device], "efficiency": share}


if __name__ == "__main__":
    main()
