"""State that another library keeps beside the weights, written into checkpoints as JSON."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from strategies.errors import CannotRun
from strategies.integrations.json_state import from_json, to_json


@pytest.mark.parametrize(
    "value",
    [
        None,
        [True, 1, 1.5, "text", float("inf")],
        ("a", (1, [2])),
        {"a": {"b": [{}]}},
        {1: "one", (2, 3): "two"},
        {"__tuple__": [1]},
        Path("some/where"),
    ],
)
def test_comes_back_as_it_was(value: Any) -> None:
    back = from_json(json.loads(json.dumps(to_json(value))))
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(6).reshape(2, 3).t(),
        torch.tensor(0.25, dtype=torch.bfloat16),
        torch.empty(0, 4),
        torch.tensor([True, False]),
    ],
)
def test_tensors_keep_dtype_shape_and_values(tensor: torch.Tensor) -> None:
    back = from_json(json.loads(json.dumps(to_json({"it": tensor}))))["it"]
    assert (back.dtype, back.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(back, tensor)


def test_numbers_of_numpy_and_ordered_dicts_become_plain() -> None:
    assert to_json(OrderedDict(a=np.float32(0.5), b=np.int64(3), c=np.bool_(True))) == {"a": 0.5, "b": 3, "c": True}


def test_what_is_no_json_is_named_by_its_place() -> None:
    with pytest.raises(CannotRun, match=r"^checkpoint: state\.callbacks\.mine\[1\] is a Linear; keep numbers"):
        to_json({"callbacks": {"mine": [1, torch.nn.Linear(1, 1)]}})
