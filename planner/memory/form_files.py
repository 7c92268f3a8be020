"""Form files: where the memory forms of all architectures are kept, one JSON file per model type.

A file lists structures, each with its forms by variant (`cuda autocast sdpa`). `scripts/build_memory_forms.py` writes
them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from planner.memory.form import BlockForm, Form, Moment
from planner.memory.polynomial import ZERO, Polynomial
from planner.memory.structure import difference

TYPICAL = {"encoder": "bert", "encoder-decoder": "bart", "speech-encoder-decoder": "whisper", "vision": "vit"}
TYPICAL |= {"vision-text": "clip"}
FORMS = Path(__file__).parent / "forms"


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A form, and in how many fields the structure it was derived from differs from the model's."""

    form: Form
    differences: int


def find_form(structure: Mapping[str, str], variants: Sequence[str]) -> Found | None:
    """The form of the structure nearest to this one, in the first of the variants that its model type has; a type that
    was never traced in any takes that of a typical model of its kind. None where that has none either."""
    for model_type in (structure["model_type"], TYPICAL.get(structure["kind"], "llama")):
        for variant in variants:
            entries = [entry for entry in _file(model_type) if variant in entry["forms"]]
            if entries:
                distances = [difference(dict(structure), entry["structure"]) for entry in entries]
                place = distances.index(min(distances))
                return Found(form=_form(entries[place]["forms"][variant]), differences=distances[place])
    return None


@functools.cache
def _file(model_type: str) -> Sequence[Mapping[str, Any]]:
    path = FORMS / f"{model_type}.json"
    if not path.is_file():
        return ()
    structures: Sequence[Mapping[str, Any]] = json.loads(path.read_text())["structures"]
    return structures


def form_to_dict(form: Form) -> dict[str, Any]:
    """The form as JSON keeps it."""
    return {
        "blocks": {name: _block_to_dict(block) for name, block in form.blocks.items()},
        "buffers": _numbers(form.buffers),
        "before": _moment_to_list(form.before),
        **{name: [_moment_to_list(moment) for moment in getattr(form, name)] for name in _ENDS},
    }


_ENDS = ("loss", "loss_backward", "table_backward")
_KEPT = ("kept", "cast", "buffers", "boundary", "products", "unused", "input", "once", "handed", "again", "waiting")
_PASSES = ("forward", "backward", "recomputed", "replayed")


def _block_to_dict(block: BlockForm) -> dict[str, Any]:
    moments = {name: [_moment_to_list(moment) for moment in getattr(block, name)] for name in _PASSES}
    kept = {name: _numbers(getattr(block, name)) for name in _KEPT}
    return {**{name: numbers for name, numbers in kept.items() if numbers}, **moments}


def _moment_to_list(moment: Moment) -> list[dict[str, float]]:
    return [_numbers(moment.activations), _numbers(moment.cast), _numbers(moment.gradients)]


def _numbers(polynomial: Polynomial) -> dict[str, float]:
    return {term: int(number) if number == int(number) else number for term, number in polynomial.items()}


def _form(written: Mapping[str, Any]) -> Form:
    return Form(
        blocks={name: _block(block) for name, block in written["blocks"].items()},
        buffers=written["buffers"],
        before=_moment(written["before"]),
        **{name: tuple(_moment(moment) for moment in written[name]) for name in _ENDS},
    )


def _block(written: Mapping[str, Any]) -> BlockForm:
    values: dict[str, Any] = {name: written.get(name, ZERO) for name in _KEPT}
    values |= {name: tuple(_moment(moment) for moment in written[name]) for name in _PASSES}
    return BlockForm(**values)


def _moment(written: Sequence[Polynomial]) -> Moment:
    activations, cast, gradients = written
    return Moment(activations=activations, cast=cast, gradients=gradients)
