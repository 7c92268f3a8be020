"""Subject of a trace: a transformers model on the meta device, in training, with batches that fit it."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import nn

from planner.cost.precision import keeps_adapters_wide, load_dtype_of
from planner.errors import DsplanError
from planner.models.catalogue import recorded_config
from planner.models.counting.adapters import module_of
from planner.models.facts import Adapter, ModelFacts
from planner.models.tasks import default_sequence_length, default_task
from planner.types.job import Job
from planner.vocabulary import Attention, Task
from strategies.parallel.blocks import repeated_blocks
from strategies.torch_compat.tensors import tree_map
from strategies.tracing.denoisers import batch_of as denoiser_batch
from strategies.tracing.denoisers import denoiser
from strategies.tracing.example import Arguments, arguments_of, examples_for
from strategies.tracing.step.images import images_of
from strategies.tracing.to_hf import hf_config, model_class, shortened

_AUTO_CLASSES: Mapping[Task, str] = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq-cls": "AutoModelForSequenceClassification",
    "reward": "AutoModelForSequenceClassification",
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
            return {**kinds, **images_of(self.config, samples, length), "labels": kinds["input_ids"]}
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
    length: int | None = None,
) -> Subject:
    """Return the model that `facts` describe, on the meta device, in training, its caches off, dropout as configured.

    A denoiser's table of positions is made for images of `length` patches.

    `layers` shortens every stack to at most as many blocks; `overrides` are arguments of the transformers config that
    replace those from `facts`. A row whose class has no loss takes the class with the head of `task`. With `flash`
    attention is called through torch's function too, whose kernel keeps the same tensors.

    Raises:
        DsplanError: transformers has no class for such a model.
    """
    if facts.kind == "diffusion":
        return _denoiser_subject(facts, length)
    described = facts if layers is None else shortened(facts, layers)
    config = hf_config(described, overrides)
    _prepare(config, attention)
    _set_dropout(config, described)
    if task == "reward":
        config.num_labels = 1
    build: Any = _training_class(described, config, task or default_task(described))
    with torch.device("meta"), import_module("transformers.initialization").no_init_weights():
        module: Any = build(copy.deepcopy(config))
    module.tie_weights()
    if attention == "flash" and facts.fused_by_flash:
        # The tensors of FlashAttention are those of torch's own fused attention, without caps and sinks.
        module.config._attn_implementation = "sdpa"
    if facts.model_type in ("t5", "mt5") and not facts.tie_word_embeddings:
        module.lm_head.weight = nn.Parameter(torch.empty_like(module.lm_head.weight))
    module.train()
    return Subject(facts=described, config=module.config, module=module, blocks=tuple(repeated_blocks(module)))


@dataclass(frozen=True, kw_only=True)
class _DenoiserSubject(Subject):
    """A denoiser of diffusers, whose samples are images."""

    def batch_of(self, samples: int, length: int, source_length: int | None = None) -> dict[str, Any]:
        """Return latents of `length` patches and what goes with them."""
        own: Any = self.module
        return denoiser_batch(own, samples, length)


def _denoiser_subject(facts: ModelFacts, length: int | None) -> Subject:
    recorded = recorded_config(facts.recorded_as)
    module = denoiser(facts.architecture, recorded["arguments"], length or default_sequence_length(facts))
    blocks = tuple(repeated_blocks(module))
    return _DenoiserSubject(facts=facts, config=module.config, module=module, blocks=blocks)


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
    """Set what the figures say, which may come from a config that differs from its class's defaults."""
    for names, chance in ((_ATTENTION_DROPOUTS, facts.attention_dropout), (_HIDDEN_DROPOUTS, facts.hidden_dropout)):
        for name in names:
            if isinstance(getattr(config, name, None), int | float):
                setattr(config, name, chance)


def _training_class(facts: ModelFacts, config: Any, task: Task) -> type[nn.Module]:
    named = model_class(facts)
    has_loss = not named.__name__.endswith("Model") or facts.kind == "vision-text"
    if has_loss and task not in ("seq-cls", "reward"):
        return named
    automatic = getattr(import_module("transformers"), _AUTO_CLASSES[task])
    automatic_class: type[nn.Module] = automatic._model_mapping[type(config)]
    return automatic_class


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
        """Return arguments by name: its own batch, its `example_batch(samples, length)`, or what its parts suggest."""
        own: Any = self.module
        if self.batch is not None:
            return _named(own, _on_cpu(next(examples_for(own, self.batch)).batch_of(samples)))
        if hasattr(own, EXAMPLE):
            return _named(own, getattr(own, EXAMPLE)(samples, length))
        return _inferred(own, samples, length)


def own_subject(module: nn.Module, facts: ModelFacts, attention: Attention, *, batch: Any = None) -> Subject:
    """Return the subject of a module that a factory made; a transformers model is run as dsplan runs its own."""
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
    copied: Arguments = tree_map(_made_again, arguments)
    return copied


def _made_again(leaf: Any) -> Any:
    return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf


def _named(module: nn.Module, batch: Any) -> dict[str, Any]:
    """Arguments by the names of the module's parameters."""
    positional, named = arguments_of(batch)
    return {**inspect.signature(module.forward).bind_partial(*positional).arguments, **named}


def _inferred(module: nn.Module, samples: int, length: int) -> dict[str, Any]:
    """Return a batch whose first parameter is what the first layer takes, targets and masks one number a position.

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


_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def _first_input(module: nn.Module, samples: int, length: int) -> torch.Tensor:
    kinds = (nn.Embedding, nn.Linear, *_CONVOLUTIONS)
    first = next((part for part in module.modules() if isinstance(part, kinds)), None)
    if isinstance(first, _CONVOLUTIONS):
        named = (getattr(module, name, None) for name in _IMAGE_SIZES)
        size = next((side for side in named if isinstance(side, int)), _USUAL_IMAGE)
        sides = (length,) if isinstance(first, nn.Conv1d) else (size,) * len(first.kernel_size)
        return torch.zeros(samples, first.in_channels, *sides)
    if isinstance(first, nn.Linear):
        positions = () if length == 1 else (length,)
        return torch.zeros(samples, *positions, first.in_features)
    return torch.zeros(samples, length, dtype=torch.long)


# Adapters beside a subject's frozen weights.


def with_adapters(subject: Subject, job: Job) -> Subject:
    """Return the subject with the workload's adapters, its other weights frozen and in the dtype they are loaded as.

    PEFT makes the adapters where the weights are not quantised. bitsandbytes has no kernels without a GPU: a quantised
    layer is a stand-in that holds and saves what its own does.

    Raises:
        DsplanError: PEFT is not installed.
    """
    counts, workload = job.counts, job.workload
    module, loaded = subject.module, load_dtype_of(workload)
    narrow = workload.precision == "bf16-pure" and not keeps_adapters_wide(job.configuration, workload)
    adapters = {adapter.name: adapter for block in counts.blocks for adapter in block.adapters}
    modules = {module_of(subject.facts, name): adapter for name, adapter in adapters.items()}
    module.to({"fp32": torch.float32, "fp16": torch.float16}.get(str(loaded), torch.bfloat16)).requires_grad_(False)
    if loaded in ("nf4", "int8"):
        width = torch.bfloat16 if narrow else torch.float32
        for block in subject.blocks:
            for path, layer in [(path, part) for path, part in block.named_modules() if isinstance(part, nn.Linear)]:
                owner, _, name = path.rpartition(".")
                adapter = modules.get(path)
                quantised = _QuantisedLinear(layer, adapter, width, packed=loaded == "nf4")
                setattr(block.get_submodule(owner), name, quantised)
        return subject
    try:
        peft: Any = import_module("peft")
    except ImportError:
        raise DsplanError("PEFT, which makes the adapters, is not installed; pip install peft") from None
    dora = workload.method == "dora"
    targets = sorted({path.rpartition(".")[2] for path in modules})
    config = peft.LoraConfig(r=workload.lora_rank, target_modules=targets, use_dora=dora, lora_dropout=0.0)
    with torch.device("meta"):
        peft.inject_adapter_in_model(config, module)
    if not narrow:
        for name, weight in module.named_parameters():
            if weight.requires_grad and "lora_" in name:
                weight.data = weight.data.float()
    module.train()
    return subject


def switch_adapters(module: nn.Module, *, on: bool) -> None:
    """Switch a module's adapters on or off, as PEFT's `disable_adapter` does."""
    tuners: Any = sys.modules.get("peft.tuners.tuners_utils")
    kinds = (_QuantisedLinear,) if tuners is None else (_QuantisedLinear, tuners.BaseTunerLayer)
    for part in [part for part in module.modules() if isinstance(part, kinds)]:
        part.enable_adapters(on)


class _Quantised(torch.autograd.Function):
    """bitsandbytes' `MatMul4Bit`: the product with a matrix that is made 16-bit for it, forward and backward."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, packed: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        ctx.save_for_backward(packed)
        ctx.shape = shape
        return nn.functional.linear(given, packed.new_empty(shape, dtype=given.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (packed,) = ctx.saved_tensors
        (gradient,) = gradients
        return gradient @ packed.new_empty(ctx.shape, dtype=gradient.dtype), None, None


class _QuantisedLinear(nn.Module):
    """PEFT's adapter beside bitsandbytes' `Linear4bit` (`tuners/lora/bnb.py`), by the tensors that they hold."""

    def __init__(self, layer: nn.Linear, adapter: Adapter | None, dtype: torch.dtype, *, packed: bool) -> None:
        super().__init__()
        self._shape = (layer.out_features, layer.in_features)
        elements = layer.out_features * layer.in_features
        width = -(-elements // 2) if packed else elements
        self.packed = nn.Parameter(torch.empty(width, dtype=torch.uint8, device="meta"), requires_grad=False)
        if packed:
            self.register_buffer("absmax", torch.empty(-(-elements // 64), dtype=torch.uint8, device="meta"))
            self.register_buffer("scales", torch.empty(-(-elements // 64 // 256), device="meta"))
        self.bias = layer.bias
        self.down = self.up = None
        if adapter is not None:
            self.down = nn.Linear(adapter.inputs, adapter.rank, bias=False, device="meta", dtype=dtype)
            self.up = nn.Linear(adapter.rank, adapter.outputs, bias=False, device="meta", dtype=dtype)
        self._is_adapted = adapter is not None

    def enable_adapters(self, enabled: bool) -> None:
        """Switch the adapter on or off, as PEFT's layers do."""
        self._is_adapted = enabled and self.down is not None

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        narrow = given if given.dtype == torch.bfloat16 else given.to(torch.bfloat16)
        quantised: Any = _Quantised.apply
        result: torch.Tensor = quantised(narrow, self.packed, self._shape).to(given.dtype)
        if self.bias is not None:
            result = result + self.bias
        if self.down is None or self.up is None or not self._is_adapted:
            return result
        if not torch.is_autocast_enabled("cuda"):
            given = given.to(self.down.weight.dtype)
        beside = (self.up(self.down(given)) * 2.0).to(result.dtype)
        adapted: torch.Tensor = result.clone() + beside
        return adapted
