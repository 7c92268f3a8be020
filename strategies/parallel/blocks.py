"""The repeated blocks of a model: what FSDP shards one by one and activation checkpointing recomputes one by one."""

from __future__ import annotations

from torch import nn


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The members of every outermost stack of like modules, in the order of the model.

    A stack is a `ModuleList` or `Sequential` whose members are all of one class, have parameters, and are made of
    other modules (`nn.Sequential(Linear, Linear)` is one block's inside, not a stack of blocks). Encoder and decoder
    are two stacks; stacks inside a stack's members (the experts of a layer) belong to the member.
    """
    if _is_stack(model):
        return list(model.children())
    return [block for child in model.children() for block in repeated_blocks(child)]


def _is_stack(module: nn.Module) -> bool:
    if not isinstance(module, (nn.ModuleList, nn.Sequential)):
        return False
    members = list(module)
    return (
        len({type(member) for member in members}) == 1
        and all(any(True for _ in member.children()) for member in members)
        and all(any(True for _ in member.parameters()) for member in members)
    )


def quantised_weights(model: nn.Module) -> list[str]:
    """The names of the weights that bitsandbytes stores in 4 bits; FSDP2 puts tensors of its own in their place, so the
    layers are asked."""
    linears = (name for name, module in model.named_modules() if type(module).__name__ == "Linear4bit")
    return [f"{name}.weight" for name in linears]
