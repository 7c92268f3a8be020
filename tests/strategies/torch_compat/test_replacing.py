"""Replacements of torch's functions are undone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from strategies.integrations import ddp_script
from strategies.torch_compat.replacing import replace, replaced


class _Owner:
    @staticmethod
    def static() -> str:
        return "original"


def test_what_is_replaced_is_put_back_as_it_was() -> None:
    with replaced(_Owner, static=staticmethod(lambda: "other")):
        assert _Owner.static() == "other"
    assert _Owner.static() == "original"
    assert isinstance(vars(_Owner)["static"], staticmethod)


def test_it_is_put_back_after_an_error() -> None:
    owner = SimpleNamespace(value=1)
    with pytest.raises(KeyError), replaced(owner, value=2):
        raise KeyError
    assert owner.value == 1


def test_what_somebody_else_put_there_since_stays() -> None:
    owner = SimpleNamespace(value=1)
    undo = replace(owner, value=2)
    owner.value = 3
    undo()
    assert owner.value == 3


def test_what_is_not_there_is_not_replaced() -> None:
    with pytest.raises(KeyError):
        replace(_Owner, absent=1)


def test_a_script_gets_torchs_own_functions_back() -> None:
    def functions() -> tuple[object, ...]:
        scaler = torch.amp.GradScaler
        clips = (nn.utils.clip_grad_norm_, nn.utils.clip_grad.clip_grad_value_)
        return (*clips, scaler._unscale_grads_)

    before = functions()
    ddp_script.follow_script()
    ddp_script.follow_script()
    assert all(function is not original for function, original in zip(functions(), before, strict=True))
    ddp_script.unfollow_script()
    assert functions() == before
