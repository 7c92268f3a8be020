"""Reading one config.json: which key holds a figure, what the class default is, and what to say when it is missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from functools import lru_cache
from pathlib import Path
from typing import Any

from hardware_db.datasheets.loader import read_compiled
from hardware_db.handed_in import quote
from hardware_db.records import dataclass
from planner.errors import BrokenFile, UnknownName
from planner.limits import Limit, model_figure

# Architectures by model_type, from the compiled `architectures.yaml`.


COMPILED = Path(__file__).parent / "architectures.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """One entry of `architectures.yaml`, whose head says what the fields hold."""

    model_type: str
    architecture: str
    kind: str
    block_class: str
    facts: Mapping[str, Any] = field(default_factory=dict)
    read: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)
    nested: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


def model_types() -> tuple[str, ...]:
    """Every model_type that is known, in the order of `architectures.yaml`."""
    return tuple(_entries())


def find_architecture(model_type: str) -> Architecture:
    """Return the entry of a model_type.

    Raises:
        UnknownName: there is none.
    """
    entries = _entries()
    if model_type not in entries:
        hint = "plan it from code instead: --model package.module:factory, a function that returns the model"
        raise UnknownName("model_type", model_type, entries, hint=hint)
    entry = entries[model_type]
    return Architecture(
        model_type=model_type,
        **entry
        | {"read": {fact: tuple(keys) for fact, keys in entry.get("read", {}).items()}}
        | {"only": {key: tuple(values) for key, values in entry.get("only", {}).items()}},
    )


@lru_cache(maxsize=1)
def _entries() -> dict[str, Any]:
    return read_compiled(COMPILED)


_AS_TRANSFORMERS = "write it as transformers does"
FACTORY_REMEDY = "plan it from code instead: --model package.module:factory, a function that returns the model"


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigReader:
    """A config with its architecture; a `nested` config may leave out every key that holds its class's default."""

    name: str
    config: Mapping[str, Any]
    architecture: Architecture
    nested: bool = False

    @classmethod
    def of(cls, config: Mapping[str, Any], name: str, *, fallback: str = "", nested: bool = False) -> ConfigReader:
        """Return the reader of a config by its `model_type`, or by `fallback` where it has none.

        Raises:
            BrokenFile: there is no model_type, or it is not text.
            UnknownName: the model_type is not known.
        """
        model_type = config.get("model_type") or fallback
        if not isinstance(model_type, str) or not model_type:
            raise BrokenFile(name, "has no field 'model_type'", 'add it, for example "model_type": "llama"')
        return cls(name=name, config=config, architecture=find_architecture(model_type), nested=nested)

    def value(self, key: str) -> Any:
        """Return what `key` holds: the config's own value, null included, or the class default, or None without one."""
        if key in self.config:
            return self.config[key]
        return self._defaults.get(key)

    @property
    def _defaults(self) -> dict[str, Any]:
        return {**self.architecture.defaults, **(self.architecture.nested if self.nested else {})}

    def part(self, key: str, model_type: str) -> ConfigReader:
        """Return the config inside this one under `key`; an absent one means every default of `model_type`.

        Raises:
            BrokenFile: the field is no JSON object.
        """
        inner = self.config.get(key)
        if inner is not None and not isinstance(inner, Mapping):
            raise self.problem(f"field {key!r} is {quote(inner)}, not an object", _AS_TRANSFORMERS)
        return ConfigReader.of(inner or {}, f"{self.name} {key}", fallback=model_type, nested=True)

    def number(self, key: str, limit: Limit, default: float | None = None, section: str = "") -> Any:
        """Return the number under a key of the config, or of the object under `section`.

        A null where it has none means `default`.

        Raises:
            BrokenFile: it is no number within the limit.
        """
        holder, path = self.config, key
        if section:
            inner = self.config.get(section) or {}
            if not isinstance(inner, Mapping):
                raise self.problem(f"field {section!r} is {quote(inner)}, not an object", _AS_TRANSFORMERS)
            holder, path = inner, f"{section}.{key}"
        value = holder.get(key) if section else self.value(key)
        if value is None:
            value = default
        if value is not None and not limit.allows(value):
            raise self.problem(f"field {path!r} is {quote(value)}", f"write {limit}")
        return value

    def names(self, key: str) -> frozenset[Any]:
        """Return the words or numbers in the list under a key.

        Raises:
            BrokenFile: it is no list of them.
        """
        value = self.value(key) or ()
        if not isinstance(value, list | tuple) or not all(isinstance(item, str | int) for item in value):
            raise self.problem(f"field {key!r} is {quote(value)}", "write a list")
        return frozenset(value)

    def facts(self) -> dict[str, Any]:
        """Every field of ModelFacts that the architecture fixes or the config says; nulls are left out.

        Raises:
            BrokenFile: a required field is missing, ill-typed, or asks for weights that are not counted.
        """
        for key, allowed in self.architecture.only.items():
            value = self.config.get(key, self._defaults.get(key, allowed[0]))
            if value not in allowed:
                built = " or ".join(map(repr, allowed))
                raise self.problem(f"field {key!r} is {quote(value)}; only {built} is counted", FACTORY_REMEDY)
        read = {fact: self._read(fact, keys) for fact, keys in self.architecture.read.items()}
        read_figures = {fact: value for fact, value in read.items() if value is not None}
        return Figures(self, {**self.architecture.facts, **read_figures})

    def _read(self, fact: str, keys: tuple[str, ...]) -> Any:
        present = [key for key in keys if key in self.config]
        if present:
            return self._checked(fact, present[0], self.config[present[0]])
        defaults = [self._defaults[key] for key in keys if key in self._defaults]
        if not defaults:
            needs = f"a {self.architecture.model_type} config needs it: copy it from the model's page or save it again"
            raise self.problem(f"has no field {keys[0]!r}", needs)
        return defaults[0]

    def _checked(self, fact: str, key: str, value: Any) -> Any:
        """Return a value whose type fits: sizes are whole and positive, probabilities and ratios at least 0."""
        if value is None and fact in _NEVER_NULL:
            raise self.problem(f"field {key!r} is null", f"write {model_figure(fact)}")
        if value is None:
            return None
        expected, problem = _expectation(fact), ""
        if expected is int and not model_figure(fact).allows(value):
            problem = str(model_figure(fact))
        elif expected is float and not _SHARE.allows(value):
            problem = str(_SHARE)
        elif expected in (bool, str) and not isinstance(value, expected):
            problem = "true or false" if expected is bool else "text"
        if problem:
            raise self.problem(f"field {key!r} is {quote(value)}", f"write {problem}")
        return value

    def problem(self, what: str, remedy: str) -> BrokenFile:
        """Return the error that names this config, what is wrong with it, and what to do."""
        return BrokenFile(self.name, what, remedy)


class Figures(dict[str, Any]):
    """The figures of one config; one that is asked for and was null there is a broken config."""

    def __init__(self, reader: ConfigReader, figures: Mapping[str, Any]) -> None:
        super().__init__(figures)
        self._reader = reader

    def __missing__(self, fact: str) -> Any:
        keys = self._reader.architecture.read.get(fact, (fact,))
        raise self._reader.problem(f"field {keys[0]!r} is null or missing", f"write {model_figure(fact)}")


_FLOATS = {
    "hidden_dropout", "attention_dropout", "rotary_pct", "attn_logit_softcapping", "final_logit_softcapping",
}  # fmt: skip
_BOOLS = {
    "tie_word_embeddings", "qkv_bias", "attn_out_bias", "mlp_bias", "lm_head_bias", "qk_norm", "parallel_residual",
    "new_decoder_architecture", "share_att_key",
}  # fmt: skip
_NEVER_NULL = frozenset(
    {"hidden_size", "num_layers", "encoder_layers", "num_heads", "vocab_size", "image_size", "patch_size"}
)
_SHARE = Limit(least=0, most=1_000_000, fraction=True)
"""Probabilities, shares of a head, and the caps of logits."""


def _expectation(fact: str) -> type:
    if fact == "activation":
        return str
    if fact in _FLOATS:
        return float
    return bool if fact in _BOOLS else int
