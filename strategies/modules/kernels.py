"""Kernels by name: whose code computes norms, gated MLPs, rotary embeddings, attention and the loss of a model.

A kernel is a function with the signature that `KERNELS` says. Its provider is `liger` (Liger-Kernel, Triton),
`flash-attn`, `chunked` (torch's own products, a part of the logits at a time) or a script's own (`register_kernel`),
for a device and a dtype; where none answers to a call's inputs, the module computes as it did. Modules are replaced by
what they compute, which is tried on a few numbers, so that a norm of Gemma's kind (one added to its weight) stays.
A script's function is tried too: its outputs and gradients must be torch's.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
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
    MODULE_FORMS,
    Function,
    ModuleForm,
    require_right,
    rotary,
)
from strategies.modules.precision import DTYPES
from strategies.parallel.blocks import without_adapters
from strategies.run_directory.request import plan_request

_LOG = logging.getLogger(__name__)
_DEVICES = ("cuda", "cpu")
_CHUNK_ROWS = 1024
_PLAIN_LOSS = (
    "apertus arcee cwm ernie4_5 exaone4 gemma helium llama ministral ministral3 mistral olmo olmo2 olmo3 phi phi3 qwen2"
    " qwen3 seed_oss smollm3 starcoder2"
)
"""Model types of transformers 5.23 whose loss is the mean cross-entropy of `lm_head(hidden)` and nothing else: no
scale, no soft cap, no router's loss (`models/*/modeling_*.py`, forward of the class with the head)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Registered:
    """A function for a kernel."""

    kernel: str
    provider: str
    function: Function
    device: str = ""
    """The kind of device that it runs on; empty for every one."""
    dtype: torch.dtype | None = None
    """Of the first tensor; None for every one."""

    def answers_to(self, tensor: torch.Tensor) -> bool:
        """Return whether it takes such a tensor."""
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
        name: `rms_norm`, `layer_norm`, `swiglu`, `rotary`, `linear_cross_entropy` or `attention`.
        function: differentiable; docs/how-to/training.md has the signature for each name.
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
    kind = "" if device is None else str(device)
    if kind not in ("", *_DEVICES):
        devices = " or ".join(map(repr, _DEVICES))
        raise CannotRun(f"register_kernel: device {kind!r} is not known; use {devices}, or None for every one")
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise UnknownName("dtype", dtype, DTYPES, hint=f"one of {', '.join(DTYPES)}")
        dtype = DTYPES[dtype]
    added = Registered(kernel=name, provider=provider, function=function, device=kind, dtype=dtype)
    _registered[:] = [old for old in _registered if replace(old, function=function) != added]
    _registered.append(added)


def _require_kernel(name: str) -> None:
    if name not in KERNELS:
        raise UnknownName("kernel", name, KERNELS, hint=f"one of {', '.join(KERNELS)}")


def _chunked_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Compute the loss of a part of the rows at a time, whose logits are made again in backward."""

    def sum_part(rows: torch.Tensor, matrix: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = functional.linear(rows, matrix).float()
        return functional.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")

    parts = zip(hidden.split(_CHUNK_ROWS), labels.split(_CHUNK_ROWS), strict=True)  # type: ignore[no-untyped-call]
    losses = [checkpoint(sum_part, rows, weight, targets, use_reentrant=False) for rows, targets in parts]
    return torch.stack(losses).sum() / (labels != IGNORED).sum()


def _of_liger(name: str, *more: Any, **options: Any) -> Function:
    """Make a function that calls one of Liger-Kernel's, with what it takes beside our arguments."""

    def call(*tensors: Any) -> Any:
        return getattr(import_module("liger_kernel.transformers.functional"), name)(*tensors, *more, **options)

    return call


def _liger_layer_norm(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> Any:
    return _of_liger("liger_layer_norm")(hidden, weight, torch.zeros_like(weight) if bias is None else bias, eps)


_FLASH = "flash_attention_2"
_LIBRARIES: Mapping[str, Mapping[str, Function | str]] = {
    "liger": {
        # in_place=True would write the gradient over that of the output, which residuals still need.
        "rms_norm": _of_liger("liger_rms_norm", 0.0, "llama", False),
        "layer_norm": _liger_layer_norm,
        "swiglu": _of_liger("liger_swiglu"),
        "rotary": _of_liger("liger_rope"),
        "linear_cross_entropy": _of_liger("liger_fused_linear_cross_entropy", ignore_index=IGNORED),
    },
    "flash-attn": {"attention": _FLASH},
    "chunked": {"linear_cross_entropy": _chunked_loss},
}
"""Kernels of libraries by provider (Liger-Kernel's `transformers/functional.py` at ead96b6)."""
_MODULES = {"liger": "liger_kernel", "flash-attn": "flash_attn"}
_ON_GPUS = ("liger", "flash-attn")
_LOSSES: Mapping[str, Loss] = {"liger": "fused", "chunked": "chunked"}
"""The planner's words for how a provider makes logits a loss."""


def read_kernels(config: Mapping[str, str], planned_loss: object) -> dict[str, str]:
    """Return providers by kernel: those of `dsplan run --kernels`, else the config's, else the loss of a plan.

    Raises:
        UnknownName: a kernel or a provider is not known; the message has the near one.
        CannotRun: a provider has no such kernel.
    """
    requested = plan_request().kernels or config
    for_all, providers = requested.get("all"), dict[str, str]()
    if for_all is not None:
        _require_provider(for_all)
        providers = {name: for_all for name in KERNELS if for_all in ("auto", "torch") or name in _kernels_of(for_all)}
    for name, provider in requested.items():
        if name == "all":
            continue
        _require_kernel(name)
        _require_provider(provider)
        if provider not in ("auto", "torch") and name not in _kernels_of(provider):
            raise CannotRun(f"kernels: {provider} has no {name}; it has {', '.join(_kernels_of(provider))}")
        providers[name] = provider
    for provider, loss in _LOSSES.items():
        if loss == planned_loss:
            providers.setdefault("linear_cross_entropy", provider)
    return {name: provider for name, provider in providers.items() if provider != "torch"}


def _kernels_of(provider: str) -> list[str]:
    own = [registered.kernel for registered in _registered if registered.provider == provider]
    return [*_LIBRARIES.get(provider, {}), *dict.fromkeys(own)]


def _require_provider(provider: str) -> None:
    providers = ("auto", "torch", *_LIBRARIES, *dict.fromkeys(registered.provider for registered in _registered))
    if provider not in providers:
        raise UnknownName("kernel provider", provider, providers, hint=f"one of {', '.join(providers)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Installed:
    """The kernels of a model."""

    kernels: Mapping[str, str]
    """The provider of every kernel that replaces something."""
    notes: tuple[str, ...]
    """A line for each reason why torch's own runs where another was asked for."""

    @property
    def loss(self) -> Loss:
        """The planner's word for how logits become a loss."""
        provider = self.kernels.get("linear_cross_entropy")
        return "plain" if provider is None else _LOSSES.get(provider, "fused")

    @property
    def sentence(self) -> str:
        """The kernels in one line; empty where nothing was replaced."""
        named = ", ".join(f"{name} {provider}" for name, provider in self.kernels.items())
        return f"kernels: {named}; the rest is torch's own" if named else ""


def install_kernels(model: nn.Module, providers: Mapping[str, str], device: torch.device) -> Installed:
    """Let the kernels of providers compute in a model that trains on `device`, in place.

    Raises:
        CannotRun: a script's function does not compute what torch's own does.
    """
    used, left = dict[str, str](), dict[str, list[str]]()
    for name, provider in providers.items():
        chosen, why_not = _choose(name, provider, device)
        if chosen and chosen[0].provider not in _LIBRARIES:
            for registered in chosen:
                require_right(name, registered.provider, registered.function, registered.dtype, model, device)
        if chosen and _REPLACE[name](model, _Dispatch(chosen)):
            used[name] = chosen[0].provider
        elif provider != "auto":
            left.setdefault(why_not or f"{type(model).__name__} has no module that computes it so", []).append(name)
    notes = (f"kernels: torch's own {', '.join(names)}: {why}" for why, names in left.items())
    return Installed(kernels=used, notes=tuple(notes))


def _choose(name: str, provider: str, device: torch.device) -> tuple[list[Registered], str | None]:
    """Return the functions of a provider for a device, or why there are none."""
    own = [each for each in _registered if each.kernel == name and each.device in ("", device.type)]
    own = [each for each in own if provider in ("auto", each.provider)]
    if own:
        return [each for each in own if each.provider == own[0].provider], None
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
            return [Registered(kernel=name, provider=library, function=function)], None
    return [], reasons[0] if reasons else f"{provider} has none for {device.type}"


class _Dispatch:
    """Finds the function that answers to a tensor, the most particular one first."""

    def __init__(self, registered: list[Registered]) -> None:
        self.registered = sorted(registered, key=lambda each: (each.dtype is None, not each.device))

    def for_(self, tensor: torch.Tensor) -> Function | None:
        return next((each.function for each in self.registered if each.answers_to(tensor)), None)


class _Forward:
    """A module's forward that lets a kernel compute where one answers to the input."""

    def __init__(self, module: nn.Module, dispatch: _Dispatch, form: ModuleForm) -> None:
        self._module, self._dispatch, self._form = module, dispatch, form
        self._original = module.forward

    def __call__(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        function = None if args or kwargs else self._dispatch.for_(hidden)
        if function is None:
            return self._original(hidden, *args, **kwargs)
        return self._form.compute(function, self._module, hidden)


def _replace_modules(form: ModuleForm, model: nn.Module, dispatch: _Dispatch) -> bool:
    """Replace modules that compute what a form does; of each class the first is tried."""
    is_same: dict[type[nn.Module], bool] = {}
    for module in list(model.modules()):
        width = form.input_width(module)
        if width is None:
            continue
        if type(module) not in is_same:
            is_same[type(module)] = _computes(module, width, form)
        if is_same[type(module)]:
            module.forward = _Forward(module, dispatch, form)
    return any(is_same.values())


def _computes(module: nn.Module, width: int, form: ModuleForm) -> bool:
    """Return whether a module computes what a form does."""
    weight = next(module.parameters(), None)
    if weight is None or weight.is_meta:
        return False
    dtype = weight.dtype if weight.is_floating_point() and weight.element_size() > 1 else torch.float32
    hidden = torch.linspace(-2, 2, 2 * width, device=weight.device).view(1, 2, width).to(dtype)
    try:
        with torch.no_grad():
            own, other = module(hidden), form.compute(form.reference, module, hidden)
    except (TypeError, RuntimeError, ValueError, AttributeError) as problem:
        _LOG.debug("%s stays: it takes something else (%s)", type(module).__name__, problem)
        return False
    if not isinstance(own, torch.Tensor) or own.shape != other.shape:
        return False
    rtol, atol = 2e-2 if dtype != torch.float32 else 1e-4, 1e-3 * float(own.abs().max())
    return torch.allclose(own.float(), other.float(), rtol=rtol, atol=atol)


class _RotaryFunction:
    """A family's `apply_rotary_pos_emb` in its module of transformers, which all models of it in the process share."""

    def __init__(self, original: Function, dispatch: _Dispatch) -> None:
        self.original, self.dispatch = original, dispatch

    def __call__(self, q: torch.Tensor, k: torch.Tensor, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        is_usual = kwargs.get("position_ids") is None and kwargs.get("unsqueeze_dim", 1) == 1
        is_plain = is_usual and not args and kwargs.keys() <= {"position_ids", "unsqueeze_dim"}
        function = self.dispatch.for_(q) if is_plain else None
        return self.original(q, k, cos, sin, *args, **kwargs) if function is None else function(q, k, cos, sin)


def _replace_rotary(model: nn.Module, dispatch: _Dispatch) -> bool:
    name, replaced = "apply_rotary_pos_emb", False
    for home in {sys.modules[type(module).__module__] for module in model.modules()}:
        original = getattr(home, name, None)
        if isinstance(original, _RotaryFunction):
            original = original.original
        if original is None or not home.__name__.startswith("transformers.models."):
            continue
        query, angle = torch.linspace(-1, 1, 16).view(1, 1, 2, 8), torch.linspace(0, 1, 8).view(1, 2, 4)
        cos, sin = (torch.cat((side, side), dim=-1) for side in (angle.cos(), angle.sin()))
        try:
            alike = all(map(torch.allclose, original(query, query, cos, sin), rotary(query, query, cos, sin)))
        except (TypeError, RuntimeError, ValueError) as problem:
            _LOG.debug("%s of %s stays: it has another signature (%s)", name, home.__name__, problem)
            continue
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
    unwrapped = without_adapters(model)
    kind = getattr(getattr(unwrapped, "config", None), "model_type", "")
    if kind not in _PLAIN_LOSS.split() or not type(unwrapped).__name__.endswith("ForCausalLM"):
        return False
    if type(unwrapped.get_output_embeddings()) is not nn.Linear or unwrapped.get_output_embeddings().bias is not None:
        return False
    unwrapped.forward = _LossForward(unwrapped, dispatch)
    return True


def _replace_attention(model: nn.Module, dispatch: _Dispatch) -> bool:
    unwrapped = without_adapters(model)
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
    **{name: partial(_replace_modules, form) for name, form in MODULE_FORMS.items()},
    "rotary": _replace_rotary,
    "linear_cross_entropy": _replace_loss,
    "attention": _replace_attention,
}
