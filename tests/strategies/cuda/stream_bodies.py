"""Work over several streams, done with dsplan's own code or with that code less one statement."""

from __future__ import annotations

import importlib
import inspect
import textwrap
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch

Names = Mapping[str, Any]
_ELEMENTS = 1 << 18


def names_without(module_name: str, statement: str) -> Names:
    """A module's names, with one statement of its source left out ("" leaves it whole).

    Raises:
        ValueError: the source does not have the statement once.
    """
    module = importlib.import_module(module_name)
    if not statement:
        return vars(module)
    lines = inspect.getsource(module).splitlines()
    places = [number for number, line in enumerate(lines) if line.strip().startswith(statement)]
    if len(places) != 1:
        raise ValueError(f"{module_name} has {statement!r} {len(places)} times")
    line = lines[places[0]]
    lines[places[0]] = line[: len(line) - len(line.lstrip())] + "pass"
    names = dict(vars(module))
    exec(compile(textwrap.dedent("\n".join(lines)), module_name, "exec"), names)
    return names


def outcome(story: str, module_name: str, statement: str) -> tuple[str, bool]:
    """Return how a story ends without the statement: an error's text, and whether the numbers are right."""
    functions: dict[str, Callable[[Names], bool]] = {f.__name__: f for f in (down, up, beside, parked, compressed)}
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    try:
        return "", functions[story](names_without(module_name, statement))
    except RuntimeError as error:
        return str(error), False
    finally:
        torch.cuda.synchronize()


def _values(start: int) -> torch.Tensor:
    return torch.arange(start, start + _ELEMENTS, dtype=torch.float32, device="cuda")


def down(names: Names) -> bool:
    """Gradients go to the host while the device uses their memory for something else."""
    copies = names["copies_of"](torch.device("cuda", 0), pins=True)
    source = _values(1)
    host = copies.room(_ELEMENTS, torch.float32)
    host.zero_()
    arrival = copies.down(source, host)
    del source
    other = torch.full((_ELEMENTS,), 7.0, device="cuda")
    arrival.wait()
    right = bool((host == torch.arange(1, 1 + _ELEMENTS)).all())
    return right and bool((other == 7.0).all().item())


def up(names: Names) -> bool:
    """Weights come from the host into memory that the device has just used, and are used there."""
    copies = names["copies_of"](torch.device("cuda", 0), pins=True)
    host = copies.room(_ELEMENTS, torch.float32)
    host.copy_(torch.arange(5, 5 + _ELEMENTS))
    target = _values(1)
    used = target * 2
    arrival = copies.up(host, target)
    arrival.wait()
    return bool((target + 1 == _values(6)).all().item()) and bool((used == 2 * _values(1)).all().item())


def beside(names: Names) -> bool:
    """The device computes on the stream of copies with what it computed on the usual one, and the other way."""
    copies = names["copies_of"](torch.device("cuda", 0), pins=True)
    before = _values(3)
    with copies.aside() as arrival:
        after = before + 1
    arrival.wait()
    return bool((after * 2 == 2 * _values(4)).all().item())


def parked(names: Names) -> bool:
    """Activations wait for backward in host memory."""
    weight = _values(1).requires_grad_()
    with names["Parking"]():
        first = (weight * 2).sin()
        second = first.exp()
        # The memory of what was parked is used again at once.
        loss = (second * second).sum()
        del first, second
        others = [torch.full((_ELEMENTS,), 3.0, device="cuda") for _ in range(3)]
    loss.backward()
    expected = _values(1).requires_grad_()
    whole = (expected * 2).sin().exp()
    (whole * whole).sum().backward()
    assert weight.grad is not None
    assert expected.grad is not None
    return bool(torch.equal(weight.grad, expected.grad)) and all(bool((o == 3.0).all().item()) for o in others)


def compressed(names: Names) -> bool:
    """A bucket's mean is made of gradients that backward has just computed."""
    from strategies.backends.zero.collectives import SingleRank
    from strategies.modules.compression import Codec

    device = torch.device("cuda", 0)
    ranks: Any = SimpleNamespace(world_size=1, rank=0)
    mean = names["EightBitMean"](SingleRank(ranks), Codec(), lambda: 1.0, device)
    gradients = _values(1)
    bucket = SimpleNamespace(buffer=lambda: gradients, index=lambda: 0, parameters=list)
    result = mean.begin(bucket).wait()
    return bool(((result - _values(1)).abs() <= _values(1) * 0.05 + 2000).all().item())
