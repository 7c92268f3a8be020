"""The page's question as an address: the flags of `dsplan recommend` by name, read as strictly as on the command line.

Whoever asks is a stranger: nothing here looks at a file, runs code or asks another machine.
"""

from __future__ import annotations

import base64
import functools
import re
import shlex
import zlib
from collections.abc import Mapping
from dataclasses import fields, replace
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints
from urllib.parse import parse_qsl, urlencode
from urllib.parse import quote as escape

from dsplan.cli.flags import WITH_SUFFIX, HardwareFlags, ModelFlags, RankingFlags, WorkFlags
from dsplan.question import Goal, Question
from hardware_db.datasheets import find_device
from hardware_db.errors import DsplanError, UnknownName
from hardware_db.handed_in import parse_json, quote
from hardware_db.records import dataclass
from hardware_db.units import parse_length
from planner import limits
from planner.cost.code_bases import code_names
from planner.models.facts import ModelFacts
from planner.models.resolve import named_model

SECTIONS: Mapping[str, tuple[str, ...]] = {
    "Question": ("model", "gpus", "gpu", "seq_len", "global_batch", "method"),
    "Hardware": ("nodes", "node_type", "interconnect", "max_memory_gb", "host_memory_gb"),
    "Work": (
        "task", "precision", "optimizer", "attention", "code", "loss", "lora_rank", "lora_targets", "train_only",
        "load_dtype", "fp8_recipe", "source_len", "eval_batch", "eval_keep", "expert_imbalance", "save", "compile",
        "ema", "image_size",
    ),
    "Post-training": (
        "prompt_len", "completion_len", "generations", "prompts_per_step", "num_iterations", "beta", "rollout",
        "rollout_gpus", "rollout_tp", "rollout_memory", "rollout_sleep", "steps_off", "precompute_ref",
    ),
    "Goal": ("objective", "price", "tokens", "deadline", "backend", "offload", "shard", "fastest", "all_plans"),
}  # fmt: skip
"""Flags of `recommend` that the page has, by the part of the page. `--cluster` and `--out` name files of the server,
and `--model-size` is what the page takes for a model too."""

_LABELS: Mapping[str, str] = {
    "model": "Model", "gpus": "GPUs in total", "gpu": "GPU", "seq_len": "Sequence length",
    "global_batch": "Global batch", "method": "Method", "nodes": "Nodes", "node_type": "Node type",
    "interconnect": "Link between nodes", "max_memory_gb": "GPU memory limit in GB",
    "host_memory_gb": "Host memory in GB", "task": "Task", "precision": "Precision", "optimizer": "Optimizer",
    "attention": "Attention", "code": "Code base", "loss": "Loss over the vocabulary", "lora_rank": "LoRA rank",
    "lora_targets": "LoRA targets", "train_only": "Weights to train", "load_dtype": "Weights loaded as",
    "fp8_recipe": "FP8 recipe", "source_len": "Encoder tokens", "eval_batch": "Evaluation batch",
    "eval_keep": "Evaluation logits kept", "expert_imbalance": "Expert imbalance", "save": "Checkpoint saving",
    "compile": "torch.compile", "ema": "Moving average of the weights", "image_size": "Image size",
    "prompt_len": "Prompt length", "completion_len": "Completion length", "generations": "Completions per prompt",
    "prompts_per_step": "Prompts per generation", "num_iterations": "Updates per completion",
    "beta": "KL coefficient", "rollout": "Generation engine", "rollout_gpus": "GPUs for generation",
    "rollout_tp": "Tensor parallelism of the engine", "rollout_memory": "Memory share of the engine",
    "rollout_sleep": "Engine sleeps while training", "steps_off": "Generations ahead of training",
    "precompute_ref": "Reference model runs beforehand", "objective": "Objective",
    "price": "Price of a GPU-hour in USD", "tokens": "Tokens of the training", "deadline": "Deadline",
    "backend": "ZeRO implementation", "offload": "Offload", "shard": "Ranks that share one set of states",
    "fastest": "By predicted figures alone", "all_plans": "Plans of other trainers too",
}  # fmt: skip
"""The name of each field on the page, in the field's own words."""

START: Mapping[str, str] = {"model": "llama-3-8b", "gpus": "8", "gpu": "H100-SXM5-80GB"}
"""What an address that is silent about the model, or about the hardware, asks for."""

MOST_LETTERS = 100
"""Of a name or a pattern."""
MOST_CONFIG_BYTES = 128 * 2**10
"""Of a config.json; those of the Hub have 1 to 10 KiB, with thousands of labels 100."""
MOST_FILES = 8
"""Of a check: a config with what it names."""
MOST_ADDRESS_BYTES = 16 * 2**10
"""Of a question as an address: proxies refuse longer ones."""
CONFIG, PLAN = "config", "plan"
"""What else is in an address: a config.json, packed, and the rank of the plan that is shown."""
_MOST_FIELDS = 100
_HARDWARE = ("gpus", "gpu", "nodes", "node_type")

Value = str | int | float | bool | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Field:
    """A flag as a field of the page."""

    name: str
    """Of the keyword; `flag` is how it is written."""
    help: str
    kind: Literal["choice", "switch", "whole", "fraction", "text"]
    default: Value
    choices: tuple[str, ...] = ()
    least: float = 0
    most: float = 0
    suffixes: bool = False
    """Whether it may be written as 8k."""

    @property
    def flag(self) -> str:
        """The name of the command line's flag, without its dashes."""
        return self.name.replace("_", "-")

    @property
    def label(self) -> str:
        """The name of the field on the page."""
        return _LABELS[self.name]

    def read(self, text: str) -> Value:
        """Return the value that a person wrote; empty is the default.

        Raises:
            DsplanError: it is none that the flag takes.
        """
        written = text.strip()
        if not written:
            return self.default
        if len(written) > MOST_LETTERS:
            raise DsplanError(f"--{self.flag} is {quote(written)}; write at most {MOST_LETTERS} characters")
        if not written.isprintable():
            raise DsplanError(f"--{self.flag} is {quote(written)}; write it in letters that can be seen")
        return self._parse_typed(written)

    def _parse_typed(self, written: str) -> Value:
        if self.kind == "text":
            return written
        if self.kind == "switch":
            return self._parse_choice(written.lower(), ("true", "false")) == "true"
        if self.kind == "choice":
            return self._parse_choice(written, self.choices)
        limit = limits.Limit(least=self.least, most=self.most, fraction=self.kind == "fraction")
        value = self._number(written)
        limit.check(f"--{self.flag}", written if value is None else value)
        return value

    def _parse_choice(self, written: str, choices: tuple[str, ...]) -> str:
        if written not in choices:
            raise DsplanError(f"--{self.flag} is {quote(written)}; give one of {', '.join(choices)}")
        return written

    def _number(self, written: str) -> int | float | None:
        if self.suffixes and written[-1] in "kKmM":
            return parse_length(written)
        if re.fullmatch(r"[0-9]{1,18}(\.0+)?", written):
            return int(written.partition(".")[0])
        if self.kind == "fraction" and re.fullmatch(r"[0-9]{0,15}\.[0-9]{1,15}", written):
            return float(written)
        return None


def write(value: object) -> str:
    """Return a value as the address has it; empty for None."""
    if isinstance(value, bool):
        return "true" if value else ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return "" if value is None else str(value)


@functools.lru_cache(maxsize=1)
def page_fields() -> Mapping[str, Field]:
    """Every flag that the page has, by name, with the help, the choices and the limits of the command line."""
    by_name = flag_fields(ModelFlags, HardwareFlags, WorkFlags, RankingFlags)
    return {name: by_name[name] for names in SECTIONS.values() for name in names}


def flag_fields(*groups: Any) -> Mapping[str, Field]:
    """Return the flags of groups of `dsplan.cli.flags` as fields, by name."""
    by_name = {}
    for group in groups:
        hints = get_type_hints(group, include_extras=True)
        by_name.update({item.name: _field(item.name, hints[item.name], item.default) for item in fields(group)})
    return by_name


def _field(name: str, hint: Any, default: Any) -> Field:
    kind_of_value, option = get_args(hint)[:2]
    alternatives = get_args(kind_of_value) if get_origin(kind_of_value) in (Union, UnionType) else (kind_of_value,)
    plain = next(kind for kind in alternatives if kind is not type(None))
    choices = get_args(plain) if get_origin(plain) is Literal else code_names() if name == "code" else ()
    kinds: Mapping[Any, Any] = {bool: "switch", int: "whole", float: "fraction"}
    return Field(
        name=name,
        help=option.help or "",
        kind="choice" if choices else kinds.get(plain, "text"),
        default=default,
        choices=tuple(choices),
        least=option.min or 0,
        most=option.max or 0,
        suffixes=option.metavar == WITH_SUFFIX,
    )


_TAG_OR_FLAG = re.compile(r"<(code|pre)\b.*?</\1>|<[^>]*>|(?<![\w-])--([a-z][a-z0-9-]*)", re.DOTALL)


def with_labels(html: str) -> str:
    """Return HTML, or escaped text, that speaks of the page's fields by their labels and not by their flags.

    Flags that the page has no field for, and what stands in `code` and `pre`, which is for a terminal, stay.
    """
    labels = {field.flag: field.label for field in page_fields().values()}

    def say(match: re.Match[str]) -> str:
        return f"“{labels[match[2]]}”" if match[2] in labels else match[0]

    return _TAG_OR_FLAG.sub(say, html)


@dataclass(frozen=True, kw_only=True, slots=True)
class PageQuestion:
    """A question of the page: values of flags, and the text of a config.json in place of a model's name."""

    values: Mapping[str, Value]
    """Of every field of the page."""
    config: str = ""

    def address(self) -> str:
        """Return the query of the address that asks the same: what is not a default, under the names of flags.

        Raises:
            DsplanError: the config.json is too large for an address.
        """
        on_page = page_fields()
        pairs = [
            (on_page[name].flag, write(value)) for name, value in self.values.items() if value != on_page[name].default
        ]
        if self.config:
            packed = zlib.compress(self.config.encode(), 9)
            pairs.insert(0, (CONFIG, base64.urlsafe_b64encode(packed).decode().rstrip("=")))
        query = urlencode(pairs, quote_via=escape)
        if len(query) > MOST_ADDRESS_BYTES:
            raise DsplanError(f"the config.json takes {len(query):,} letters of the address; leave its labels out")
        return query

    def command(self) -> str:
        """Return what to type for the same answer in a terminal."""
        words = ["dsplan", "recommend", *(["--model", "config.json"] if self.config else [])]
        for name, value in self.values.items():
            field = page_fields()[name]
            if value != field.default:
                words += [f"--{field.flag}"] if field.kind == "switch" else [f"--{field.flag}", write(value)]
        return shlex.join(words)

    def question(self) -> tuple[Question, ModelFacts, Goal]:
        """Return what is asked of the planner.

        Raises:
            DsplanError: no model or no hardware is named, or a name is in no catalogue.
        """
        values = dict(self.values)
        facts = _own_model(self.own_config()) if self.config else _model(str(values["model"] or ""))
        self.hardware()
        goals = {item.name for item in fields(Goal)}
        goal = Goal(**{name: value for name, value in values.items() if name in goals})  # type: ignore[arg-type]
        work: dict[str, Any] = {name: value for name, value in values.items() if name not in goals}
        return Question(**work | {"model": None}), facts, goal

    def own_config(self) -> dict[str, Any]:
        """Return the config.json of the question.

        Raises:
            DsplanError: it is no object.
        """
        document = parse_json(self.config, "config.json", "paste the whole config.json of the model")
        if not isinstance(document, dict):
            raise DsplanError("config.json: is not an object; paste the whole config.json of the model")
        return document

    def hardware(self) -> dict[str, Value]:
        """Return the fields of the hardware, which is never that of the server.

        Raises:
            DsplanError: none is named, or one that is not known.
        """
        if not self.values["gpu"] and not self.values["node_type"]:
            raise DsplanError("no hardware is named; choose a GPU or a node type")
        if self.values["gpu"]:
            find_device(str(self.values["gpu"]))  # `cpu` would mean the server's own
        return {name: self.values[name] for name in ("gpu", *SECTIONS["Hardware"], "gpus")}


def read_values(written: Mapping[str, str], config: str = "") -> PageQuestion:
    """Return what the fields of the page say; `written` has texts by the names of fields, and may lack some.

    Where there is a config.json, the model that they name does not count.

    Raises:
        DsplanError: a field says what its flag does not take.
    """
    if len(config.encode(errors="replace")) > MOST_CONFIG_BYTES:
        raise DsplanError(f"the config.json is larger than {MOST_CONFIG_BYTES // 1024} KiB; leave its labels out")
    config = config.strip()
    texts = {**written, "model": ""} if config else written
    values = {name: field.read(texts.get(name, "")) for name, field in page_fields().items()}
    return PageQuestion(values=values, config=config)


def read_address(query: str) -> tuple[PageQuestion, tuple[str, ...]]:
    """Return what the query of an address asks, and the names in it that are no flag of the page.

    Raises:
        DsplanError: it is too long, or a value is none that its flag takes.
    """
    texts, config, unknown = address_texts(query)
    return read_values(texts, config), unknown


def address_texts(query: str) -> tuple[dict[str, str], str, tuple[str, ...]]:
    """Return the texts of an address by field, its config.json, and the names in it that are no flag of the page.

    A field that it leaves open has the text of `START`. What Gradio and Spaces add begins with two underscores and is
    left aside.

    Raises:
        DsplanError: it is too long, or its config.json is not one.
    """
    if len(query) > MOST_ADDRESS_BYTES:
        raise DsplanError(f"the address is longer than {MOST_ADDRESS_BYTES:,} letters; ask with fewer")
    names = {field.flag: name for name, field in page_fields().items()}
    given = {name: text for name, text in pairs(query) if not name.startswith("__")}
    config = _unpack(given.pop(CONFIG, ""))
    texts = {names[flag]: text for flag, text in given.items() if flag in names}
    hardware = any(texts.get(name) for name in _HARDWARE)
    for name, text in START.items():
        if not (config or texts.get("model")) if name == "model" else not hardware:
            texts[name] = text
    return texts, config, tuple(quote(flag) for flag in given if flag not in names and flag != PLAN)


def address_plan(query: str) -> int:
    """Return the rank of the plan that an address shows; 1 where it names none.

    Raises:
        DsplanError: the address has too many parts.
    """
    rank = dict(pairs(query)).get(PLAN, "")
    return int(rank) if re.fullmatch("[1-9][0-9]?", rank) else 1


def drop_part(query: str, name: str) -> str:
    """Return an address without one of its parts.

    Raises:
        DsplanError: it has too many.
    """
    return urlencode([pair for pair in pairs(query) if pair[0] != name], quote_via=escape)


def pairs(query: str) -> list[tuple[str, str]]:
    """Return the names and values of an address.

    Raises:
        DsplanError: it has too many.
    """
    try:
        return parse_qsl(query, max_num_fields=_MOST_FIELDS)
    except ValueError:
        raise DsplanError(f"the address asks for more than {_MOST_FIELDS} things; ask for fewer") from None


def _unpack(packed: str) -> str:
    if not packed:
        return ""
    try:
        unpacking = zlib.decompressobj()
        text = unpacking.decompress(base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4)), MOST_CONFIG_BYTES)
        if unpacking.unconsumed_tail or not unpacking.eof:
            raise ValueError
        return text.decode()
    except (ValueError, zlib.error):
        raise DsplanError(f"{CONFIG} in the address is no config.json as this page packs it; copy it again") from None


_REMEDY = "choose one of the list, write a size such as 7B, or paste a config.json"


def _model(name: str) -> ModelFacts:
    if not name:
        raise DsplanError(f"no model is named; {_REMEDY}")
    try:
        return named_model(name)
    except UnknownName as error:
        near = f"; nearest: {', '.join(error.near)}" if error.near else ""
        raise DsplanError(f"unknown model {quote(name)}{near}; {_REMEDY}") from None


_SAFE_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)


def _own_model(document: dict[str, Any]) -> ModelFacts:
    """Return the model of a config.json, named as it says where that is a name and nothing else.

    Emitted scripts have it.
    """
    from planner.models.from_hf.config import facts_from_config

    name = str(document.get("_name_or_path") or "")
    facts = facts_from_config(document, "config.json")
    return replace(facts, name=name if len(name) <= MOST_LETTERS and _SAFE_NAME.fullmatch(name) else "config.json")
