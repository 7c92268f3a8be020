"""Muon for the matrices inside a model, AdamW for everything else, as one optimizer (Jordan et al. 2024)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from strategies.errors import CannotRun

_OF_ADAM = ("betas", "eps")
_NOT_INSIDE = ("embed", "lm_head")
"""Parts of the names of tables and heads: their rows stand for single words, and Muon is for maps between features."""


class MuonWithAdamW(Optimizer):
    """Groups with `use_muon` are stepped by torch's Muon, the others by torch's AdamW.

    Args:
        params: parameters or groups. A group that does not say `use_muon` is Muon's where it is matrices alone.
        lr: of both, where `muon_lr` or `adam_lr` does not say otherwise.
        options: `muon_lr`, `adam_lr`, `weight_decay`, what torch's Muon takes, and AdamW's `betas` and `eps`.

    Raises:
        CannotRun: this torch has no Muon.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, **options: Any) -> None:
        if not hasattr(torch.optim, "Muon"):
            raise CannotRun(
                f"optimizer Muon needs torch 2.9 and this is {torch.__version__}; update torch, or use AdamW"
            )
        rates = {kind: options.pop(f"{kind}_lr", lr) for kind in ("muon", "adam")}
        shared = {"weight_decay": options.pop("weight_decay", 0.0)}
        of_adam = {name: value for name, value in options.items() if name in _OF_ADAM}
        of_muon = {name: value for name, value in options.items() if name not in _OF_ADAM}
        # Each is made over a tensor of its own, and lent the groups and states of this one whenever it steps.
        self._muon = torch.optim.Muon([nn.Parameter(torch.zeros(1, 1))], lr=rates["muon"], **shared, **of_muon)
        self._adam = AdamW([nn.Parameter(torch.zeros(1))], lr=rates["adam"], **shared, **of_adam)
        super().__init__(params, {})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, with the settings of its own optimizer where it has none."""
        members = param_group["params"]
        members = [members] if isinstance(members, Tensor) else list(members)
        of_muon = param_group.get("use_muon", all(member.ndim == 2 for member in members))
        defaults = (self._muon if of_muon else self._adam).defaults
        whole = {"use_muon": of_muon, "whole_tensors": of_muon}
        super().add_param_group({**defaults, **whole, **param_group, "params": members})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Change every parameter that has a gradient."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for inner, wanted in ((self._muon, True), (self._adam, False)):
            inner.param_groups = [group for group in self.param_groups if group["use_muon"] is wanted]
            inner.state = self.state
            inner.step()  # type: ignore[no-untyped-call,unused-ignore]
        return loss


def muon_groups(model: nn.Module, chosen: Iterable[Any] | None) -> list[Any]:
    """Return the parameters of a model, or the script's choice of them, in groups that say which are Muon's.

    Muon's are matrices that are neither embeddings nor heads, unless the parameter has an attribute `use_muon`.
    """
    tables: set[Tensor] = {
        parameter
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) or any(part in name.lower() for part in _NOT_INSIDE)
        for parameter in module.parameters(recurse=False)
    }

    def is_matrix(parameter: Tensor) -> bool:
        return bool(getattr(parameter, "use_muon", parameter.ndim == 2 and parameter not in tables))

    given = list(chosen) if chosen is not None else [p for p in model.parameters() if p.requires_grad]
    groups: list[Any] = given if given and isinstance(given[0], Mapping) else [{"params": given}]
    return [half for group in groups for half in _split_group(group, is_matrix)]


def _split_group(group: Mapping[str, Any], is_matrix: Callable[[Tensor], bool]) -> list[dict[str, Any]]:
    members = group["params"]
    members = [members] if isinstance(members, Tensor) else list(members)
    halves: dict[bool, list[Any]] = {True: [], False: []}
    for member in members:
        halves[is_matrix(member[1] if isinstance(member, tuple) else member)].append(member)
    return [{**group, "params": half, "use_muon": use} for use, half in halves.items() if half]
