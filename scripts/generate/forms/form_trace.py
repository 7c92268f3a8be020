"""The step from which a memory form is read: a small model on fake tensors, one forward, loss and backward."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, Literal

import torch
from torch import nn

from planner.cost.memory.activations.dimensions import Dimensions, block_kinds, model_dimensions
from planner.cost.memory.activations.form import Form
from planner.models.catalogue import models
from planner.models.facts import ModelFacts
from planner.vocabulary import Attention
from scripts.generate.forms import symbols
from strategies.parallel.blocks import repeated_blocks
from strategies.torch_compat.dispatch import FakeTensorMode
from strategies.tracing.cuda.as_cuda import as_cuda
from strategies.tracing.cuda.attention import unpadded
from strategies.tracing.cuda.kernels import cpu_outputs
from strategies.tracing.forms.derive import Derivation
from strategies.tracing.forms.timeline import Marks, Recorder, Timeline
from strategies.tracing.step.build import Subject, subject_of
from strategies.tracing.to_hf import config_arguments

# Sizes of models and batches at which the moments of a step are compared.


_BATCHES = tuple(itertools.product((1.0, 4.0, 16.0), (128.0, 1024.0, 4096.0, 32768.0)))
_BESIDE = 40
_FACTORS = (0.5, 0.75, 1.0, 1.5, 2.0)


@functools.cache
def plausible_points(model_type: str) -> tuple[Dimensions, ...]:
    """Return the models of a type, and some like them, with batches from one short sample to many long ones.

    Those like them have every size changed by up to two times.
    """
    rows = [model_dimensions(facts) for facts in models() if facts.model_type == model_type]
    few = rows[:: max(len(rows) // 6, 1)]
    chance = random.Random(0)
    changed = [
        {name: size * chance.choice(_FACTORS) for name, size in chance.choice(rows).items()} for _ in range(_BESIDE)
    ]
    real = [row | {"b": samples, "s": length, "t": length} for row in few for samples, length in _BATCHES]
    return tuple(real + [row | dict(zip(("b", "s", "t"), _batch(chance), strict=True)) for row in changed])


def _batch(chance: random.Random) -> tuple[float, float, float]:
    samples, length = chance.choice(_BATCHES)
    return samples, length, chance.choice((length, 197.0, 1500.0))


Mode = Literal["fp32", "autocast", "pure", "mixed"]
"""`mixed` is autocast over 16-bit weights, as frozen ones are loaded."""
IMAGE = "image"
ASKING = frozenset({"t5", "mt5"})
"""Their cross attention's bias of zeros asks for a gradient where checkpointing is on (transformers' `T5Attention`)."""
BLOCKS_PER_KIND = 3
"""The first and the last block of a stack may differ from the others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """All that changes a form besides the structure.

    Precision, attention written out or not, local attention by masks, and whether the weights are frozen, so that
    gradients only pass through.
    """

    mode: Mode
    frozen: bool = False
    eager: bool = False
    windows: bool = False
    on_cpu: bool = False

    @property
    def name(self) -> str:
        """The variant as forms are looked up by."""
        attention = "eager" if self.eager else "windows" if self.windows else "sdpa"
        return f"{'cpu' if self.on_cpu else 'cuda'} {'frozen ' if self.frozen else ''}{self.mode} {attention}"


def form_of(facts: ModelFacts, variant: Variant) -> Form:
    """Return the form of every model with this structure.

    Raises:
        Undecodable: a storage has a dimension that no known product or sum of symbols explains.
    """
    small, labels, overrides = _small(facts, variant)
    fused: Attention = "flash" if small.fused_by_flash else "sdpa"
    subject = subject_of(small, attention="eager" if variant.eager else fused, overrides=overrides)
    decoder = symbols.decoder_of(small, batch_sizes(small))
    points = plausible_points(facts.model_type)
    timeline = _timeline(subject, variant)
    form = Derivation(
        timeline,
        labels,
        decoder.elements,
        points,
        keeps_grouped=not small.expert_bias,
        asks_for_biases=small.model_type in ASKING,
    ).form()
    if small.kind != "vision-language":
        return form
    tower = _timeline(_image_tower(small, eager=variant.eager), variant)
    images = Derivation(tower, [IMAGE] * BLOCKS_PER_KIND, decoder.elements, points).form()
    return replace(form, blocks={**images.blocks, **form.blocks})


def _image_tower(small: ModelFacts, *, eager: bool) -> Subject:
    """Return the SigLIP of a vision-language model, to be run alone.

    Where its images go in the text depends on the tokens, which a trace does not know.
    """
    transformers: Any = import_module("transformers")
    config = transformers.SiglipConfig(vision_config=config_arguments(small)["vision_config"], num_labels=2)
    config.vision_config._attn_implementation = config._attn_implementation = "eager" if eager else "sdpa"
    with torch.device("meta"):
        module = transformers.SiglipForImageClassification(config).train()
    facts = replace(small, kind="vision", image_size=config.vision_config.image_size)
    return Subject(facts=facts, config=config.vision_config, module=module, blocks=tuple(repeated_blocks(module)))


def batch_sizes(small: ModelFacts) -> dict[str, float]:
    """Return samples, positions of text (or of the image where there is none), positions of an encoder or an image."""
    sizes: dict[str, float] = {"b": symbols.SAMPLES, "s": symbols.LENGTH}
    if small.kind == "vision":
        return sizes | {"s": small.max_position_embeddings}
    if small.vision is not None:
        return sizes | {"t": small.vision.image_tokens}
    if small.kind.endswith("encoder-decoder"):
        return sizes | {"t": symbols.SOURCE}
    return sizes


def _small(facts: ModelFacts, variant: Variant) -> tuple[ModelFacts, Sequence[str], dict[str, object]]:
    """Return the small model, the kinds of its blocks in the order they run, and what its config needs beside."""
    small = symbols.small(facts, BLOCKS_PER_KIND, windows=variant.windows)
    labels = [name for name, count in block_kinds(small, windows=variant.windows) for _ in range(count)]
    if small.kind == "vision-language":
        labels = [name for name in labels if name != IMAGE]
    if "local" not in labels:
        return small, labels, {}
    labels = ["local", "global"] * BLOCKS_PER_KIND
    kinds = {"local": "sliding_attention", "global": "full_attention"}
    layers = {"layer_types": [kinds[name] for name in labels], "num_hidden_layers": len(labels)}
    if small.kind == "vision-language":
        return small, labels, {"text_config": config_arguments(small)["text_config"] | layers}
    return small, labels, layers


def _timeline(subject: Subject, variant: Variant) -> Timeline:
    module = subject.module
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    if variant.mode in ("pure", "mixed"):
        module.to(torch.bfloat16)
    if variant.frozen:
        _freeze(module, subject.blocks)
    autocast: AbstractContextManager[object] = contextlib.nullcontext()
    if variant.mode in ("autocast", "mixed"):
        autocast = torch.autocast("cpu", torch.bfloat16)
    device: AbstractContextManager[object] = cpu_outputs() if variant.on_cpu else as_cuda()
    source = symbols.SOURCE if subject.facts.kind == "encoder-decoder" else None
    with fake:
        module.to_empty(device="cpu")
        tie(module)
        batch = _cast_batch(subject.batch_of(symbols.SAMPLES, symbols.LENGTH, source), module)
        with device, unpadded():
            return record_step(subject, batch, autocast, on_cuda=not variant.on_cpu)


def _freeze(module: nn.Module, blocks: Sequence[nn.Module]) -> None:
    """No weight is trained, and the blocks' inputs ask for gradients, as adapters in front of them make them do."""

    def ask(_block: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        hidden = inputs[0] if inputs else named["hidden_states"]
        if not hidden.requires_grad:
            hidden.requires_grad_(True)

    module.requires_grad_(False)
    for block in blocks:
        block.register_forward_pre_hook(ask, with_kwargs=True)


def tie(module: Any) -> None:
    """`to_empty` gives tied weights storages of their own."""
    if hasattr(module, "tie_weights"):
        module.tie_weights()


def _cast_batch(batch: Mapping[str, Any], module: nn.Module) -> dict[str, Any]:
    """Images and audio in the type of the weights, as a 16-bit model takes them."""
    dtype = next(module.parameters()).dtype
    return {
        name: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in batch.items()
    }


def record_step(
    subject: Subject, batch: dict[str, Any], autocast: AbstractContextManager[object], *, on_cuda: bool
) -> Timeline:
    """Record one forward, loss and backward."""
    module = subject.module
    inputs = [value for value in batch.values() if isinstance(value, torch.Tensor)]
    recorder = Recorder([*module.parameters(), *module.buffers(), *inputs], module.parameters(), on_cuda=on_cuda)
    recorder.timeline.inputs = [(tuple(value.shape), value.element_size()) for value in inputs]
    for weight in (weight for weight in module.parameters() if weight.requires_grad):
        weight.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda weight: recorder.is_gradient(weight.grad)
        )
    inside = {id(buffer) for block in subject.blocks for buffer in block.buffers()}
    outside = [buffer for buffer in module.buffers() if id(buffer) not in inside]
    recorder.timeline.outside = [(tuple(buffer.shape), buffer.element_size()) for buffer in outside]
    Marks(recorder, subject.blocks, last=subject.facts.kind == "diffusion")
    with recorder:
        with autocast:
            loss = module(**batch).loss
        recorder.timeline.mark("loss")
        loss.backward()
        recorder.timeline.mark("end")
    return recorder.timeline
