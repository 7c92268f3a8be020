"""What a product of matrices wastes because a GPU computes it in whole tiles, as many at a time as it has cores."""

from __future__ import annotations

from typing import NamedTuple

from hardware_db.device import Device
from planner.timing.stacks import USUAL_MATMULS, Stack

TILE_ROWS, TILE_COLUMNS = 128, 256
"""A tile of cuBLAS for large half-precision products; of three sizes the one that orders the published plans best."""

TILED = frozenset({"volta", "turing", "ampere", "ada", "hopper"})
"""Architectures whose rows this helps. Kernels measured on a B200 come out worse with it."""


class Waste(NamedTuple):
    """Work done over work asked for, 1 where nothing is wasted."""

    forward: float = 1.0
    backward: float = 1.0


NO_WASTE = Waste()


def multiprocessors(device: Device) -> int:
    """Cores that compute a tile each; 0 where products are not known to run in tiles."""
    return device.sm_count or 0 if device.architecture in TILED else 0


def waste_of(rows: float, columns: float, cores: int) -> float:
    """Tiles computed over tiles asked for: the last wave of tiles takes as long as a full one."""
    tiles = -(-rows // TILE_ROWS) * -(-columns // TILE_COLUMNS)
    return -(-tiles // cores) * cores * TILE_ROWS * TILE_COLUMNS / (rows * columns)


def block_waste(stack: Stack, tokens: int, tp: int, cores: int) -> Waste:
    """The mean over a dense block's products, by their operations.

    Queries, keys and values are taken as one product, gate and up projection too. The backward has two products each:
    for the input, tokens x inputs, and for the weight, outputs x inputs.
    """
    if not cores or not stack.norms or stack.matmuls.kernels > USUAL_MATMULS:
        return NO_WASTE
    hidden, width, attention = stack.hidden, stack.mlp_width / tp, stack.attention_width / tp
    projected = attention + 2 * stack.key_value_width / tp
    products = [(projected, hidden), (hidden, attention), (hidden, width)]
    products.append((2 * width if stack.gated else width, hidden))
    forward = backward = total = 0.0
    for outputs, inputs in products:
        work = outputs * inputs
        if work:
            total += work
            forward += work * waste_of(tokens, outputs, cores)
            backward += work * (waste_of(tokens, inputs, cores) + waste_of(outputs, inputs, cores))
    return Waste(forward=forward / total, backward=backward / total / 2)
