"""The repeated blocks of a model: what FSDP shards one by one and activation checkpointing recomputes one by one."""

from __future__ import annotations

from typing import Any

from torch import nn


class Elsewhere(nn.Module):
    """A stand-in for a block that another pipeline stage has: it keeps its plain attributes and no weights."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        plain = {name: value for name, value in vars(block).items() if not name.startswith("_")}
        vars(self).update({name: value for name, value in plain.items() if name not in ("training", "forward")})

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise, as a pipeline gives each stand-in a forward pass of its own."""
        raise NotImplementedError  # a pipeline gives each its own


def without_adapters(model: Any) -> Any:
    """Return the model that PEFT's wrapper is around, or the model."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def block_stacks(model: nn.Module) -> list[nn.Module]:
    """Return the outermost stacks of like modules (`repeated_blocks`), in the order of the model."""
    if _is_stack(model):
        return [model]
    return [stack for child in model.children() for stack in block_stacks(child)]


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the members of every outermost stack of like modules, in the order of the model.

    A stack is a `ModuleList`, a `Sequential` or a `ModuleDict` whose keys are numbers (torchtitan's models); its
    members are all of one class, have parameters, and are made of other modules (`nn.Sequential(Linear, Linear)` is one
    block's inside, not a stack of blocks). Encoder and decoder are two stacks; stacks inside a stack's members (the
    experts of a layer) belong to the member. Blocks that another pipeline stage has are left out.
    """
    return [block for stack in block_stacks(model) for block in members(stack)]


def members(stack: nn.Module) -> list[nn.Module]:
    """Return the members of a stack that are here."""
    return [member for member in stack.children() if not isinstance(member, Elsewhere)]


def is_row(module: nn.Module) -> bool:
    """Return whether a container numbers its members, as blocks that follow each other are kept."""
    if isinstance(module, nn.ModuleDict):
        return len(module) > 0 and all(key.isdecimal() for key in module)
    return isinstance(module, nn.ModuleList | nn.Sequential)


def _is_stack(module: nn.Module) -> bool:
    if not is_row(module):
        return False
    here = members(module)
    return (
        len({type(member) for member in here}) == 1
        and all(any(True for _ in member.children()) for member in here)
        and all(any(True for _ in member.parameters()) for member in here)
    )


QUANTISER = "_dsplan_quantiser"
"""Attribute of a layer whose weight is still to be read: stores a whole one, [outputs, inputs], in 4 bits."""


def quantised_weights(model: nn.Module) -> list[str]:
    """Name the weights that bitsandbytes stores in 4 bits; their layers are asked, as FSDP2 replaces the tensors."""
    linears = (name for name, module in model.named_modules() if type(module).__name__ == "Linear4bit")
    return [f"{name}.weight" for name in linears]
