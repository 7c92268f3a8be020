"""Units: the modules of a block whose layers are split together, by styles or by the rule for models without a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import nn

from strategies.parallel.blocks import Elsewhere
from strategies.parallel.expert import is_mixture
from strategies.parallel.layers import SharedLayer
from strategies.parallel.styles import ROWS, Variant, can_share, has_heads, is_columns, is_linear, widths

Styles = dict[str, str]
"""Styles by the names of modules and parameters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Choice of splitting one unit of a block."""

    unit: str
    """The name of the module in the block that it is, "" for the block itself."""
    styles: Styles
    """By names in the unit."""
    variant: Variant


def around_mixtures(block: nn.Module) -> list[str]:
    """Name the modules of a block that routed experts lie in."""
    return [
        name
        for name, child in block.named_modules()
        if name and any(is_mixture(module) for module in child.modules() if module is not child)
    ]


def _unit_with(name: str, block: nn.Module, around: Sequence[str]) -> str:
    """Return the child of a block that a layer is split with, or what lies beside a mixture in it; "" for the block."""
    unit, _, rest = name.partition(".")
    while unit in around and rest:
        first, _, rest = rest.partition(".")
        unit = f"{unit}.{first}"
    try:
        is_own = not rest or is_linear(block.get_submodule(unit))
    except AttributeError:
        is_own = True
    return "" if is_own else unit


def units_of(block: nn.Module, styles: Styles, around: Sequence[str]) -> list[tuple[str, list[Styles]]]:
    """Return a block's units, each with the styles that it may have, the best first; without `styles` by the rule."""
    if not styles:
        return _find_units(block, around)
    units: dict[str, Styles] = {}
    for name, style in styles.items():
        unit = _unit_with(name, block, around)
        units.setdefault(unit, {})[name.removeprefix(f"{unit}.") if unit else name] = style
    return [(unit, [inside]) for unit, inside in units.items()]


def _find_units(block: nn.Module, around: Sequence[str]) -> list[tuple[str, list[Styles]]]:
    """Find linear layers that belong together by order and widths: query, key, value, output; gate, up, down."""
    layers = [(name, *widths(module)) for name, module in block.named_modules() if is_linear(module)]
    pairs: list[tuple[str, list[Styles]]] = []
    index = 0
    while index < len(layers):
        count, patterns = next(_patterns(layers[index:]), (1, []))
        if patterns:
            names = [name for name, _, _ in layers[index : index + count]]
            units = {_unit_with(name, block, around) for name in names}
            unit = units.pop() if len(units) == 1 else ""
            short = [name.removeprefix(f"{unit}." if unit else "") for name in names]
            pairs.append((unit, [dict(zip(short, styles, strict=True)) for styles in patterns]))
        index += count
    return pairs


def _patterns(layers: Sequence[tuple[str, int, int]]) -> Iterator[tuple[int, list[tuple[str, ...]]]]:
    """Yield how many of the next layers lie between two sums over ranks, and the styles that they may have."""
    width = layers[0][1]
    ins, outs = [layer[1] for layer in layers[:4]], [layer[2] for layer in layers[:4]]
    pair = ("colwise", "rowwise")
    if len(ins) == 4 and ins[:3] == [width] * 3 and outs[1] == outs[2] <= outs[0] == ins[3] and outs[3] == width:
        yield 4, [("colwise", "colwise", "colwise", "rowwise")]
    if len(ins) >= 3 and outs[0] == outs[1] == ins[2] and ins[:2] == [width] * 2 and outs[2] == width:
        yield 3, [("colwise", "colwise", "rowwise")]
    if len(ins) >= 3 and ins[0] == ins[2] == width == outs[1] and outs[0] == outs[2] == ins[1] != width:
        yield 3, [("colwise", "rowwise", "colwise")]
    if len(ins) >= 2 and ins[0] == width == outs[1]:
        inner, fused = ins[1], outs[0]
        if fused == inner:
            yield 2, [pair]
        elif fused == 3 * inner:
            yield 2, [("packed:3", "rowwise"), pair]
        elif fused == 2 * inner:
            keys = inner // 2
            yield 2, [("packed:2", "rowwise"), (f"packed:{inner},{keys},{keys}", "rowwise"), pair]
        elif fused > inner and (fused - inner) % 2 == 0:
            keys = (fused - inner) // 2
            yield 2, [(f"packed:{inner},{keys},{keys}", "rowwise"), pair]


def variants_of(unit: nn.Module, styles: Styles, *, sequence: bool, is_block: bool) -> list[Variant]:
    """Return the variants of a unit's split that are worth a trial, the fastest first."""
    columns = [style for style in styles.values() if is_columns(style)]
    shares = [False] if is_block or not can_share(unit, styles) else [True, False]
    if not sequence and len(columns) < 2:
        shares = [False]
    adapts = range(3) if any(has_heads(module) for module in unit.modules()) else range(1)
    adapts = range(-1, adapts.stop) if is_block else adapts  # an MLP beside the attention whose heads the block has
    variants = [Variant(shares_input=share, adapts=how) for how in adapts for share in shares]
    is_plain = columns and all(is_columns(style) or style in ROWS for style in styles.values())
    return [*variants, Variant(shares_input=False, gathers=True)] if is_plain else variants


def whole_units(block: nn.Module, choices: Sequence[Choice]) -> list[str]:
    """Name the children of a block with layers that are not split: they need the whole sequence."""
    split = {choice.unit or name.partition(".")[0] for choice in choices for name in choice.styles}
    return [
        name
        for name, child in block.named_children()
        if name not in split
        and any(is_linear(m) or has_heads(m) or isinstance(m, SharedLayer) for m in child.modules())
    ]


def signature_of(block: nn.Module, styles: Styles) -> Any:
    """Return a key that blocks share which can be split alike."""
    return type(block), frozenset(styles.items()), tuple((n, p.shape) for n, p in block.named_parameters())


def styles_below(styles: Styles, prefix: str) -> Styles:
    """Return the styles of what lies in a module, by names in it."""
    start = f"{prefix}."
    return {name.removeprefix(start): style for name, style in styles.items() if name.startswith(start)}


def stacks_of(inner: nn.Module, blocks: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Sort blocks that follow each other by their list, and by their pipeline stage: another rank's lie between two."""
    members = {id(block) for block in blocks}
    stacks: list[list[nn.Module]] = []
    for module in inner.modules():
        for away, run in groupby(module.children(), key=lambda child: isinstance(child, Elsewhere)):
            stacks.append([] if away else [child for child in run if id(child) in members])
    return [stack for stack in stacks if stack]
