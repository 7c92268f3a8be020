"""Names of a module's tensors: each tensor once, however many names it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from strategies.errors import CannotRun

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModuleNames:
    """What a module's state dict holds.

    Attributes:
        tensors: every parameter and persistent buffer under its first name.
        aliases: further names of tied tensors, with the first.
        extra: what modules keep beside tensors (`get_extra_state`), where it is JSON.
    """

    tensors: Mapping[str, torch.Tensor]
    aliases: Mapping[str, str]
    extra: Mapping[str, Any]

    def of_parameters(self) -> dict[torch.Tensor, str]:
        """The names by tensor."""
        return {tensor: name for name, tensor in self.tensors.items()}


def names_of(module: nn.Module) -> ModuleNames:
    """The tensors of a module by the names that they have in it, without those of wrappers around its parts.

    Raises:
        CannotRun: a module's extra state is neither a tensor nor JSON.
    """
    tensors: dict[str, torch.Tensor] = {}
    aliases: dict[str, str] = {}
    extra: dict[str, Any] = {}
    first: dict[int, str] = {}
    for wrapped_name, value in module.state_dict(keep_vars=True).items():
        name = _unwrapped(wrapped_name)
        if not isinstance(value, torch.Tensor):
            extra[name] = _plain(name, value)
        elif id(value) in first:
            aliases[name] = first[id(value)]
        else:
            first[id(value)] = name
            tensors[name] = value
    return ModuleNames(tensors=tensors, aliases=aliases, extra=extra)


def load_extra(module: nn.Module, extra: Mapping[str, Any]) -> None:
    """Hand extra states back to the modules that kept them."""
    for prefix, part in module.named_modules():
        key = _unwrapped(f"{prefix}._extra_state" if prefix else "_extra_state")
        if key in extra:
            part.set_extra_state(extra[key])


def is_json(value: Any) -> bool:
    """Whether a value is made of JSON's kinds (and tuples) alone."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return True
    if isinstance(value, (list, tuple)):
        return all(is_json(one) for one in value)
    return isinstance(value, dict) and all(isinstance(key, str) and is_json(one) for key, one in value.items())


def _plain(name: str, value: Any) -> Any:
    if not is_json(value):
        raise CannotRun(
            f"checkpoint: {name} is a {type(value).__name__}; let get_extra_state return a tensor, or JSON (numbers,"
            " texts, lists, dicts)"
        )
    return value


def _unwrapped(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
