"""Published runs asked as a person asks: as the flags of `dsplan estimate`, through the command line's own question.

    python -m scripts.fit.asked

asks every row of `published_asked.csv` (see `asked_rows.py`) and of vTrain's grid, and keeps the answers in
`asked_answers.csv`, which `scripts/report/accuracy_asked.py` sums up. Nothing but flags, a config.json and a cluster
file reaches the planner.
"""

from __future__ import annotations

import csv
import io
import json
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

from dsplan.question import Question, estimate_question
from hardware_db.errors import DsplanError
from hardware_db.files import replace_text
from hardware_db.units import GIB
from planner.search.exact import ExactOptions
from planner.search.request import Request
from planner.types.plan import Plan
from scripts.fit.published_code import UNPADDED
from scripts.fit.published_rows import MEASUREMENTS, RECOMPUTED_FROM

ROWS = MEASUREMENTS / "published_asked.csv"
ANSWERS = MEASUREMENTS / "asked_answers.csv"
BEFORE = MEASUREMENTS / "asked_answers_before.csv"
"""What was said when flags were read and `--code` changed nothing yet (commit 716014a)."""
GRID = MEASUREMENTS / "tp_dp_pp_a100.csv"


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedQuestion:
    """A published run as a question: `flags` by name, a config and a cluster that files hold.

    `memory_bytes` and `tokens_per_s_per_gpu` are 0 where the document prints none; `why_not` says why it is
    no question.
    """

    case: str
    source: str
    publication: str
    reading: str
    code: str
    model: str
    config: Mapping[str, Any]
    cluster: Mapping[str, Any]
    flags: Mapping[str, Any]
    tokens_per_s_per_gpu: float
    memory_bytes: float
    kind: str
    ran: bool
    assumed: str
    why_not: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """The answer of `dsplan estimate`: rate, the memory that the row's kind means in bytes, and the verdict; or why it
    refuses."""

    tokens_per_s_per_gpu: float = 0.0
    memory_bytes: float = 0.0
    verdict: str = ""
    refused: str = ""

    def scaled(self, speed: float) -> Answer:
        """The same with another speed."""
        return replace(self, tokens_per_s_per_gpu=self.tokens_per_s_per_gpu * speed)


class Desk:
    """Asks questions; configs and clusters are files of one directory, as a person's are."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, str] = {}

    def flags_of(self, run: PublishedQuestion) -> dict[str, Any]:
        """Every flag of `dsplan estimate` by its name in Python."""
        flags = dict(run.flags) | {"code": run.code}
        flags["model"] = self._written(json.dumps(run.config), "config.json") if run.config else run.model
        flags["cluster"] = self._written(yaml.safe_dump(dict(run.cluster), sort_keys=False), "cluster.yaml")
        return flags

    def command_line(self, run: PublishedQuestion) -> list[str]:
        """The words after `dsplan`."""
        words = ["estimate"]
        for name, value in self.flags_of(run).items():
            flag = f"--{name.replace('_', '-')}"
            words += [flag] if value is True else [flag, str(value)]
        return [*words, "--json"]

    def plan(self, run: PublishedQuestion) -> Plan:
        """The plan of a question; raises as `priced`."""
        return self.priced(run)[1]

    def priced(self, run: PublishedQuestion) -> tuple[Request, Plan]:
        """The request and the plan of a question.

        Raises:
            DsplanError: the command line refuses.
        """
        flags = self.flags_of(run)
        of_question = {item.name for item in fields(Question)}
        question = Question(**{name: value for name, value in flags.items() if name in of_question})
        options = ExactOptions(**{name: value for name, value in flags.items() if name not in of_question})
        return estimate_question(question, options)

    def answer(self, run: PublishedQuestion) -> Answer:
        """Return what is said of a question."""
        try:
            plan = self.plan(run)
        except DsplanError as error:
            return Answer(refused=str(error))
        memory = plan.memory
        of_kind = {"allocated": memory.peak_allocated_bytes, "reserved": memory.peak_reserved_bytes}
        return Answer(
            tokens_per_s_per_gpu=plan.throughput.tokens_per_second_per_gpu,
            memory_bytes=of_kind.get(run.kind, memory.device_used_bytes),
            verdict=plan.verdict,
        )

    def _written(self, text: str, name: str) -> str:
        if text not in self._files:
            path = self._directory / str(len(self._files)) / name
            path.parent.mkdir()
            path.write_text(text, encoding="utf-8")
            self._files[text] = str(path)
        return self._files[text]


def published(path: Path = ROWS) -> Iterator[PublishedQuestion]:
    """Every row of the collection, or of another file of its columns."""
    with path.open(newline="", encoding="utf-8") as lines:
        for row in csv.DictReader(lines):
            texts = ("case", "source", "publication", "reading", "code", "model", "assumed", "why_not")
            yield PublishedQuestion(
                **{name: row[name] for name in texts},
                config=json.loads(row["config"] or "{}"),
                cluster=json.loads(row["cluster"] or "{}"),
                flags=json.loads(row["flags"] or "{}"),
                tokens_per_s_per_gpu=float(row["tokens_per_s_per_gpu"] or 0),
                memory_bytes=float(row["memory_gib"] or 0) * GIB,
                kind=row["memory_kind"],
                ran=row["ran"] == "yes",
            )


def grid() -> Iterator[PublishedQuestion]:
    """vTrain's grid: GPT under Megatron-DeepSpeed, fp16, vocabulary 50,257."""
    with GRID.open(newline="", encoding="utf-8") as lines:
        for number, row in enumerate(csv.DictReader(lines), start=1):
            yield _of_grid(row, number)


def _of_grid(row: Mapping[str, str], number: int) -> PublishedQuestion:
    gpus, dp, micro = int(row["n_gpus"]), int(row["dp"]), int(row["micro_batch"])
    steps = int(row["global_batch"]) // micro // dp
    tokens = micro * steps * dp * int(row["seq_len"])
    hidden, layers = int(row["hidden"]), int(row["layers"])
    config = {
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": int(row["heads"]),
        "n_inner": 4 * hidden,
        "vocab_size": 50257,
        "n_positions": int(row["seq_len"]),
    }
    cluster = {"gpu": "A100-SXM4-80GB", "nodes": -(-gpus // 8), "gpus_per_node": min(8, gpus)}
    if gpus > 8:
        cluster |= {"inter_link": "ib-hdr", "nics_per_node": 4}
    return PublishedQuestion(
        case=f"vtrain_a100-{number}",
        source="vtrain_a100",
        publication="vtrain_a100",
        reading="stated",
        code=str(UNPADDED) if row["tp"] == "1" else "megatron-deepspeed",
        model=f"gpt {hidden}x{layers}",
        config=config,
        cluster=cluster,
        flags={
            "strategy": "zero1",
            "backend": "deepspeed",
            "tp": int(row["tp"]),
            "pp": int(row["pp"]),
            "micro_batch": micro,
            "grad_accum": steps,
            "seq_len": int(row["seq_len"]),
            "precision": "fp16",
            "optimizer": "adamw-fused",
            "attention": "eager",
            "checkpointing": "full" if gpus >= RECOMPUTED_FROM else "none",
        },
        tokens_per_s_per_gpu=tokens / float(row["iteration_ms"]) * 1e3 / gpus,
        memory_bytes=0.0,
        kind="",
        ran=True,
        assumed="",
        why_not="",
    )


def questions() -> list[PublishedQuestion]:
    """Every row, those that are no question too, and the grid."""
    return [*published(), *grid()]


def answers(runs: Iterable[PublishedQuestion]) -> dict[str, Answer]:
    """Answers by case of those that are questions."""
    with TemporaryDirectory() as directory:
        desk = Desk(Path(directory))
        return {one.case: desk.answer(one) for one in runs if not one.why_not}


def kept(path: Path = ANSWERS) -> dict[str, Answer]:
    """The answers that were kept, by case."""
    with path.open(newline="", encoding="utf-8") as lines:
        return {
            row["case"]: Answer(
                tokens_per_s_per_gpu=float(row["tokens_per_s_per_gpu"] or 0),
                memory_bytes=float(row["memory_gib"] or 0) * GIB,
                verdict=row["verdict"],
                refused=row["refused"],
            )
            for row in csv.DictReader(lines)
        }


def written(given: Mapping[str, Answer]) -> str:
    """Answers as the text of their file."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["case", "tokens_per_s_per_gpu", "memory_gib", "verdict", "refused"])
    for case, answer in given.items():
        speed, memory = answer.tokens_per_s_per_gpu, answer.memory_bytes / GIB
        figures = ["", ""] if answer.refused else [f"{speed:.5g}", f"{memory:.5g}"]
        writer.writerow([case, *figures, answer.verdict, answer.refused])
    return text.getvalue()


def main() -> None:
    runs = questions()
    if sys.argv[1:]:  # the command line of one case
        with TemporaryDirectory() as directory:
            for one in runs:
                if one.case in sys.argv[1:]:
                    print(one.config, one.cluster, shlex.join(Desk(Path(directory)).command_line(one)))
        return
    replace_text(ANSWERS, written(answers(runs)))


if __name__ == "__main__":
    main()
