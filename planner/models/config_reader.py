"""Reading one config.json: which key holds a figure, what the class default is, and what to say when it is missing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hardware_db.handed_in import shown
from planner.errors import BrokenFile
from planner.limits import Limit, model_figure
from planner.models.architectures import Architecture, find_architecture

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
        """The reader of a config by its `model_type`, or by `fallback` where it has none.

        Raises:
            BrokenFile: there is no model_type, or it is not text.
            UnknownName: the model_type is not known.
        """
        model_type = config.get("model_type") or fallback
        if not isinstance(model_type, str) or not model_type:
            raise BrokenFile(name, "has no field 'model_type'", 'add it, for example "model_type": "llama"')
        return cls(name=name, config=config, architecture=find_architecture(model_type), nested=nested)

    def value(self, key: str) -> Any:
        """What `key` holds: the config's own value, null included, or the class default (None where there is none)."""
        if key in self.config:
            return self.config[key]
        return self._defaults.get(key)

    @property
    def _defaults(self) -> dict[str, Any]:
        return {**self.architecture.defaults, **(self.architecture.nested if self.nested else {})}

    def part(self, key: str, model_type: str) -> ConfigReader:
        """The config inside this one under `key`; an absent one means every default of `model_type`.

        Raises:
            BrokenFile: the field is no JSON object.
        """
        inner = self.config.get(key)
        if inner is not None and not isinstance(inner, Mapping):
            raise self.problem(f"field {key!r} is {inner!r}, not an object", "write it as transformers does")
        return ConfigReader.of(inner or {}, f"{self.name} {key}", fallback=model_type, nested=True)

    def facts(self) -> dict[str, Any]:
        """Every field of ModelFacts that the architecture fixes or the config says; nulls are left out.

        Raises:
            BrokenFile: a required field is missing, ill-typed, or asks for weights that are not counted.
        """
        for key, allowed in self.architecture.only.items():
            value = self.config.get(key, self._defaults.get(key, allowed[0]))
            if value not in allowed:
                built = " or ".join(map(repr, allowed))
                raise self.problem(f"field {key!r} is {value!r}; only {built} is counted", FACTORY_REMEDY)
        read = {fact: self._read(fact, keys) for fact, keys in self.architecture.read.items()}
        return {**self.architecture.facts, **{fact: value for fact, value in read.items() if value is not None}}

    def _read(self, fact: str, keys: tuple[str, ...]) -> Any:
        present = [key for key in keys if key in self.config]
        if present:
            return self._checked(fact, present[0], self.config[present[0]])
        known = [self._defaults[key] for key in keys if key in self._defaults]
        if not known:
            needs = f"a {self.architecture.model_type} config needs it: copy it from the model's page or save it again"
            raise self.problem(f"has no field {keys[0]!r}", needs)
        return known[0]

    def _checked(self, fact: str, key: str, value: Any) -> Any:
        """A value whose type fits the figure: sizes are whole and positive, probabilities and ratios at least 0."""
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
            raise self.problem(f"field {key!r} is {shown(value)}", f"write {problem}")
        return value

    def problem(self, what: str, remedy: str) -> BrokenFile:
        """The error that names this config, what is wrong with it, and what to do."""
        return BrokenFile(self.name, what, remedy)


_FLOATS = {
    "hidden_dropout", "attention_dropout", "rotary_pct", "attn_logit_softcapping", "final_logit_softcapping",
}  # fmt: skip
_BOOLS = {
    "tie_word_embeddings", "qkv_bias", "attn_out_bias", "mlp_bias", "lm_head_bias", "qk_norm", "parallel_residual",
    "new_decoder_architecture", "share_att_key",
}  # fmt: skip
_SHARE = Limit(least=0, most=1_000_000, fraction=True)
"""Probabilities, shares of a head, and the caps of logits."""


def _expectation(fact: str) -> type:
    if fact == "activation":
        return str
    if fact in _FLOATS:
        return float
    return bool if fact in _BOOLS else int
