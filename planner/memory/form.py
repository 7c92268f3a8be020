"""Form: the activations of an architecture, closed: polynomials in the dimensions of model and batch.

Forms are derived from traces of the real modules (`planner.trace.derive`) and kept in `forms/`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from planner.memory.polynomial import Polynomial


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """What is alive at one moment beside weights, inputs and what was there before the part that is running.

    `activations` in bytes; `cast`: bytes of autocast's copies of weights; `gradients`: elements of weights whose
    gradient this part has made.
    """

    activations: Polynomial
    cast: Polynomial
    gradients: Polynomial


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockForm:
    """One kind of block. All but the gradients of its moments in bytes.

    `kept` until its backward; `cast` copies of its weights that live as long; `buffers` of the module; `boundary`: its
    output, which is all that full checkpointing keeps; `products`: outputs of matrix products and attention, which
    selective checkpointing keeps as well, `unused` those of them that come after all that backward needs; `input`: what
    the block was given, where nothing but checkpointing keeps it. `once`: what the first block of the kind, and what
    lies between it and an earlier stack, keep beyond what the others do, such as T5's position bias, which all blocks
    are handed; `handed`: as much of it as is kept under checkpointing too; `again`: what the first block makes besides
    when it is run again; `waiting`: gradients of what is handed on, which are added up until the first block's
    backward.

    The moments that can be a peak: `forward` and `backward` over what was alive before the block, the latter with what
    the block itself kept; `recomputed` where the block runs again up to the last tensor that backward needs, `replayed`
    the same beside the products that are still to be used.
    """

    kept: Polynomial
    cast: Polynomial
    buffers: Polynomial
    boundary: Polynomial
    products: Polynomial
    unused: Polynomial
    input: Polynomial
    once: Polynomial = field(default_factory=dict)
    handed: Polynomial = field(default_factory=dict)
    again: Polynomial = field(default_factory=dict)
    waiting: Polynomial = field(default_factory=dict)
    forward: tuple[Moment, ...]
    backward: tuple[Moment, ...]
    recomputed: tuple[Moment, ...]
    replayed: tuple[Moment, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """One architecture in one precision and with one kind of attention. `buffers`: bytes of those outside the blocks.

    `blocks` by the names that `planner.memory.kinds` gives them; `before` is what the part in front of the blocks
    keeps, `loss` and `loss_backward` are moments of head and loss over what all blocks keep, `table_backward` those
    after the first block's backward, over `before`.
    """

    blocks: Mapping[str, BlockForm]
    buffers: Polynomial
    before: Moment
    loss: tuple[Moment, ...]
    loss_backward: tuple[Moment, ...]
    table_backward: tuple[Moment, ...]
