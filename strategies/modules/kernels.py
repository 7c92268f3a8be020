"""Kernels by name: whose code computes norms, gated MLPs, rotary embeddings, attention and the loss of a model.

A kernel is a function with the signature that `KERNELS` says. Its provider is `liger` (Liger-Kernel, Triton),
`flash-attn`, `chunked` (torch's own products, a part of the logits at a time) or a script's own (`register_kernel`),
for a device and a dtype; where none answers to a call's inputs, the module computes as it did. Modules are replaced by
what they compute, which is tried on a few numbers, so that a norm of Gemma's kind (one added to its weight) stays.
A script's function is tried too: its outputs and gradients must be torch's.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from planner.errors import UnknownName
from planner.vocabulary import Loss
from strategies.errors import CannotRun
from strategies.modules.kernel_forms import (
    IGNORED,
    KERNELS,
    Function,
    eps_of,
    is_gated,
    is_layer_norm,
    is_rms_norm,
    layer_norm,
    require_right,
    rms_norm,
    rotary,
    swiglu,
)
from strategies.run_directory.request import plan_request

_DEVICES = ("cuda", "cpu")
_CHUNK_ROWS = 1024
_PLAIN_LOSS = (
    *(
        "apertus",
        "arcee",
        "cwm",
        "ernie4_5",
        "exaone4",
        "gemma",
        "helium",
        "llama",
        "ministral",
        "ministral3",
        "mistral",
    ),
    *("olmo", "olmo2", "olmo3", "phi", "phi3", "qwen2", "qwen3", "seed_oss", "smollm3", "starcoder2"),
)
"""Model types of transformers 5.23 whose loss is the mean cross-entropy of `lm_head(hidden)` and nothing else: no
scale, no soft cap, no router's loss (`models/*/modeling_*.py`, forward of the class with the head)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Registered:
    """A function for a kernel, on a kind of device (empty: every one) and for one dtype (None: every one)."""

    kernel: str
    provider: str
    function: Function
    device: str = ""
    dtype: torch.dtype | None = None

    def answers_to(self, tensor: torch.Tensor) -> bool:
        """Whether it takes such a tensor."""
        return self.device in ("", tensor.device.type) and self.dtype in (None, tensor.dtype)


_registered: list[Registered] = []


def register_kernel(
    name: str,
    function: Function,
    *,
    device: str | None = None,
    dtype: torch.dtype | str | None = None,
    provider: str = "own",
) -> None:
    """Register a function that computes a kernel; a config's `kernels` and `dsplan run --kernels` name its provider.

    Args:
        name: `rms_norm`, `layer_norm`, `swiglu`, `rotary`, `linear_cross_entropy` or `attention`;
            docs/how-to/training.md has their signatures. It must be differentiable.
        device: `cuda` or `cpu`; None for every one.
        dtype: of the first tensor, such as `torch.bfloat16` or "bf16"; None for every one.
        provider: what the config calls it; the same provider may have functions for several devices and dtypes.

    Raises:
        UnknownName: there is no such kernel or dtype; the message has the near one.
        CannotRun: `function` cannot be called, the device is not known, or the provider's name is taken.
    """
    _require_kernel(name)
    if not callable(function):
        raise CannotRun(f"register_kernel: {function!r} is no function; {name} is {KERNELS[name]}")
    if provider in ("auto", "torch", *_LIBRARIES):
        raise CannotRun(f"register_kernel: provider {provider!r} is dsplan's own; name another")
    if device is not None and str(device) not in _DEVICES:
        known = " or ".join(map(repr, _DEVICES))
        raise CannotRun(f"register_kernel: device {str(device)!r} is not known; use {known}, or None for every one")
    made = Registered(
        kernel=name,
        provider=provider,
        function=function,
        device="" if device is None else str(device),
        dtype=_dtype_of(dtype),
    )
    same = (made.kernel, made.provider, made.device, made.dtype)
    _registered[:] = [old for old in _registered if (old.kernel, old.provider, old.device, old.dtype) != same]
    _registered.append(made)


def _dtype_of(dtype: torch.dtype | str | None) -> torch.dtype | None:
    if dtype is None or isinstance(dtype, torch.dtype):
        return dtype
    known = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    if dtype not in known:
        raise UnknownName("dtype", dtype, known, hint=f"one of {', '.join(known)}")
    return known[dtype]


def _require_kernel(name: str) -> None:
    if name not in KERNELS:
        raise UnknownName("kernel", name, KERNELS, hint=f"one of {', '.join(KERNELS)}")


# Providers that dsplan knows.


def _chunked_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The loss of a part of the rows at a time, whose logits are made again in backward."""

    def of_part(rows: torch.Tensor, matrix: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = functional.linear(rows, matrix).float()
        return functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")

    parts = zip(hidden.split(_CHUNK_ROWS), labels.split(_CHUNK_ROWS), strict=True)  # type: ignore[no-untyped-call]
    losses = [checkpoint(of_part, rows, weight, targets, use_reentrant=False) for rows, targets in parts]
    return torch.stack(losses).sum() / (labels != IGNORED).sum()


def _liger_rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    # in_place=True would write the gradient over that of the output, which residuals still need.
    found: torch.Tensor = _liger().liger_rms_norm(hidden, weight, eps, 0.0, "llama", False)
    return found


def _liger_layer_norm(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    found: torch.Tensor = _liger().liger_layer_norm(
        hidden, weight, torch.zeros_like(weight) if bias is None else bias, eps
    )
    return found


def _liger_swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = _liger().liger_swiglu(gate, up)
    return found


def _liger_rotary(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    return _liger().liger_rope(query, key, cos, sin)


def _liger_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = _liger().liger_fused_linear_cross_entropy(hidden, weight, labels, ignore_index=IGNORED)
    return found


def _liger() -> Any:
    return import_module("liger_kernel.transformers.functional")


_FLASH = "flash_attention_2"
_LIBRARIES: Mapping[str, Mapping[str, Function | str]] = {
    "liger": {
        "rms_norm": _liger_rms_norm,
        "layer_norm": _liger_layer_norm,
        "swiglu": _liger_swiglu,
        "rotary": _liger_rotary,
        "linear_cross_entropy": _liger_loss,
    },
    "flash-attn": {"attention": _FLASH},
    "chunked": {"linear_cross_entropy": _chunked_loss},
}
"""Kernels of libraries by provider (Liger-Kernel's `transformers/functional.py` at ead96b6)."""
_MODULES = {"liger": "liger_kernel", "flash-attn": "flash_attn"}
_ON_GPUS = ("liger", "flash-attn")
_LOSSES: Mapping[str, Loss] = {"liger": "fused", "chunked": "chunked"}
"""The planner's words for how a provider makes logits a loss."""


# What a config asks for.


def read_kernels(config: Mapping[str, str], planned_loss: object) -> dict[str, str]:
    """Providers by kernel: those of `dsplan run --kernels`, else the config's, else the loss of a plan.

    Raises:
        UnknownName: a kernel or a provider is not known; the message has the near one.
        CannotRun: a provider has no such kernel.
    """
    requested = plan_request().kernels or config
    word, found = requested.get("all"), dict[str, str]()
    if word is not None:
        _require_provider(word)
        found = {name: word for name in KERNELS if word == "auto" or word == "torch" or name in _kernels_of(word)}
    for name, provider in requested.items():
        if name == "all":
            continue
        _require_kernel(name)
        _require_provider(provider)
        if provider not in ("auto", "torch") and name not in _kernels_of(provider):
            known = ", ".join(_kernels_of(provider))
            raise CannotRun(f"kernels: {provider} has no {name}; it has {known}")
        found[name] = provider
    of_loss: dict[object, str] = {loss: provider for provider, loss in _LOSSES.items()}
    if "linear_cross_entropy" not in found and planned_loss in of_loss:
        found["linear_cross_entropy"] = of_loss[planned_loss]
    return {name: provider for name, provider in found.items() if provider != "torch"}


def _kernels_of(provider: str) -> list[str]:
    own = [registered.kernel for registered in _registered if registered.provider == provider]
    return [*_LIBRARIES.get(provider, {}), *dict.fromkeys(own)]


def _require_provider(provider: str) -> None:
    own = dict.fromkeys(registered.provider for registered in _registered)
    known = ("auto", "torch", *_LIBRARIES, *own)
    if provider not in known:
        raise UnknownName("kernel provider", provider, known, hint=f"one of {', '.join(known)}")


# Which modules a kernel replaces.


@dataclass(frozen=True, kw_only=True, slots=True)
class Installed:
    """What was done to a model."""

    kernels: Mapping[str, str]
    """The provider of every kernel that replaces something."""
    notes: tuple[str, ...]
    """What was asked for and is not there, a line each; what runs there is torch's own."""

    @property
    def loss(self) -> Loss:
        """The planner's word for how logits become a loss."""
        provider = self.kernels.get("linear_cross_entropy")
        return "plain" if provider is None else _LOSSES.get(provider, "fused")

    @property
    def sentence(self) -> str:
        """What runs, in one line; empty where nothing was replaced."""
        named = ", ".join(f"{name} {provider}" for name, provider in self.kernels.items())
        return f"kernels: {named}; the rest is torch's own" if named else ""


def install_kernels(model: nn.Module, asked: Mapping[str, str], device: torch.device) -> Installed:
    """Let kernels of the asked providers compute in a model that trains on `device`, in place.

    Raises:
        CannotRun: a script's function does not compute what torch's own does.
    """
    used, stay = dict[str, str](), dict[str, list[str]]()
    for name, provider in asked.items():
        chosen = _chosen(name, provider, device)
        if isinstance(chosen, str):
            why = chosen
            if provider != "auto":
                stay.setdefault(why, []).append(name)
            continue
        if chosen[0].provider not in _LIBRARIES:
            for registered in chosen:
                require_right(name, registered.provider, registered.function, registered.dtype, model, device)
        if _REPLACE[name](model, _Dispatch(chosen)):
            used[name] = chosen[0].provider
            continue
        why = f"{type(model).__name__} has no module that computes it so"
        if provider != "auto":
            stay.setdefault(why, []).append(name)
    notes = (f"kernels: torch's own {', '.join(names)}: {why}" for why, names in stay.items())
    return Installed(kernels=used, notes=tuple(notes))


def _chosen(name: str, provider: str, device: torch.device) -> list[Registered] | str:
    """The functions of a provider for a device, or why there are none."""
    own = [each for each in _registered if each.kernel == name and each.device in ("", device.type)]
    wanted = [each for each in own if provider in ("auto", each.provider)]
    if wanted:
        return [each for each in wanted if each.provider == wanted[0].provider]
    reasons = []
    for library, kernels in _LIBRARIES.items():
        if name not in kernels or provider not in (library, "auto") or (provider == "auto" and library == "chunked"):
            continue
        if library in _ON_GPUS and device.type != "cuda":
            reasons.append(f"{library} runs on GPUs")
        elif library in _MODULES and find_spec(_MODULES[library]) is None:
            reasons.append(f"{library} is not installed (pip install {_MODULES[library].replace('_', '-')})")
        else:
            function: Any = kernels[name]
            return [Registered(kernel=name, provider=library, function=function)]
    return reasons[0] if reasons else f"{provider} has none for {device.type}"


class _Dispatch:
    """The function that answers to a tensor, the most particular one first."""

    def __init__(self, registered: list[Registered]) -> None:
        self.registered = sorted(registered, key=lambda each: (each.dtype is None, not each.device))

    def for_(self, tensor: torch.Tensor) -> Function | None:
        return next((each.function for each in self.registered if each.answers_to(tensor)), None)


class _Forward:
    """A module's forward that lets a kernel compute where one answers to the input."""

    def __init__(self, module: nn.Module, dispatch: _Dispatch, compute: Callable[..., Any]) -> None:
        self._module, self._dispatch, self._compute = module, dispatch, compute
        self._original = module.forward

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        function = None if args or kwargs else self._dispatch.for_(hidden)
        return self._original(hidden, *args, **kwargs) if function is None else self._compute(function, hidden)


def _replace_where(
    model: nn.Module,
    dispatch: _Dispatch,
    found: Iterator[tuple[nn.Module, int, Callable[..., Any], Function]],
) -> bool:
    """Replace modules that compute what the reference does: each with the width of its input, what hands a kernel its
    weights, and torch's form of the kernel. Modules of one class are tried once."""
    tried: dict[type[nn.Module], bool] = {}
    for module, width, compute, reference in list(found):
        kind = type(module)
        if kind not in tried:
            tried[kind] = _computes(module, width, partial(compute, reference))
        if tried[kind]:
            module.forward = _Forward(module, dispatch, compute)
    return any(tried.values())


def _computes(module: nn.Module, width: int, reference: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether a module computes what a function does."""
    weight = next(module.parameters(), None)
    if weight is None or weight.is_meta:
        return False
    dtype = weight.dtype if weight.is_floating_point() and weight.element_size() > 1 else torch.float32
    hidden = torch.linspace(-2, 2, 2 * width, device=weight.device).view(1, 2, width).to(dtype)
    try:
        with torch.no_grad():
            own, other = module(hidden), reference(hidden)
    except (TypeError, RuntimeError, ValueError, AttributeError):
        return False  # it takes something else
    return (
        isinstance(own, torch.Tensor)
        and own.shape == other.shape
        and torch.allclose(
            own.float(),
            other.float(),
            rtol=2e-2 if dtype != torch.float32 else 1e-4,
            atol=1e-3 * float(own.abs().max()),
        )
    )


def _replace_rms_norms(model: nn.Module, dispatch: _Dispatch) -> bool:
    def found() -> Iterator[tuple[nn.Module, int, Callable[..., Any], Function]]:
        for part in model.modules():
            module: Any = part
            if not is_rms_norm(module):
                continue

            def compute(function: Function, hidden: torch.Tensor, own: Any = module) -> Any:
                return function(hidden, own.weight, eps_of(own, hidden.dtype))

            yield part, module.weight.numel(), compute, rms_norm

    return _replace_where(model, dispatch, found())


def _replace_layer_norms(model: nn.Module, dispatch: _Dispatch) -> bool:
    def found() -> Iterator[tuple[nn.Module, int, Callable[..., Any], Function]]:
        for part in model.modules():
            module: Any = part
            if not is_layer_norm(module):
                continue

            def compute(function: Function, hidden: torch.Tensor, own: Any = module) -> Any:
                return function(hidden, own.weight, own.bias, own.eps)

            yield part, module.normalized_shape[0], compute, layer_norm

    return _replace_where(model, dispatch, found())


def _replace_gated_mlps(model: nn.Module, dispatch: _Dispatch) -> bool:
    def found() -> Iterator[tuple[nn.Module, int, Callable[..., Any], Function]]:
        for part in model.modules():
            module: Any = part
            if not is_gated(module):
                continue
            width = getattr(module.gate_proj, "in_features", None)
            if width is None or "silu" not in type(getattr(module, "act_fn", None)).__name__.lower():
                continue

            def compute(function: Function, hidden: torch.Tensor, own: Any = module) -> Any:
                return own.down_proj(function(own.gate_proj(hidden), own.up_proj(hidden)))

            yield part, width, compute, swiglu

    return _replace_where(model, dispatch, found())


class _RotaryFunction:
    """A family's `apply_rotary_pos_emb` in its module of transformers, which all models of it in the process share."""

    def __init__(self, original: Function, dispatch: _Dispatch) -> None:
        self.original, self.dispatch = original, dispatch

    def __call__(self, q: torch.Tensor, k: torch.Tensor, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        plain = not args and not kwargs.pop("position_ids", None) and kwargs.pop("unsqueeze_dim", 1) == 1 and not kwargs
        function = self.dispatch.for_(q) if plain else None
        return self.original(q, k, cos, sin, *args, **kwargs) if function is None else function(q, k, cos, sin)


def _replace_rotary(model: nn.Module, dispatch: _Dispatch) -> bool:
    name, replaced = "apply_rotary_pos_emb", False
    homes: dict[str, ModuleType] = {
        type(part).__module__: sys.modules[type(part).__module__] for part in model.modules()
    }
    for home in homes.values():
        original = getattr(home, name, None)
        if isinstance(original, _RotaryFunction):
            original = original.original
        if original is None or not home.__name__.startswith("transformers.models."):
            continue
        query, angle = torch.linspace(-1, 1, 16).view(1, 1, 2, 8), torch.linspace(0, 1, 8).view(1, 2, 4)
        cos, sin = (torch.cat((side, side), dim=-1) for side in (angle.cos(), angle.sin()))
        try:
            alike = all(map(torch.allclose, original(query, query, cos, sin), rotary(query, query, cos, sin)))
        except (TypeError, RuntimeError, ValueError):
            continue  # another signature
        if alike:
            setattr(home, name, _RotaryFunction(original, dispatch))
            replaced = True
    return replaced


class _LossForward:
    """The forward of a causal language model that makes no logits where it is given labels in training."""

    multiplies_with_head = True
    """It takes the head's weight from its layer: whole (`strategies.parallel.tensor`)."""

    def __init__(self, model: nn.Module, dispatch: _Dispatch) -> None:
        self._model, self._dispatch, self._original = model, dispatch, model.forward
        self.__signature__ = inspect.signature(model.forward)

    def __call__(self, *args: Any, labels: Any = None, **kwargs: Any) -> Any:
        model: Any = self._model
        other = any(kwargs.get(name) is not None for name in ("num_items_in_batch", "past_key_values"))
        if labels is None or args or other or not model.training:
            return self._original(*args, labels=labels, **kwargs)
        kwargs.pop("logits_to_keep", None)
        ahead = kwargs.pop("shift_labels", None)
        output = getattr(model, model.base_model_prefix)(**kwargs)
        hidden, weight = output.last_hidden_state, model.get_output_embeddings().weight
        if torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(torch.get_autocast_dtype(hidden.device.type))
        function = self._dispatch.for_(hidden)
        if function is None:
            return self._original(labels=labels, shift_labels=ahead, **kwargs)
        shifted = (functional.pad(labels, (0, 1), value=IGNORED)[..., 1:] if ahead is None else ahead).reshape(-1)
        loss = function(hidden.reshape(-1, hidden.shape[-1]), weight.to(hidden.dtype), shifted)
        output["loss"] = loss
        return output


def _replace_loss(model: nn.Module, dispatch: _Dispatch) -> bool:
    whole: Any = model
    unwrapped: Any = whole.get_base_model() if hasattr(whole, "get_base_model") else whole
    kind = getattr(getattr(unwrapped, "config", None), "model_type", "")
    if kind not in _PLAIN_LOSS or not type(unwrapped).__name__.endswith("ForCausalLM"):
        return False
    if type(unwrapped.get_output_embeddings()) is not nn.Linear or unwrapped.get_output_embeddings().bias is not None:
        return False
    unwrapped.forward = _LossForward(unwrapped, dispatch)
    return True


def _replace_attention(model: nn.Module, dispatch: _Dispatch) -> bool:
    whole: Any = model
    unwrapped: Any = whole.get_base_model() if hasattr(whole, "get_base_model") else whole
    if not hasattr(unwrapped, "set_attn_implementation"):
        return False
    first: Any = dispatch.registered[0]
    if first.function == _FLASH:
        unwrapped.set_attn_implementation(_FLASH)
        return True
    utilities: Any = import_module("transformers.modeling_utils")
    masks: Any = import_module("transformers.masking_utils")
    usual = utilities.ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend(module: Any, query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        function = dispatch.for_(query)
        return (usual if function is None else function)(module, query, *args, **kwargs)

    name = f"dsplan_{first.provider}"
    utilities.ALL_ATTENTION_FUNCTIONS.register(name, attend)
    masks.ALL_MASK_ATTENTION_FUNCTIONS.register(name, masks.ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    unwrapped.set_attn_implementation(name)
    return True


_REPLACE: Mapping[str, Callable[[nn.Module, _Dispatch], bool]] = {
    "rms_norm": _replace_rms_norms,
    "layer_norm": _replace_layer_norms,
    "swiglu": _replace_gated_mlps,
    "rotary": _replace_rotary,
    "linear_cross_entropy": _replace_loss,
    "attention": _replace_attention,
}
