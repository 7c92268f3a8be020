"""A small Llama whose modules compute with registered kernels; what the tests of kernels send to ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from strategies.engine.initialize import initialize
from strategies.modules import kernels
from tests.strategies import adapter_bodies
from tests.strategies.training_bodies import Recipe

CALLS: dict[str, int] = {}


def _rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    CALLS["rms_norm"] = CALLS.get("rms_norm", 0) + 1
    wide = hidden.float()
    return (weight.float() * wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt()).to(hidden.dtype)


def _swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    CALLS["swiglu"] = CALLS.get("swiglu", 0) + 1
    return gate * torch.sigmoid(gate) * up


def _rotary(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
    CALLS["rotary"] = CALLS.get("rotary", 0) + 1

    def turned(tensor: torch.Tensor) -> torch.Tensor:
        half = tensor.shape[-1] // 2
        swapped = torch.cat((-tensor[..., half:], tensor[..., :half]), dim=-1)
        return tensor * cos[:, None] + swapped * sin[:, None]

    return turned(query), turned(key)


def _attention(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **how: Any) -> Any:
    CALLS["attention"] = CALLS.get("attention", 0) + 1
    copies = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(copies, 1), value.repeat_interleave(copies, 1)
    attended = functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=mask is None, scale=how["scaling"]
    )
    return attended.transpose(1, 2).contiguous(), None


FUNCTIONS = {"rms_norm": _rms_norm, "swiglu": _swiglu, "rotary": _rotary, "attention": _attention}


def register() -> None:
    """All of them, as the provider `mine`."""
    for name, function in FUNCTIONS.items():
        kernels.register_kernel(name, function, device="cpu", dtype="fp32", provider="mine")


def losses_with(recipe: Recipe, chosen: dict[str, str]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Five steps of a Llama, and its weights."""
    register()
    engine, *_ = initialize(
        model=adapter_bodies.llama(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        plan=recipe.plan(),
        config={"kernels": chosen},
    )
    engine.train()
    return adapter_bodies.train(engine, range(5)), engine.state_dict()
