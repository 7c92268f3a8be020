"""The passes of torch's pipeline schedules, whichever way torch enumerates them."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules

from strategies.torch_compat.autograd import pass_of


class _Numbered(Enum):
    """As torch 2.6 to 2.9 have it."""

    FORWARD = 1

    def __str__(self) -> str:
        return "F"


class _Lettered(Enum):
    """As torch 2.13 has it."""

    FORWARD = "F"


@pytest.mark.parametrize("kind", [_Numbered.FORWARD, _Lettered.FORWARD])
def test_a_pass_has_its_letter(kind: Enum) -> None:
    assert pass_of(SimpleNamespace(computation_type=kind)) == "F"


def test_the_installed_torch_has_letters_for_all_passes() -> None:
    kinds = vars(schedules)["_ComputationType"]
    passes = {pass_of(SimpleNamespace(computation_type=kind)) for kind in kinds}
    assert {"F", "B", "I", "W"} <= passes
