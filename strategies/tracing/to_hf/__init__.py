"""From the figures of a model to its transformers config and module; transformers and torch are imported when used.

Nothing here reads `planner.models.from_hf.reader`, so that tests can hold counts and config reading to what is built
here: a mistake in a key name or a constant there cannot cancel out. `arguments.yaml` has the key names.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from importlib import import_module
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardware_db.files import read_shipped_yaml
from planner.errors import DsplanError
from planner.models.catalogue import recorded_config
from planner.models.facts import ModelFacts

if TYPE_CHECKING:
    from torch import nn

# Rows whose own class lives outside transformers are built from the transformers class with the same weights.
STAND_INS: Mapping[str, str] = {
    "baichuan": "llama",
    "internlm2": "llama",
    "internlm3": "llama",
    "chatglm": "glm",
    "kimi_k2": "deepseek_v3",
}
STAND_IN_CLASSES: Mapping[str, str] = {
    "MPTForCausalLM": "MptForCausalLM",
    "BaiChuanForCausalLM": "LlamaForCausalLM",
    "BaichuanForCausalLM": "LlamaForCausalLM",
    "InternLM2ForCausalLM": "LlamaForCausalLM",
    "InternLM3ForCausalLM": "LlamaForCausalLM",
    "ChatGLMModel": "GlmForCausalLM",
}
# No class of transformers 5.23 has these weights.
NOT_IN_TRANSFORMERS = frozenset({"deepseek"})
Arguments = dict[str, Any]
_WORKED_OUT: Mapping[str, Callable[[ModelFacts], object]] = {
    "alternating_attention": lambda facts: _alternating_attention(facts.num_layers),
    "dinov2_ratio": lambda facts: 4 if facts.gated_mlp else facts.intermediate_size // facts.hidden_size,
    "feed_forward": lambda facts: ("gated-" if facts.gated_mlp else "") + facts.activation.removesuffix("_new"),
    "has_alibi": lambda facts: facts.position_type == "alibi",
    "has_head_layernorm": lambda facts: facts.qk_norm == "per_head_layernorm",
    "has_norm_before": lambda facts: not facts.post_norm,
    "has_one_kv_head": lambda facts: facts.num_kv_heads == 1,
    "has_qk_norm": lambda facts: bool(facts.qk_norm),
    "mlp_ratio": lambda facts: facts.intermediate_size // facts.hidden_size,
    "norms_in_parallel": lambda facts: facts.num_ln_in_parallel_attn or None,
    "partial_rope": lambda facts: {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": facts.rotary_pct,
    },
    "window": lambda facts: facts.sliding_window or None,
}
"""Figures of `arguments.yaml` that are not a field.

With SwiGLU, transformers derives the width of DINOv2's MLP from its ratio: int(ratio * hidden * 2 / 3) rounded up to 8.
"""


def _alternating_attention(layers: int) -> list[Any]:
    """Return GPT-Neo's kinds of attention, and how often they follow each other; odd numbers of layers have one."""
    kinds = ["global"] if layers % 2 else ["global", "local"]
    return [[kinds, layers // len(kinds)]]


@cache
def _entries() -> dict[str, Any]:
    entries: dict[str, Any] = read_shipped_yaml(Path(__file__).with_name("arguments.yaml"))
    return entries


def config_arguments(facts: ModelFacts, model_type: str = "") -> Arguments:
    """Return what the config class of a model type, the facts' own by default, takes for a model of these facts.

    Raises:
        DsplanError: the model type is not known here.
    """
    kind = model_type or facts.model_type
    if kind not in _entries():
        raise DsplanError(f"{facts.name}: no class of transformers is known for model type {kind!r}")
    return _arguments(_entries()[kind], facts)


def _arguments(entry: Mapping[str, Any], facts: ModelFacts) -> Arguments:
    arguments = _arguments(_entries()[entry["extends"]], facts) if "extends" in entry else {}
    for name in entry.get("without", ()):
        del arguments[name]
    figures = {name: _figure(source, facts) for name, source in entry.get("figures", {}).items()}
    nested = {name: _arguments(inner, facts) for name, inner in entry.get("nested", {}).items()}
    return {**arguments, **figures, **copy.deepcopy(entry.get("fixed", {})), **nested}


def _figure(source: str, facts: ModelFacts) -> object:
    return _WORKED_OUT[source[1:]](facts) if source.startswith("=") else attrgetter(source)(facts)


def hf_config(facts: ModelFacts, overrides: Mapping[str, object] | None = None) -> Any:
    """Return the transformers config with the figures of `facts`; `overrides` replace arguments made from them.

    Raises:
        DsplanError: transformers has no such model, or dsplan does not know how to describe it.
    """
    if facts.recorded_as:
        recorded = dict(recorded_config(facts.recorded_as))
        recorded["arguments"] = {**recorded["arguments"], **(overrides or {})}
        return config_of(recorded)
    model_type = STAND_INS.get(facts.model_type, facts.model_type)
    arguments = {**config_arguments(facts, model_type), **(overrides or {})}
    config = _transformers().AutoConfig.for_model(model_type, **arguments)
    config.architectures = [facts.architecture]
    return config


def config_of(recorded: Mapping[str, Any]) -> Any:
    """Return the transformers config of a recorded model: its `model_type`, `architecture` and `arguments`."""
    arguments = copy.deepcopy(dict(recorded["arguments"]))
    config = _transformers().AutoConfig.for_model(recorded["model_type"], **arguments)
    config.architectures = [recorded["architecture"]]
    return config


def model_class(facts: ModelFacts) -> type[nn.Module]:
    """Return the class of transformers that the row names, or the one with the same weights."""
    kind: type[nn.Module] = getattr(_transformers(), STAND_IN_CLASSES.get(facts.architecture, facts.architecture))
    return kind


def shortened(facts: ModelFacts, depth: int) -> ModelFacts:
    """Return the same architecture with at most `depth` blocks in every tower."""
    return replace(
        facts,
        num_layers=min(facts.num_layers, depth),
        encoder_layers=min(facts.encoder_layers, depth),
        decoder_layers=min(facts.decoder_layers, depth),
        first_k_dense=min(facts.first_k_dense, depth - 1),
        text=facts.text and replace(facts.text, num_layers=min(facts.text.num_layers, depth)),
        vision=facts.vision and replace(facts.vision, num_layers=min(facts.vision.num_layers, depth)),
    )


def _transformers() -> Any:
    return import_module("transformers")
