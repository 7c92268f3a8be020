"""From the figures of a model to its transformers config and module; transformers and torch are imported when used.

Nothing here reads `planner.models.from_hf.reader`, so that tests can hold counts and config reading to what is built
here: a mistake in a key name or a constant there cannot cancel out.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from planner.errors import DsplanError
from planner.models.catalogue import recorded_config
from planner.models.facts import ModelFacts
from strategies.tracing.to_hf import decoders, encoders
from strategies.tracing.to_hf import decoders as common
from strategies.tracing.to_hf.decoders import Arguments

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
ARGUMENTS: Mapping[str, Callable[[ModelFacts], Arguments]] = {
    "albert": encoders.albert,
    "bart": encoders.bart,
    "bert": encoders.bert,
    "bloom": decoders.bloom,
    "clip": encoders.clip,
    "codegen": decoders.rotary_gpt2,
    "cohere": decoders.cohere,
    "deberta-v2": encoders.deberta,
    "deepseek_v2": decoders.deepseek,
    "deepseek_v3": decoders.deepseek,
    "dinov2": encoders.dinov2,
    "distilbert": encoders.distilbert,
    "electra": encoders.albert,
    "falcon": decoders.falcon,
    "gemma": decoders.gemma,
    "gemma2": decoders.gemma,
    "gemma3": encoders.gemma3,
    "gemma3_text": decoders.gemma,
    "glm": decoders.glm,
    "glm4_moe": decoders.glm4_moe,
    "gpt2": decoders.gpt2,
    "gpt_bigcode": decoders.gpt_bigcode,
    "gpt_neo": decoders.gpt_neo,
    "gpt_neox": decoders.gpt_neox,
    "gpt_oss": decoders.gpt_oss,
    "gptj": decoders.rotary_gpt2,
    "granite": decoders.llama,
    "granitemoe": decoders.mixtral,
    "llama": decoders.llama,
    "m2m_100": encoders.bart,
    "mbart": encoders.bart,
    "mistral": common.windowed,
    "mixtral": decoders.mixtral,
    "modernbert": encoders.modernbert,
    "mpt": decoders.mpt,
    "mt5": encoders.t5,
    "olmo": common.grouped,
    "olmo2": common.grouped,
    "olmoe": decoders.olmoe,
    "opt": decoders.opt,
    "pegasus": encoders.bart,
    "phi": decoders.phi,
    "phi3": decoders.phi3,
    "phimoe": decoders.phimoe,
    "qwen2": common.windowed,
    "qwen2_moe": decoders.qwen_moe,
    "qwen3": common.windowed,
    "qwen3_moe": decoders.qwen_moe,
    "roberta": encoders.bert,
    "smollm3": decoders.llama,
    "stablelm": decoders.stablelm,
    "starcoder2": decoders.starcoder2,
    "t5": encoders.t5,
    "vit": encoders.vit,
    "whisper": encoders.whisper,
    "xlm-roberta": encoders.bert,
}


def hf_config(facts: ModelFacts, overrides: Mapping[str, object] | None = None) -> Any:
    """The transformers config with the figures of `facts`, arguments in `overrides` replacing those made from them.

    Raises:
        DsplanError: transformers has no such model, or dsplan does not know how to describe it.
    """
    if facts.recorded_as:
        recorded = dict(recorded_config(facts.recorded_as))
        recorded["arguments"] = {**recorded["arguments"], **(overrides or {})}
        return config_of(recorded)
    model_type = STAND_INS.get(facts.model_type, facts.model_type)
    if model_type not in ARGUMENTS:
        raise DsplanError(f"{facts.name}: no class of transformers is known for model type {facts.model_type!r}")
    config = _transformers().AutoConfig.for_model(model_type, **{**ARGUMENTS[model_type](facts), **(overrides or {})})
    config.architectures = [facts.architecture]
    return config


def config_of(recorded: Mapping[str, Any]) -> Any:
    """The transformers config of a recorded model: its `model_type`, `architecture` and `arguments`."""
    arguments = copy.deepcopy(dict(recorded["arguments"]))
    config = _transformers().AutoConfig.for_model(recorded["model_type"], **arguments)
    config.architectures = [recorded["architecture"]]
    return config


def model_class(facts: ModelFacts) -> type[nn.Module]:
    """The class of transformers that the row names, or the one with the same weights."""
    found: type[nn.Module] = getattr(_transformers(), STAND_IN_CLASSES.get(facts.architecture, facts.architecture))
    return found


def shortened(facts: ModelFacts, depth: int) -> ModelFacts:
    """The same architecture with at most `depth` blocks in every tower."""
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
