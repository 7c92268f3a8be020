"""The forms of kernels: torch's own, the modules that compute them, and a trial of others beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from strategies.errors import CannotRun
from strategies.parallel.blocks import without_adapters

Function = Callable[..., Any]
KERNELS: Mapping[str, str] = {
    "rms_norm": "(hidden [..., width], weight [width], eps) -> [..., width]",
    "layer_norm": "(hidden [..., width], weight [width], bias [width] or None, eps) -> [..., width]",
    "swiglu": "(gate [..., width], up [..., width]) -> silu(gate) * up, [..., width]",
    "rotary": "(query and key [batch, heads, tokens, size], cos and sin [batch, tokens, size]) -> (query, key)",
    "linear_cross_entropy": "(hidden [n, width], weight [vocabulary, width], labels [n], -100 for none) -> mean, nats",
    "attention": "(module, query, key, value, attention_mask, **options) -> (output, None), as transformers calls it",
}
"""The kernels, and the signature of a function that computes each."""
IGNORED = -100
"""torch's and transformers' label of what counts for no loss."""


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compute the RMSNorm of LLaMA, in fp32."""
    return functional.rms_norm(hidden.float(), weight.shape, weight.float(), eps).to(hidden.dtype)


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Compute the gated activation of LLaMA's MLP."""
    return functional.silu(gate) * up


def layer_norm(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Compute the layer norm of torch, over the last dimension."""
    return functional.layer_norm(hidden, weight.shape, weight, bias, eps)


def rotary(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    """Turn query and key by half, as LLaMA of transformers does it."""

    def turn(tensor: torch.Tensor) -> torch.Tensor:
        first, second = tensor.chunk(2, dim=-1)
        return tensor * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)

    return turn(query), turn(key)


def plain_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Compute the mean cross-entropy of a linear head, in nats."""
    return functional.cross_entropy(functional.linear(hidden, weight), labels, ignore_index=IGNORED)


def _is_rms_norm(module: Any) -> bool:
    """Return whether a module is named as one and has one weight for each width."""
    weight = getattr(module, "weight", None)
    return "RMSNorm" in type(module).__name__ and isinstance(weight, nn.Parameter) and weight.dim() == 1


def _eps_of(norm: Any, dtype: torch.dtype) -> float:
    """Return the eps of an RMSNorm, by either name; torch's own may have none, and takes that of the dtype."""
    eps: float | None = getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None)
    return torch.finfo(dtype).eps if eps is None else eps


def _is_layer_norm(module: Any) -> bool:
    """Return whether a module is torch's own, over the last dimension, with weights."""
    return type(module) is nn.LayerNorm and len(module.normalized_shape) == 1 and module.elementwise_affine


def _gated_width(module: Any) -> int | None:
    """Return the width of a gated MLP of SiLU, or None for other modules."""
    names = ("gate_proj", "up_proj", "down_proj")
    if not all(isinstance(getattr(module, name, None), nn.Module) for name in names):
        return None
    is_silu = "silu" in type(getattr(module, "act_fn", None)).__name__.lower()
    width: int | None = getattr(module.gate_proj, "in_features", None)
    return width if is_silu else None


Draw = Callable[..., torch.Tensor]
"""Random numbers of a shape, the same in every process."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleForm:
    """A kind of module that one kernel can compute."""

    input_width: Callable[[Any], int | None]
    """The width of a module's input; None for modules of other kinds."""
    compute: Callable[[Function, Any, torch.Tensor], Any]
    """Hands a kernel what the module computes with; of the kernel, the module and its input."""
    reference: Function
    """Torch's form of the kernel."""
    arguments: Callable[[Any, Draw], tuple[dict[str, torch.Tensor], tuple[Any, ...]]]
    """Small ones of the kernel with a module's widths: those with gradients, by name, and those after them."""


def _draw_norm(norm: Any, draw: Draw) -> dict[str, torch.Tensor]:
    return {"hidden": draw(2, 3, norm.weight.numel()), "weight": draw(norm.weight.numel())}


def _draw_layer_norm(norm: Any, draw: Draw) -> tuple[dict[str, torch.Tensor], tuple[Any, ...]]:
    trained = _draw_norm(norm, draw)
    return (
        (trained, (None, norm.eps)) if norm.bias is None else ({**trained, "bias": draw(*norm.bias.shape)}, (norm.eps,))
    )


def _draw_gate(mlp: Any, draw: Draw) -> tuple[dict[str, torch.Tensor], tuple[Any, ...]]:
    return {side: draw(2, 3, mlp.gate_proj.out_features) for side in ("gate", "up")}, ()


MODULE_FORMS: Mapping[str, ModuleForm] = {
    "rms_norm": ModuleForm(
        input_width=lambda module: module.weight.numel() if _is_rms_norm(module) else None,
        compute=lambda kernel, module, hidden: kernel(hidden, module.weight, _eps_of(module, hidden.dtype)),
        reference=rms_norm,
        arguments=lambda norm, draw: (_draw_norm(norm, draw), (_eps_of(norm, torch.float32),)),
    ),
    "layer_norm": ModuleForm(
        input_width=lambda module: module.normalized_shape[0] if _is_layer_norm(module) else None,
        compute=lambda kernel, module, hidden: kernel(hidden, module.weight, module.bias, module.eps),
        reference=layer_norm,
        arguments=_draw_layer_norm,
    ),
    "swiglu": ModuleForm(
        input_width=_gated_width,
        compute=lambda kernel, mlp, hidden: mlp.down_proj(kernel(mlp.gate_proj(hidden), mlp.up_proj(hidden))),
        reference=swiglu,
        arguments=_draw_gate,
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Example:
    """A kernel's arguments, and torch's form of it."""

    trained: Mapping[str, torch.Tensor]
    """Arguments with gradients, by name."""
    others: tuple[Any, ...] = ()
    """Those after them."""
    reference: Function
    bind: Callable[[Function], Function] = lambda function: function
    """Makes of a kernel a function of these arguments alone."""


_TOLERANCES = {torch.bfloat16: 6e-2, torch.float16: 1e-2}
"""Of the largest element: a few roundings, eps 2^-8 and 2^-11; 2e-3 for others, as products in TF32 differ."""


def require_right(
    name: str, provider: str, function: Function, dtype: torch.dtype | None, model: nn.Module, device: torch.device
) -> None:
    """Check a function's outputs and gradients against torch's, with a few numbers of the model's widths.

    They are in the function's dtype (None: that of the model's weights).

    Raises:
        CannotRun: they differ.
    """
    example = _example_of(name, model)
    if example is None:
        return
    weight = next((parameter for parameter in model.parameters() if parameter.is_floating_point()), None)
    dtype = dtype or (torch.float32 if weight is None else weight.dtype)
    if problem := _why_wrong(function, example, dtype, device):
        kind = str(dtype).removeprefix("torch.")
        raise CannotRun(
            f"kernels: {provider}'s {name}, tried on a few {kind} numbers on {device.type}, {problem}; it"
            f" computes {KERNELS[name]}, differentiably; mend it, or leave it out of kernels"
        )


def _why_wrong(function: Function, example: _Example, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return how a function differs from torch's form, or None."""
    trained = {argument: values.to(device, dtype) for argument, values in example.trained.items()}
    others = [value.to(device) if isinstance(value, torch.Tensor) else value for value in example.others]
    others = [value.to(dtype) if _is_floating(value) else value for value in others]
    wide = [value.float() if _is_floating(value) else value for value in others]
    wide_trained = {argument: values.float() for argument, values in trained.items()}
    expected = _outputs_and_gradients(example.bind(example.reference), wide_trained, wide)
    try:
        results = _outputs_and_gradients(example.bind(function), trained, others)
    except Exception as raised:  # whatever a script's function raises
        return f"raises {type(raised).__name__} ({str(raised).partition(chr(10))[0]})"
    bound = _TOLERANCES.get(dtype, 2e-3)
    for what, values in expected.items():
        result = results.get(what)
        if result is None or result.shape != values.shape:
            return f"gives {what} as {None if result is None else list(result.shape)} for {list(values.shape)}"
        if not (difference := float((result.float() - values).abs().max() / values.abs().max())) <= bound:
            return f"gives {what} that differs by {difference:.1g} of the largest from torch's"
    return None


def _is_floating(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _outputs_and_gradients(
    function: Function, trained: Mapping[str, torch.Tensor], others: list[Any]
) -> dict[str, torch.Tensor]:
    """Return what a function computes, and the gradients of a sum of it with fixed weights, by what they are."""
    with torch.enable_grad():
        leaves = [values.detach().clone().requires_grad_() for values in trained.values()]
        # Clones: a function may write over what it is given, which a leaf does not allow.
        returned = function(*[leaf.clone() for leaf in leaves], *others)
        outputs = [value for value in (returned if isinstance(returned, tuple) else (returned,)) if value is not None]
        total = torch.zeros((), device=leaves[0].device)
        for output in outputs:
            weights = torch.linspace(1, 2, output.numel(), device=output.device).view(output.shape)
            total = total + (output.float() * weights).sum()
        gradients = torch.autograd.grad(total, leaves, allow_unused=True)
    results = {f"output {index}" if index else "an output": value.detach() for index, value in enumerate(outputs)}
    for name, gradient in zip(trained, gradients, strict=True):
        if gradient is not None:
            results[f"a gradient of {name}"] = gradient
    return results


def _example_of(name: str, model: Any) -> _Example | None:
    """Return small inputs of the widths that a model has, or None if it has nothing that the kernel replaces."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def first(fits: Callable[[Any], bool]) -> Any:
        return next(filter(fits, model.modules()), None)

    if form := MODULE_FORMS.get(name):
        module = first(lambda part: form.input_width(part) is not None)
        if module is None:
            return None
        trained, others = form.arguments(module, draw)
        return _Example(trained=trained, others=others, reference=form.reference)
    config = getattr(without_adapters(model), "config", None)
    if config is None or not getattr(config, "num_attention_heads", None):
        return None
    heads = config.num_attention_heads
    keys = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    if name == "rotary":
        angle = torch.linspace(0, 2, 8 * (size // 2)).view(2, 4, size // 2)
        cos, sin = (torch.cat((side, side), dim=-1) for side in (angle.cos(), angle.sin()))
        trained = {"query": draw(2, heads, 4, size), "key": draw(2, keys, 4, size)}
        return _Example(trained=trained, others=(cos, sin), reference=rotary)
    if name == "linear_cross_entropy":
        vocabulary = min(64, config.vocab_size)
        labels = torch.randint(0, vocabulary, (6,), generator=generator).index_fill(0, torch.tensor([1]), IGNORED)
        trained = {"hidden": draw(6, config.hidden_size), "weight": draw(vocabulary, config.hidden_size) / 8}
        return _Example(trained=trained, others=(labels,), reference=plain_loss)
    layer = first(lambda part: hasattr(part, "num_key_value_groups") and hasattr(part, "scaling"))
    if name != "attention" or layer is None:
        return None
    utilities: Any = import_module("transformers.modeling_utils")

    def bind(function: Function) -> Function:
        return lambda *states: function(layer, *states, None, dropout=0.0, scaling=layer.scaling)[0]

    trained = {"query": draw(2, heads, 4, size), **{side: draw(2, keys, 4, size) for side in ("key", "value")}}
    return _Example(trained=trained, reference=utilities.ALL_ATTENTION_FUNCTIONS["sdpa"], bind=bind)
