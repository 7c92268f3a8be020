"""A config that somebody brings, from its files to an answer: read, priced, audited, and changed where it should be."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from math import prod
from pathlib import Path
from typing import Any

from dsplan.question import Question
from hardware_db.errors import DsplanError
from hardware_db.handed_in import quote
from hardware_db.records import dataclass
from planner import vocabulary as words
from planner.models.catalogue import knows_model
from planner.models.facts import ModelFacts
from planner.models.resolve import model_of_size, named_model, resolve_model
from planner.models.tasks import possible_tasks
from planner.read.form import Finding, Reading
from planner.read.recognise import read_files
from planner.read.trainers import TRAINERS
from planner.search.audit import Audit, audit
from planner.search.post_training import PostTrainingOptions

_WORK = (
    *(
        "task",
        "seq_len",
        "precision",
        "optimizer",
        "attention",
        "eval_batch",
        "save",
        "compile",
        "loss",
        "method",
        "lora_rank",
    ),
    *("lora_targets", "load_dtype", "fp8_recipe", "global_batch"),
    *(item.name for item in fields(PostTrainingOptions)),
)
"""Fields of a question that a reading may answer."""
_SIZE = re.compile(r"(?<![0-9.x])([0-9]+(?:\.[0-9]+)?)[ _-]?([bBmM])(?![a-zA-Z0-9])")
_DATE = re.compile(r"-2[0-9](0[1-9]|1[0-2])\b|-0[1-9][0-3][0-9]\b")
"""Year and month, or month and day, of a release whose shapes are those of the first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """A reading with what it comes to."""

    reading: Reading
    audit: Audit
    question: Mapping[str, Any]
    """The flags of `estimate` that say the same."""

    @property
    def status(self) -> int:
        """0 where it fits, 1 where it does not fit or run, 2 where nobody can tell."""
        if self.audit.plan is None:
            return 1 if any(finding.id == "impossible" for finding in self.audit.findings) else 2
        return int(self.audit.plan.verdict == "does_not_fit" or self._has_error)

    @property
    def _has_error(self) -> bool:
        return any(finding.severity == "error" for finding in self.audit.findings)

    @property
    def verdict(self) -> str:
        """The verdict on the files in words."""
        if self.audit.plan is None:
            return "no estimate"
        if self._has_error and self.audit.plan.verdict != "does_not_fit":
            return "cannot run"
        return self.audit.plan.verdict.replace("_", " ")


def check_files(
    paths: Sequence[Path],
    command: Sequence[str] = (),
    *,
    format: str | None = None,
    hardware: Mapping[str, Any],
    model: str | None = None,
    seq_len: int | None = None,
) -> Checked:
    """Read files and a command as one training and say what it comes to.

    `hardware` are fields of `Question`: GPUs, nodes and what they are; what is None there comes from the files, else
    from this machine. `model` and `seq_len` are what the files do not say, or in its place.

    Raises:
        DsplanError: a file cannot be read, trains nothing, or a flag is none that can be planned with.
    """
    reading = read_files(paths, command, format)
    return check_reading(reading, hardware=hardware, model=model, seq_len=seq_len)


def check_reading(
    reading: Reading, *, hardware: Mapping[str, Any], model: str | None = None, seq_len: int | None = None
) -> Checked:
    """Say what a reading comes to; `hardware`, `model` and `seq_len` as of `check_files`.

    Raises:
        DsplanError: a flag is none that can be planned with.
    """
    answers = {name: value for name, value in reading.answers.items() if value is not None}
    answers |= {name: value for name, value in (("model", model), ("seq_len", seq_len)) if value is not None}
    chosen = _hardware(answers, hardware)
    question = {**{key: value for key, value in answers.items() if key not in _NO_FLAGS}, **chosen}
    reading = replace(reading, answers=answers)
    try:
        facts, notes = _model(answers, reading, is_flag=model is not None)
    except DsplanError as error:
        return _without_plan(reading, question, str(error), "unknown-model")
    answers, others = _possible_work(answers, facts)
    reading = replace(reading, findings=(*reading.findings, *notes, *others))
    work = {name: answers[name] for name in _WORK if name in answers}
    if work.get("task") == "causal-lm":
        work.pop("task")
    code = TRAINERS[reading.format].code if "code" not in answers else answers["code"]
    whole = Question(**work, **chosen, model=facts.name, code=code, max_memory_gb=hardware.get("max_memory_gb"))
    try:
        request = whole.request(facts, of_file=True, allow_unrunnable=True)
    except DsplanError as error:
        if any(word in str(error) for word in ("--gpu ", "--cluster", "--node", "--interconnect", "unknown GPU")):
            raise
        return _without_plan(reading, question, str(error), "impossible")
    outcome = audit(request, reading, answers)
    if "copies" in answers and outcome.plan is not None:
        now = outcome.plan.configuration
        question |= {"strategy": now.strategy, **({"shard": now.dp_shard * now.cp} if now.strategy == "hsdp" else {})}
    return Checked(reading=reading, audit=outcome, question={**question, "code": code})


_NO_FLAGS = frozenset({"model_config", "copies"})
"""Answers that are no flags of `estimate`: a model's own config, and copies, which `--shard` says by their ranks."""
_ROUNDS = tuple(item.name for item in fields(PostTrainingOptions))


def _possible_work(answers: dict[str, Any], facts: ModelFacts) -> tuple[dict[str, Any], list[Finding]]:
    """Return answers without rounds of generation that are not planned for such a model: its update is left."""
    if answers.get("task") not in words.GENERATING or answers["task"] in possible_tasks(facts):
        return answers, []
    left = {name: value for name, value in answers.items() if name not in (*_ROUNDS, "steps_per_generation", "task")}
    prompt, completion = answers.get("prompt_len") or 0, str(answers.get("completion_len") or 0)
    if "seq_len" not in left and completion.isdigit() and prompt + int(completion):
        left["seq_len"] = prompt + int(completion)
    message = f"{answers['task']} of {facts.kind} models is not planned: its update is counted as supervised training"
    return left, [Finding(severity="warning", id="update-only", message=message)]


# The same files as a question to be searched for, not a configuration to be priced.


@dataclass(frozen=True, kw_only=True, slots=True)
class FilesQuestion:
    """The question of files and flags together, the model where only the files know it, and what to tell of both."""

    question: Question
    facts: ModelFacts | None
    remarks: tuple[str, ...]


def question_of(paths: Sequence[Path], flags: Mapping[str, Any]) -> FilesQuestion:
    """Return the question that files ask, with flags of `Question` in the place of what they say.

    `flags` are those that a person gave, and no defaults. The global batch of the files is that of their micro-batch,
    accumulation and ranks where they name none. Strategy, degrees, recomputation and offload stay open.

    Raises:
        DsplanError: a file cannot be read or trains nothing, or no file and no flag names the model.
    """
    return question_of_reading(read_files(paths), flags)


def question_of_reading(reading: Reading, flags: Mapping[str, Any]) -> FilesQuestion:
    """Return the question that a reading asks, with flags in the place of what it says, as `question_of` does.

    Raises:
        DsplanError: neither it nor a flag names the model.
    """
    answers = {name: value for name, value in reading.answers.items() if value is not None}
    answers = {**answers, **{name: flags[name] for name in ("model", "seq_len") if name in flags}}
    names_model = "model" in flags or "model_size" in flags
    facts, notes = (None, []) if names_model else _model(answers, reading, is_flag=False)
    names = [item.name for item in fields(Question) if item.name in answers and item.name not in _MODEL]
    work = {name: answers[name] for name in names if name not in flags and name not in ("gpus", "nodes")}
    if work.get("task") == "causal-lm":
        work.pop("task")
    if flags.get("method") == "full":
        work = {name: value for name, value in work.items() if name not in ("lora_rank", "lora_targets", "load_dtype")}
    work.setdefault("code", TRAINERS[reading.format].code)
    chosen = _hardware(answers, {name: flags[name] for name in _HARDWARE if name in flags})
    if "global_batch" not in answers and (batch := _global_batch(answers, chosen.get("gpus"))) is not None:
        work["global_batch"] = batch
    given = {name: value for name, value in flags.items() if name not in _HARDWARE}
    question = Question(**{**work, **chosen, **given})
    remarks = [finding.message for finding in notes]
    shown = ", ".join(reading.files)
    taken = ", ".join(f"{name} {value}" for name, value in {**work, **chosen}.items() if name not in flags)
    remarks.append(f"{shown}, {reading.trainer}'s: {taken} (--config)")
    if gaps := list(dict.fromkeys(item.key for item in reading.gaps)):
        more = f" and {len(gaps) - _SHOWN_GAPS} more" if len(gaps) > _SHOWN_GAPS else ""
        remarks.append(f"not counted of it: {', '.join(gaps[:_SHOWN_GAPS])}{more}; `dsplan check` says why")
    return FilesQuestion(question=question, facts=facts, remarks=tuple(remarks))


_MODEL = ("model", "model_size")
_HARDWARE = ("gpus", "gpu", "nodes", "node_type", "interconnect", "cluster")
_SHOWN_GAPS = 5


def _global_batch(answers: Mapping[str, Any], gpus: int | None) -> int | None:
    """Return micro-batch x accumulation x replicas, None where a file does not say how many samples a GPU takes."""
    micro = answers.get("micro_batch")
    if micro is None or gpus is None:
        return None
    sharing = prod(int(answers.get(name) or 1) for name in ("tp", "pp", "cp"))
    return int(micro) * int(answers.get("grad_accum") or 1) * max(gpus // sharing, 1)


def _without_plan(reading: Reading, question: Mapping[str, Any], why: str, id: str) -> Checked:
    findings = (Finding(severity="error", id=id, message=why), *reading.findings)
    outcome = Audit(request=None, plan=None, findings=findings, why=why)
    return Checked(reading=reading, audit=outcome, question=question)


def _hardware(answers: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hardware of the flags, with the files' GPUs and nodes where the flags say neither.

    Where the files do not either, and their engines are on GPUs that train, there are those of one engine.
    """
    chosen = {name: value for name, value in flags.items() if value is not None and name != "max_memory_gb"}
    if not {"gpus", "nodes", "cluster", "node_type"} & chosen.keys():
        chosen |= {name: answers[name] for name in ("gpus", "nodes") if name in answers}
        gpus, nodes = chosen.get("gpus"), chosen.get("nodes", 1)
        if gpus is not None and gpus % nodes:
            chosen.pop("nodes")
        if gpus is None and answers.get("rollout") == "colocate" and "gpu" in chosen:
            chosen["gpus"] = int(answers.get("rollout_tp") or 1)
    return chosen


def _model(answers: Mapping[str, Any], reading: Reading, *, is_flag: bool) -> tuple[ModelFacts, list[Finding]]:
    """Return the model that a config names, and what was taken for granted of it.

    Of a model that is not known and has its size in its name, a decoder like LLaMA of that size is taken.

    Raises:
        DsplanError: no file names one, or nothing is known of it.
    """
    if "model_config" in answers and not is_flag:
        from planner.models.from_hf.config import facts_from_config

        return facts_from_config(
            answers["model_config"], str(answers.get("model") or f"the model of {reading.files[0]}")
        ), []
    name = answers.get("model")
    if not name:
        raise DsplanError("no file names the model; give --model NAME")
    name = str(name)
    if is_flag:
        return resolve_model(name), []
    try:
        return _named(name, reading), []
    except DsplanError as error:
        sizes = _SIZE.findall(name.rpartition("/")[2])
        if not sizes:
            raise DsplanError(f"{error}; or give --model NAME") from None
        size = f"{sizes[0][0]}{sizes[0][1].upper()}"
        shown = name if name.isprintable() and len(name) < _MOST_SHOWN else quote(name)
        message = f"{shown} is not known here; a decoder like LLaMA of {size} is counted (--model names a better one)"
        return model_of_size(size), [Finding(severity="warning", id="model-by-size", message=message)]


def _named(name: str, reading: Reading) -> ModelFacts:
    """Return a model by its name, or by a config.json in the folder of the file that names it."""
    if reading.looks_at_files:
        base = Path(reading.files[0]).parent.resolve()
        inside = (base / name).resolve()
        if inside.is_relative_to(base) and os.path.isfile(inside / "config.json"):  # False for names too long
            return resolve_model(str(inside))
    name = name.rstrip("/")
    dateless = _DATE.sub("", name)
    if dateless != name and not knows_model(name) and knows_model(dateless):
        return named_model(dateless)
    return named_model(name)


_MOST_SHOWN = 100
"""Letters of a model's name that are shown as they are."""
_SUFFIXES = (".yaml", ".yml", ".json", ".toml", ".sh", ".slurm", ".sbatch")
MOST_FILES = 5000


def check_folder(folder: Path, hardware: Mapping[str, Any]) -> list[tuple[str, Checked | str]]:
    """Check each config and script below a folder by itself: what it comes to, or why it is not read.

    Raises:
        DsplanError: there is none, or there are too many.
    """
    paths = sorted(path for path in folder.rglob("*") if path.suffix in _SUFFIXES and path.is_file())
    if not paths:
        raise DsplanError(f"{folder}: holds no config or script ({', '.join(_SUFFIXES)}); name one that does")
    if len(paths) > MOST_FILES:
        raise DsplanError(
            f"{folder}: holds {len(paths):,} files, and {MOST_FILES:,} are read at the most; name a part of it"
        )
    rows = check_each(paths, hardware)
    return [(str(Path(path).relative_to(folder)), outcome) for path, outcome in rows]


def check_each(paths: Sequence[Path], hardware: Mapping[str, Any]) -> list[tuple[str, Checked | str]]:
    """Check files by themselves: what each comes to, or why it is not read."""
    rows: list[tuple[str, Checked | str]] = []
    for path in paths:
        try:
            rows.append((str(path), check_files([path], hardware=hardware)))
        except DsplanError as error:
            rows.append((str(path), str(error).removeprefix(f"{path}: ").removeprefix(f"{path}, ")))
    return rows
