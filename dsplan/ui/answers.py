"""Answers to the page's questions, made in a process of their own: `python -m dsplan.ui.answers`.

A line of JSON comes in for every task and one goes out: what the page shows, as HTML, pictures and files. The process
ends with its standard input, so that none outlives the server.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dsplan.question import Question
from dsplan.render.answer_html import answer_html, rejected_html
from dsplan.render.html import blocks_html
from dsplan.render.plan_view import dims_text, figure_blocks
from dsplan.report import plans as pictures
from dsplan.ui.address import MOST_FILES, page_fields, read_address, with_labels, write
from hardware_db.errors import DsplanError
from hardware_db.handed_in import parse_json
from hardware_db.records import dataclass
from planner.cost.timing.timeline import step_timeline
from planner.read.documents import MOST_BYTES
from planner.read.recognise import read_texts
from planner.search.emitted import fitting_configs
from planner.search.estimate import job_of
from planner.search.search import Recommendation, recommend
from planner.types.plan import Plan
from planner.types.plan_io import plan_text

MOST_MEMORY_BYTES = 4 * 2**30
"""Of addresses that the process may have; an answer takes a tenth."""
_REMEMBERED = 8
"""Searches whose plans are at hand when a picture or a file of them is asked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Work for a process: `kind` is a name of `KINDS`, `query` the address, `plan` the rank of a plan."""

    kind: str
    query: str
    plan: int = 1
    files: str = ""
    """Of a check: JSON of the texts of files by their names."""


Answer = Mapping[str, Any]
"""JSON. `error` is a line for the person who asked, and then all there is."""


_HTML = ("html", "rejected", "plan")
"""Parts of an answer that the page shows as they are."""


def answer(task: Task) -> Answer:
    """Return what the page shows for a task."""
    try:
        given = KINDS[task.kind](task)
    except DsplanError as error:
        return {"error": str(error)}
    return {**given, **{name: with_labels(given[name]) for name in _HTML if name in given}}


def plans(task: Task) -> Answer:
    """Return the ranked plans, why others lost, the command that asks the same, and what `plan` says of one."""
    answer = _search(task.query)
    return {
        "html": answer_html(answer),
        "rejected": rejected_html(answer),
        "plans": [_label(rank, plan) for rank, plan in enumerate(answer.plans, start=1)],
        "command": read_address(task.query)[0].command(),
        "pictures": {name: json.dumps(drawn(answer.plans)) for name, drawn in OF_PLANS.items() if answer.plans},
        **plan(task),
    }


def plan(task: Task) -> Answer:
    """Return where bytes and seconds of a plan go, its files by path, and a script's duties by format.

    Where nothing fits it is the closest miss, which has no files.
    """
    answer = _search(task.query)
    if not answer.plans:
        closest = "" if answer.closest is None else blocks_html(figure_blocks(answer.closest))
        return {"rank": 1, "plan": closest, "step": "", "files": {}, "duties": {}}
    rank = min(max(task.plan, 1), len(answer.plans))
    chosen = answer.plans[rank - 1]
    files, duties = {"plan.yaml": plan_text(chosen)}, {}
    for format, emitted in fitting_configs(chosen).items():
        files.update({f"{format}/{name}": text for name, text in emitted.files.items()})
        duties[format] = list(emitted.duties)
    spans = step_timeline(job_of(answer.request, chosen.configuration))
    return {
        "rank": rank,
        "plan": blocks_html(figure_blocks(chosen)),
        "step": json.dumps(pictures.step(spans)),
        "files": files,
        "duties": duties,
    }


def report(task: Task) -> Answer:
    """Return what `dsplan report` writes, with how the answer changes over GPUs, micro-batches and lengths."""
    from dsplan.report.make import answer_page
    from dsplan.report.page import page_html

    read, _ = read_address(task.query)
    question, facts, goal = read.question()
    answer = recommend(question.request(facts, **goal.ranking()), with_front=True)
    return {"report": page_html(answer_page(answer, read.command()))}


def check(task: Task) -> Answer:
    """Return what a trainer's own files come to on the page's hardware, and the question that they ask.

    `html` is the check, `fields` are texts of the page's fields by name, `config` is a config.json in the place of the
    model. The files' own number of GPUs counts where they name one.
    """
    from dsplan.checking import check_reading, question_of_reading
    from dsplan.render.check_view import check_html

    address, _ = read_address(task.query)
    reading, hardware = read_texts(_texts(task.files)), address.hardware()
    if reading.answers.get("gpus") and not hardware["node_type"]:
        hardware = {name: value for name, value in hardware.items() if name not in ("gpus", "nodes")}
    if not {"model", "model_config"} & reading.answers.keys():
        own = {"model_config": address.own_config()} if address.config else {"model": address.values["model"]}
        reading = replace(reading, answers={**reading.answers, **own})
    html = check_html(check_reading(reading, hardware=hardware))
    try:
        question = question_of_reading(reading, {name: value for name, value in hardware.items() if value})
    except DsplanError:  # the check says why nothing can be planned
        return {"html": html}
    texts = {
        name: write(getattr(question.question, name)) for name in page_fields() if name in Question.__dataclass_fields__
    }
    config = reading.answers.get("model_config")
    if config is None and question.facts is not None:
        texts["model"] = question.facts.name
    return {"html": html, "fields": texts, "config": "" if config is None else json.dumps(config)}


def _texts(files: str) -> dict[str, str]:
    """Return the texts of files by name.

    Raises:
        DsplanError: there are too many, they are too large, or they are no texts.
    """
    texts = parse_json(files, "the files", "choose them again")
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise DsplanError("the files are no texts by name; choose them again")
    if len(texts) > MOST_FILES:
        raise DsplanError(f"{len(texts)} files are there; choose at most {MOST_FILES}: those of one training")
    if sum(len(text.encode(errors="replace")) for text in texts.values()) > MOST_BYTES:
        raise DsplanError(f"the files are larger than {MOST_BYTES // 2**20} MiB; choose the config, not the data")
    return texts


OF_PLANS: Mapping[str, Callable[[Sequence[Plan]], pictures.Drawn]] = {
    "memory": pictures.memory,
    "seconds": pictures.seconds,
    "trade": pictures.trade,
}
KINDS: Mapping[str, Callable[[Task], Answer]] = {"plans": plans, "plan": plan, "report": report, "check": check}


@functools.lru_cache(maxsize=_REMEMBERED)
def _search(query: str) -> Recommendation:
    question, facts, goal = read_address(query)[0].question()
    return recommend(question.request(facts, **goal.ranking()))


def _label(rank: int, plan: Plan) -> str:
    return f"{rank}. {plan.configuration.strategy}, {dims_text(plan.configuration)}"


# The process.


def main() -> None:
    """Answer the lines of the standard input until it ends."""
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what a library prints is not an answer
    _limit_memory()
    for line in sys.stdin:
        try:
            given = answer(Task(**json.loads(line)))
        except MemoryError:
            given = {"error": "this question takes more memory than the page may have; ask for less"}
        lines.write(json.dumps(given, allow_nan=False) + "\n")
        lines.flush()


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # there are no such limits on Windows
        return
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    most = MOST_MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(hard, MOST_MEMORY_BYTES)
    resource.setrlimit(resource.RLIMIT_AS, (most, hard))


if __name__ == "__main__":
    main()
