"""Subject of a trace: a transformers model on the meta device, in training, with batches that fit it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from planner.errors import DsplanError
from planner.models.facts import ModelFacts
from planner.models.tasks import default_task
from planner.vocabulary import Attention, Task
from strategies.tracing.blocks import repeated_blocks
from strategies.tracing.example import Arguments, arguments_of, examples_for
from strategies.tracing.to_hf import hf_config, model_class, shortened

_AUTO_CLASSES: Mapping[Task, str] = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq-cls": "AutoModelForSequenceClassification",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "image-cls": "AutoModelForImageClassification",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A module to trace with its config; `blocks` are its repeated blocks in the order of the model.

    `with_images`: batches of a vision-language model hold an image per sample beside the text.
    """

    facts: ModelFacts
    config: Any
    module: nn.Module
    blocks: tuple[nn.Module, ...]
    with_images: bool = False

    def batch_of(self, samples: int, length: int, source_length: int | None = None) -> dict[str, Any]:
        """Arguments of one training step, made by `torch.zeros`: fake where a fake tensor mode is on.

        `length` is that of the tokens the loss sees; `source_length` the encoder's in encoder-decoders that read text,
        by default the same. Images and audio have the size that the config gives them.
        """
        facts = self.facts
        if facts.kind == "vision":
            return {"pixel_values": _images(self.config, samples), "labels": _tokens(samples)}
        if facts.kind == "vision-text":
            longest = self.config.text_config.max_position_embeddings
            text = _tokens(samples, min(length, longest))
            return {"input_ids": text, "pixel_values": _images(self.config.vision_config, samples), "return_loss": True}
        if self.with_images:
            kinds = {"input_ids": _tokens(samples, length), "token_type_ids": _tokens(samples, length)}
            return {**kinds, "pixel_values": _images(self.config.vision_config, samples), "labels": kinds["input_ids"]}
        if facts.kind == "speech-encoder-decoder":
            frames = 2 * self.config.max_source_positions  # a convolution of stride two halves them
            audio = torch.zeros(samples, self.config.num_mel_bins, frames)
            return {"input_features": audio, "labels": _tokens(samples, length)}
        if type(self.module).__name__.endswith("ForSequenceClassification"):
            return {"input_ids": _tokens(samples, length), "labels": _tokens(samples)}
        return {"input_ids": _tokens(samples, source_length or length), "labels": _tokens(samples, length)}


def subject_of(
    facts: ModelFacts,
    *,
    attention: Attention = "sdpa",
    layers: int | None = None,
    task: Task | None = None,
    overrides: Mapping[str, object] | None = None,
) -> Subject:
    """The model that `facts` describe, on the meta device in training mode, its caches off, dropout as configured.

    `layers` shortens every stack to at most as many blocks; `overrides` are arguments of the transformers config that
    replace those from `facts`. A row whose class has no loss takes the class with the head of `task`. With `flash`
    attention is called through torch's function too, whose kernel keeps the same tensors.

    Raises:
        DsplanError: transformers has no class for such a model.
    """
    described = facts if layers is None else shortened(facts, layers)
    config = hf_config(described, overrides)
    _prepare(config, attention)
    _set_dropout(config, described)
    build: Any = _training_class(described, config, task or default_task(described))
    with torch.device("meta"), import_module("transformers.initialization").no_init_weights():
        module: Any = build(copy.deepcopy(config))
    module.tie_weights()
    if facts.model_type in ("t5", "mt5") and not facts.tie_word_embeddings:
        module.lm_head.weight = nn.Parameter(torch.empty_like(module.lm_head.weight))
    module.train()
    return Subject(facts=described, config=module.config, module=module, blocks=tuple(repeated_blocks(module)))


def _prepare(config: Any, attention: Attention) -> None:
    parts = [config, *(getattr(config, name, None) for name in ("text_config", "vision_config"))]
    for part in parts:
        if hasattr(part, "use_cache"):
            part.use_cache = False
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0  # checkpoints say it, and shifting labels needs it
    for name in ("encoder_layerdrop", "decoder_layerdrop"):
        if hasattr(config, name):
            setattr(config, name, 0.0)  # a step at its peak skips no layer
    if hasattr(config, "num_labels") and config.num_labels < 2:
        config.num_labels = 2  # a row without a head has none, and transformers makes two by default
    if attention == "eager":
        config._attn_implementation = "eager"  # transformers' own choice is sdpa wherever the model has it


_ATTENTION_DROPOUTS = ("attn_pdrop", "attention_dropout", "attention_probs_dropout_prob")
_HIDDEN_DROPOUTS = ("resid_pdrop", "embd_pdrop", "hidden_dropout_prob", "hidden_dropout", "dropout", "dropout_rate")


def _set_dropout(config: Any, facts: ModelFacts) -> None:
    """What the figures say, which may come from a config that differs from its class's defaults."""
    for names, chance in ((_ATTENTION_DROPOUTS, facts.attention_dropout), (_HIDDEN_DROPOUTS, facts.hidden_dropout)):
        for name in names:
            if isinstance(getattr(config, name, None), int | float):
                setattr(config, name, chance)


def _training_class(facts: ModelFacts, config: Any, task: Task) -> type[nn.Module]:
    named = model_class(facts)
    has_loss = not named.__name__.endswith("Model") or facts.kind == "vision-text"
    if has_loss and task != "seq-cls":
        return named
    automatic = getattr(import_module("transformers"), _AUTO_CLASSES[task])
    found: type[nn.Module] = automatic._model_mapping[type(config)]
    return found


def _tokens(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.long)


def _images(config: Any, samples: int) -> torch.Tensor:
    return torch.zeros(samples, config.num_channels, config.image_size, config.image_size)


# Inputs of a user's own module in a trace.


EXAMPLE = "example_batch"
"""A method that a module may have: its arguments for `samples` samples of `length` positions."""
_TARGETS = frozenset({"labels", "label", "targets", "target", "y"})
_MASKS = frozenset({"attention_mask", "mask", "padding_mask"})
_IMAGE_SIZES = ("image_size", "img_size")
_USUAL_IMAGE = 224


@dataclass(frozen=True, kw_only=True)
class OwnSubject(Subject):
    """A module that transformers has no class for; `batch` is one of its own where a factory made it with one."""

    batch: Any = None

    def batch_of(self, samples: int, length: int, source_length: int | None = None) -> dict[str, Any]:
        """Arguments by name: those of its own batch, what the module's `example_batch(samples, length)` says, or what
        its parts suggest."""
        own: Any = self.module
        if self.batch is not None:
            return _named(own, _on_cpu(next(examples_for(own, self.batch)).batch_of(samples)))
        if hasattr(own, EXAMPLE):
            return _named(own, getattr(own, EXAMPLE)(samples, length))
        return _inferred(own, samples, length)


def own_subject(module: nn.Module, facts: ModelFacts, attention: Attention, *, batch: Any = None) -> Subject:
    """The subject of a module that a factory made. A transformers model is run as dsplan runs its own."""
    module.train()
    blocks, config = tuple(repeated_blocks(module)), getattr(module, "config", None)
    if facts.kind == "custom":
        return OwnSubject(facts=facts, config=config, module=module, blocks=blocks, batch=batch)
    described: Any = module
    described.config.use_cache = False
    if attention == "eager" and hasattr(module, "set_attn_implementation"):
        described.set_attn_implementation("eager")
    return Subject(facts=facts, config=config, module=module, blocks=blocks)


def _on_cpu(arguments: Arguments) -> Arguments:
    """Made by `torch.empty`, as all of a subject's batches are."""
    made: Arguments = tree_map(_made_again, arguments)
    return made


def _made_again(leaf: Any) -> Any:
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf


def _named(module: nn.Module, batch: Any) -> dict[str, Any]:
    """Arguments by the names of the module's parameters."""
    positional, named = arguments_of(batch)
    return {**inspect.signature(module.forward).bind_partial(*positional).arguments, **named}


def _inferred(module: nn.Module, samples: int, length: int) -> dict[str, Any]:
    """The first parameter is fed what the first layer takes, targets and masks one number a position.

    Raises:
        DsplanError: there is another parameter, of which nothing is known.
    """
    batch: dict[str, Any] = {}
    for name, parameter in inspect.signature(module.forward).parameters.items():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if not batch:
            batch[name] = _first_input(module, samples, length)
        elif name in _TARGETS or (name in _MASKS and parameter.default is parameter.empty):
            batch[name] = torch.ones(samples, length, dtype=torch.long)
        elif parameter.default is parameter.empty:
            remedy = f"give it a method {EXAMPLE}(samples, length)"
            raise DsplanError(f"nothing is known of {type(module).__name__}'s input {name!r}; {remedy}")
    return batch


def _first_input(module: nn.Module, samples: int, length: int) -> torch.Tensor:
    kinds = (nn.Embedding, nn.Linear, nn.modules.conv._ConvNd)
    first = next((part for part in module.modules() if isinstance(part, kinds)), None)
    if isinstance(first, nn.modules.conv._ConvNd):
        named = (getattr(module, name, None) for name in _IMAGE_SIZES)
        size = next((side for side in named if isinstance(side, int)), _USUAL_IMAGE)
        sides = (length,) if isinstance(first, nn.Conv1d) else (size,) * len(first.kernel_size)
        return torch.zeros(samples, first.in_channels, *sides)
    if isinstance(first, nn.Linear):
        positions = () if length == 1 else (length,)
        return torch.zeros(samples, *positions, first.in_features)
    return torch.zeros(samples, length, dtype=torch.long)
