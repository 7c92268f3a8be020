"""Styles of tensor parallelism, which change a module in place under the names that it has."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from strategies.errors import CannotRun
from strategies.parallel.layers import Columns, Rows, VocabularyRows, split_in_place, split_pieces, split_vocabulary
from strategies.parallel.ranks import (
    SEQUENCE,
    TensorRanks,
    copy_to_ranks,
    gather_from_ranks,
    split_between_ranks,
    sum_over_ranks,
)
from strategies.parallel.split import Split
from strategies.torch_compat.dispatch import FakeTensor

COLUMNS = ("colwise", "colwise_rep", "colwise_gather_output", "packed_colwise")
ROWS = ("rowwise", "rowwise_rep", "rowwise_split_input", "packed_rowwise")
TABLES = ("embedding_rowwise", "embedding_colwise", "vocabulary")
WHOLE = ("replicate", "sequence", "sequence_parallel", "local_params", "local")
OTHERS = ("replicated_with_grad_allreduce", "moe_tp_experts", "moe_identity_expert", "mla_kv_a_proj", "all_reduce")


def is_columns(style: str) -> bool:
    """Return whether a style splits the outputs of a linear layer."""
    return style in COLUMNS or style.startswith("packed:")


def is_style(style: str) -> bool:
    """Return whether a style is one of transformers' (`transformers.distributed.tensor_parallel`) or of ours.

    `packed:3` are three products of one width, `packed:8,4,4` three of such widths.
    """
    return style in (*COLUMNS, *ROWS, *TABLES, *WHOLE, *OTHERS) or bool(re.fullmatch(r"packed:\d+(,\d+)*", style))


@dataclass(kw_only=True, slots=True)
class Change:
    """An attribute of a module that has another value where ranks share the module."""

    module: nn.Module
    name: str
    whole: object
    part: object


@dataclass(kw_only=True, slots=True)
class Applied:
    """Result of styles for a module; names are relative to it."""

    splits: dict[str, Split] = field(default_factory=dict)
    summed: set[str] = field(default_factory=set)
    """Parameters that each rank has whole, and a part of whose gradient."""
    complete: set[str] = field(default_factory=set)
    """Parameters that each rank has whole, and whose whole gradient, though the sequence is split around them."""
    changes: list[Change] = field(default_factory=list)

    def add(self, prefix: str, other: Applied) -> None:
        """Take over what was made of a part of the module."""
        start = f"{prefix}." if prefix else ""
        self.splits.update((start + name, split) for name, split in other.splits.items())
        self.summed.update(start + name for name in other.summed)
        self.complete.update(start + name for name in other.complete)
        self.changes += other.changes


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One of several ways to split a unit, which is what lies together between two sums over ranks."""

    shares_input: bool
    """Whether the unit, not each of its column layers, takes the sum of the gradients of its input."""
    adapts: int = 0
    """Which attributes follow the heads: -1 none, where layers are no attention's, 0 groups of query heads alone, 1
    numbers of heads too, 2 widths too."""
    gathers: bool = False
    """Whether all outputs of column layers are gathered, because what lies between needs them."""


class NotSplit(CannotRun):
    """A unit whose widths or heads do not divide over the ranks in one way to split it."""


# A unit: attention, or an MLP.


def split_unit(
    unit: nn.Module,
    styles: Mapping[str, str],
    randomness: Randomness,
    variant: Variant,
    *,
    sequence: bool,
    is_block: bool,
) -> Applied:
    """Split what lies in a unit; `sequence`: its inputs and outputs are parts of the sequence.

    Raises:
        NotSplit: a width or a number of heads does not divide so.
        CannotRun: a module is of a kind that has no such style.
    """
    applied, ranks = Applied(), randomness.ranks
    heads = _heads_of(unit, styles) if variant.adapts >= 0 else _Heads()
    direct = sequence and is_block  # no unit's edge: each layer gathers its input and scatters its output
    for name, style in styles.items():
        module_name, parameter = _locate(unit, name)
        module = unit.get_submodule(module_name)
        if parameter:
            split = _parameter(module, parameter, style, ranks)
        elif isinstance(module, (Columns, Rows, VocabularyRows)):
            continue
        else:
            split = _module(module, style, ranks, heads, variant, sequence=sequence, direct=direct)
        applied.add(module_name, split)
    applied.changes += _split_adapters(unit, heads, ranks, variant.adapts) if not variant.gathers else []
    if not is_block:
        if sequence:
            mode = "shared" if variant.shares_input else "own"
            unit.register_forward_pre_hook(unit_input(ranks, mode), with_kwargs=True)
            if mode == "own":  # every rank has computed the whole sequence
                unit.register_forward_hook(_on_output(partial(split_between_ranks, ranks=ranks, dim=SEQUENCE)))
                draw_own(unit, randomness, is_own=False)
                inside = {name for name, _ in unit.named_parameters()}
                applied.complete |= inside - applied.summed - applied.splits.keys()
        elif variant.shares_input:
            unit.register_forward_pre_hook(unit_input(ranks, "copied"), with_kwargs=True)
    if not variant.gathers:
        modules = [(styles[name], unit.get_submodule(name)) for name in styles if not _locate(unit, name)[1]]
        columns = [module for style, module in modules if is_columns(style)]
        _draw_own_between(unit, columns, [module for style, module in modules if style in ROWS], randomness)
    return applied


def can_share(unit: nn.Module, styles: Mapping[str, str]) -> bool:
    """Return whether everything in a unit is split, so that one sum serves the gradients of its input."""
    sharing = ("colwise", "packed_colwise", "rowwise", "replicated_with_grad_allreduce")
    if any(style not in sharing and not style.startswith("packed:") for style in styles.values()):
        return False
    covered = {id(p) for name in styles for p in _parameters_below(unit, name)}
    return all(id(parameter) in covered for parameter in unit.parameters())


def _parameters_below(unit: nn.Module, name: str) -> list[nn.Parameter]:
    module_name, parameter = _locate(unit, name)
    module = unit.get_submodule(module_name)
    return [getattr(module, parameter)] if parameter else list(module.parameters())


def _locate(unit: nn.Module, name: str) -> tuple[str, str]:
    """Return module and parameter ("" for none) of a name in a plan."""
    try:
        unit.get_submodule(name)
    except AttributeError:
        module, _, parameter = name.rpartition(".")
        return module, parameter
    return name, ""


def _module(
    module: nn.Module,
    style: str,
    ranks: TensorRanks,
    heads: _Heads,
    variant: Variant,
    *,
    sequence: bool,
    direct: bool,
) -> Applied:
    if style in WHOLE:
        return Applied()
    if style == "replicated_with_grad_allreduce":
        return Applied(summed={name for name, _ in module.named_parameters()})
    if style in TABLES or isinstance(module, nn.Embedding):
        return Applied(splits=make_vocabulary(module, ranks))
    if style == "moe_tp_experts":
        module.register_forward_pre_hook(_experts_input(ranks), with_kwargs=True)
    if style in ("moe_tp_experts", "all_reduce"):
        module.register_forward_hook(_on_output(partial(sum_over_ranks, ranks=ranks)))
        return Applied()
    if style == "moe_identity_expert":
        module.register_forward_pre_hook(_divided_input(ranks))
        return Applied()
    if style == "mla_kv_a_proj":
        module.register_forward_hook(_rotary_copy(ranks, heads.rotary))
        return Applied()
    if hasattr(module, "base_layer"):
        return _adapted_linear(module, style, ranks, heads, variant, sequence=sequence, direct=direct)
    if style in ROWS:
        splits_sequence = direct or (sequence and variant.shares_input)
        if style == "packed_rowwise":
            raise CannotRun(f"style {style!r} is for a parameter, and {type(module).__name__} is a module")
        splits_input = variant.gathers or style != "rowwise"
        return make_rows(module, ranks, splits_input=splits_input, splits_sequence=splits_sequence)
    return make_columns(
        module,
        ranks,
        _pieces_of(module, style, ranks, heads, gathers=variant.gathers),
        gathers=variant.gathers or style in ("colwise_rep", "colwise_gather_output"),
        copies_input=not variant.shares_input,
        gathers_sequence=direct,
    )


def _adapted_linear(
    module: Any, style: str, ranks: TensorRanks, heads: _Heads, variant: Variant, **where: bool
) -> Applied:
    """Split PEFT's LoRA around a linear layer: a column layer's B has some outputs, a row layer's A some inputs."""
    if getattr(module, "lora_magnitude_vector", None) or not hasattr(module, "lora_A"):
        raise CannotRun(
            f"tensor parallelism splits LoRA's adapters and no other kind, and {type(module).__name__} is another; use"
            " tp 1"
        )
    applied = Applied()
    alone = Variant(shares_input=variant.shares_input and style in ROWS, gathers=variant.gathers)
    inner = [("base_layer", module.base_layer)]
    side = "lora_A" if style in ROWS else "lora_B"
    inner += [(f"{side}.{name}", adapter) for name, adapter in getattr(module, side).items()]
    for name, layer in inner:
        applied.add(name, _module(layer, style, ranks, heads, alone, **where))
    return applied


def _parameter(module: nn.Module, name: str, style: str, ranks: TensorRanks) -> Applied:
    """Split a parameter of its own, such as all experts' weights [experts, out, in]."""
    parameter = getattr(module, name)
    if style in WHOLE or (style in ROWS and parameter.dim() == 1):
        return Applied()
    if style == OTHERS[0]:
        return Applied(summed={name})
    dim = parameter.dim() - 1 if style in ROWS else max(parameter.dim() - 2, 0)
    fused = 2 if style.startswith("packed_") and parameter.dim() > 1 else 1
    length = parameter.shape[dim]
    sizes = _sizes(style, length) or (length // fused,) * fused
    return Applied(splits=split_in_place(module, {name: dim}, _divided(sizes, ranks, name)))


def _sizes(style: str, length: int) -> tuple[int, ...]:
    """Widths of the fused products of `packed:...`."""
    if not style.startswith("packed:"):
        return ()
    numbers = tuple(int(number) for number in style.removeprefix("packed:").split(","))
    pieces = (length // numbers[0],) * numbers[0] if len(numbers) == 1 else numbers
    if sum(pieces) != length:
        raise CannotRun(f"style {style!r} is for a weight of other widths than {length}")
    return pieces


def _divided(sizes: tuple[int, ...], ranks: TensorRanks, what: str) -> tuple[tuple[int, int], ...]:
    try:
        return split_pieces(sizes, ranks, what)
    except CannotRun as problem:
        raise NotSplit(str(problem)) from None


# Linear layers and tables.


_DERIVED: dict[tuple[type, type], type] = {}


def derived(kind: type, base: type) -> type:
    """Return a module's own class with the forward pass of `kind`: what asks for the module's class still finds it."""
    if (kind, base) not in _DERIVED:
        _DERIVED[kind, base] = type(f"{kind.__name__}Of{base.__name__}", (kind, base), {})
    return _DERIVED[kind, base]


def _require_plain(module: nn.Module, kind: str) -> None:
    forward = type(module).forward
    if forward is not nn.Linear.forward and not _is_transposed(module):
        raise CannotRun(
            f"tensor parallelism cannot split {type(module).__name__} by {kind}: it is no plain linear layer; use tp 1,"
            " or leave it out of tp_plan"
        )
    if not getattr(module, "weight", torch.empty(0)).is_floating_point():
        raise CannotRun(f"tensor parallelism cannot split the quantized weight of {type(module).__name__}; use tp 1")


def _is_transposed(module: nn.Module) -> bool:
    """Return whether it is transformers' Conv1D, whose weight is [in, out]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def is_linear(module: nn.Module) -> bool:
    """Return whether a module is a plain linear layer, which a style can split."""
    return type(module).forward is nn.Linear.forward or _is_transposed(module)


def widths(module: Any) -> tuple[int, int]:
    """Return inputs and outputs of a linear layer as it is."""
    first, second = module.weight.shape
    return (first, second) if _is_transposed(module) else (second, first)


def make_columns(
    module: Any,
    ranks: TensorRanks,
    pieces: tuple[tuple[tuple[int, int], ...], int],
    *,
    gathers: bool = False,
    copies_input: bool = True,
    gathers_sequence: bool = False,
) -> Applied:
    """Make a linear layer a column layer."""
    as_columns(
        module,
        ranks,
        gathered_length=widths(module)[1] if gathers else 0,
        copies_input=copies_input,
        gathers_sequence=gathers_sequence,
    )
    ranges, copies = pieces
    dims = {"weight": 1 if module.is_transposed else 0, "bias": 0}
    return Applied(splits=split_in_place(module, dims, ranges, copies=copies))


def as_columns(
    module: Any, ranks: TensorRanks, *, gathered_length: int, copies_input: bool = True, gathers_sequence: bool = False
) -> None:
    """Let a linear layer compute as a column layer; its weight is split by the caller."""
    _require_plain(module, "columns")
    transposed = _is_transposed(module)
    kind: Any = derived(Columns, type(module))
    module.__class__ = kind
    module.ranks, module.is_transposed, module.gathered_length = ranks, transposed, gathered_length
    module.copies_input, module.gathers_sequence = copies_input, gathers_sequence


def make_rows(module: Any, ranks: TensorRanks, *, splits_input: bool, splits_sequence: bool) -> Applied:
    """Make a linear layer a row layer."""
    _require_plain(module, "rows")
    transposed, inputs = _is_transposed(module), widths(module)[0]
    ranges = (ranks.share(inputs),) if splits_input else _divided((inputs,), ranks, type(module).__name__)
    kind: Any = derived(Rows, type(module))
    module.__class__ = kind
    module.ranks, module.is_transposed = ranks, transposed
    module.splits_input, module.splits_sequence = splits_input, splits_sequence
    return Applied(splits=split_in_place(module, {"weight": 0 if transposed else 1}, ranges))


def make_vocabulary(module: nn.Module, ranks: TensorRanks) -> dict[str, Split]:
    """Make an embedding one of this rank's rows."""
    if not isinstance(module, nn.Embedding) or module.sparse or module.max_norm is not None:
        raise CannotRun(
            f"tensor parallelism cannot split {type(module).__name__}: it is no plain embedding; leave it out of"
            " tp_plan"
        )
    kind: Any = derived(VocabularyRows, type(module))
    module.__class__ = kind
    table: Any = module
    table.ranks = ranks
    return split_vocabulary(table)


# Heads.


@dataclass(frozen=True, kw_only=True, slots=True)
class _Heads:
    width: int = 0
    """Of one head; 0 where the unit has none."""
    queries: int = 0
    keys: int = 0
    rotary: int = 0
    """Width of the rotary part of DeepSeek's shared key."""


_COUNTS = re.compile(
    r"(n|num|number_of)?_?(attention|kv|key_value|local|local_kv|q|query)?_?(n_?)?(heads?|kv_heads|key_value_heads)|nhead"
)
_GROUPS = ("num_key_value_groups", "n_rep", "num_kv_groups", "kv_groups")
_WIDTHS = ("split_size", "all_head_size", "inner_dim", "embed_dim", "hidden_size", "hidden_dim", "d_model", "n_embd")


def _counts(module: nn.Module) -> dict[str, int]:
    """Return a module's own numbers of heads, by attribute."""
    numbers = {name: value for name, value in module.__dict__.items() if type(value) is int}
    return {name: value for name, value in numbers.items() if _COUNTS.fullmatch(name)}


def has_heads(module: nn.Module) -> bool:
    """Return whether a module says how many heads it has, or how wide they are."""
    return "head_dim" in module.__dict__ or bool(_counts(module))


def _owner(unit: nn.Module) -> nn.Module:
    return next((module for module in unit.modules() if has_heads(module)), unit)


def _heads_of(unit: nn.Module, styles: Mapping[str, str]) -> _Heads:
    owner: Any = _owner(unit)
    config = getattr(owner, "config", None)
    rotary = getattr(owner, "qk_rope_head_dim", None) or getattr(config, "qk_rope_head_dim", 0)
    if not has_heads(owner):
        return _Heads(rotary=rotary or 0)
    outputs: list[int] = []
    for name, style in styles.items():
        module_name, parameter = _locate(unit, name)
        module: Any = unit.get_submodule(module_name)
        module = getattr(module, "base_layer", module)
        if not parameter and is_linear(module) and is_columns(style):
            outputs += _sizes(style, widths(module)[1]) or [widths(module)[1]]
    counts = list(_counts(owner).values())
    if not outputs:
        return _Heads(rotary=rotary or 0)
    width = getattr(owner, "head_dim", 0) if not rotary else 0
    if not width and counts and max(outputs) % max(counts) == 0:
        width = max(outputs) // max(counts)
    if not width or any(output % width for output in outputs):
        return _Heads(rotary=rotary or 0)
    return _Heads(width=width, queries=max(outputs) // width, keys=min(outputs) // width, rotary=rotary or 0)


def _pieces_of(
    module: Any, style: str, ranks: TensorRanks, heads: _Heads, *, gathers: bool
) -> tuple[tuple[tuple[int, int], ...], int]:
    """Return the rank's outputs of a column layer, and on how many ranks they are."""
    outputs, name = widths(module)[1], type(module).__name__
    if gathers or style in ("colwise_rep", "colwise_gather_output"):
        return (ranks.share(outputs),), 1
    if sizes := _sizes(style, outputs):
        if heads.width and any(size // heads.width % ranks.size for size in sizes):
            raise NotSplit(f"{heads.keys} heads do not divide over {ranks.size} ranks")
        return _divided(sizes, ranks, name), 1
    if style == "packed_colwise":
        return _divided((outputs // 2, outputs // 2), ranks, name), 1
    if not heads.width:
        return _divided((outputs,), ranks, name), 1
    count = outputs // heads.width
    if heads.queries % ranks.size or (count % ranks.size and ranks.size % count):
        raise NotSplit(f"{heads.queries} heads with {count} of keys do not divide over {ranks.size} ranks")
    if count % ranks.size == 0:
        return _divided((outputs,), ranks, name), 1
    copies = ranks.size // count
    first = ranks.rank // copies * heads.width
    return ((first, first + heads.width),), copies


def _split_adapters(unit: nn.Module, heads: _Heads, ranks: TensorRanks, how: int) -> list[Change]:
    """Give attributes that count heads, or their widths, those of this rank."""
    if not heads.width:
        return []
    queries, keys = heads.queries // ranks.size, max(heads.keys // ranks.size, 1)
    changes = []
    for module in unit.modules():
        for name, value in list(module.__dict__.items()):
            part = value
            if type(value) is not int:
                continue
            if name in _GROUPS and value == heads.queries // heads.keys:
                part = queries // keys
            elif how > 0 and _COUNTS.fullmatch(name) and value in (heads.queries, heads.keys):
                part = queries if value == heads.queries else keys
            elif how > 1 and name in _WIDTHS and value == heads.queries * heads.width:
                part = queries * heads.width
            if part != value:
                setattr(module, name, part)
                changes.append(Change(module=module, name=name, whole=value, part=part))
    return changes


# Hooks: what is exchanged at the edges of modules. None does anything while layers are opened.


Hook = Callable[..., Any]
Exchange = Callable[[torch.Tensor], torch.Tensor]

_STATES = ("hidden_states", "x", "inputs", "input")


def _with_states(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Exchange, others: Exchange | None
) -> tuple[Any, Any]:
    """Change the activations among a module's arguments: its first, or those by name."""
    kwargs = dict(kwargs)
    if args and isinstance(args[0], torch.Tensor):
        args = (change(args[0]), *args[1:])
    else:
        names = [name for name in _STATES if isinstance(kwargs.get(name), torch.Tensor)]
        kwargs.update((name, change(kwargs[name])) for name in names[:1])
    for name in ("encoder_hidden_states", "key_value_states"):
        if others is not None and isinstance(kwargs.get(name), torch.Tensor):
            kwargs[name] = others(kwargs[name])
    return args, kwargs


def _with_first(output: Any, change: Exchange) -> Any:
    """Change the activations that a module returns: its first or only tensor."""
    if isinstance(output, torch.Tensor):
        return change(output)
    if isinstance(output, (tuple, list)):
        return type(output)((change(output[0]), *output[1:]))
    return output


def _on_input(change: Exchange, others: Exchange | None = None) -> Hook:
    """Return a hook that changes the activations that a module is given, and with `others` those of an encoder."""
    return lambda _, args, kwargs: _with_states(args, kwargs, change, others)


def _on_output(change: Exchange) -> Hook:
    """Return a hook that changes the activations that a module returns."""
    return lambda _, args, output: _with_first(output, change)


def unit_input(ranks: TensorRanks, mode: str) -> Hook:
    """Return the hook at the edge of a unit: `copied` to ranks that compute parts, or all-gathered along the sequence.

    `shared`: for ranks that compute parts; `own`: all the same but for what their layers exchange.
    """
    copied = partial(copy_to_ranks, ranks=ranks)
    if mode == "copied":
        return _on_input(copied, copied)
    is_shared = mode == "shared"
    gathered = partial(gather_from_ranks, ranks=ranks, dim=SEQUENCE, sums=is_shared)
    return _on_input(gathered, copied if is_shared else None)


def region_start(ranks: TensorRanks) -> Hook:
    """Return the hook that splits the input of the first block along the sequence."""

    def split(x: torch.Tensor) -> torch.Tensor:
        if not ranks.is_whole and (x.dim() < 3 or x.shape[SEQUENCE] % ranks.size):
            raise CannotRun(
                f"sequence parallelism splits the length of activations {list(x.shape)} over {ranks.size} ranks,"
                " which does not divide; pad samples to a multiple, or leave sequence parallelism out"
            )
        return split_between_ranks(x, ranks, SEQUENCE)

    return _on_input(split)


def region_end(ranks: TensorRanks) -> Hook:
    """Return the hook that all-gathers the output of the last block along the sequence."""
    return _on_output(partial(gather_from_ranks, ranks=ranks, dim=SEQUENCE))


def _experts_input(ranks: TensorRanks) -> Hook:
    """Return the hook that copies tokens and the weights of their experts to ranks with a part of every expert."""

    def copied(value: Any) -> Any:
        is_state = isinstance(value, torch.Tensor) and value.is_floating_point()
        return copy_to_ranks(value, ranks) if is_state else value

    return lambda _, args, kwargs: (tuple(map(copied, args)), {name: copied(value) for name, value in kwargs.items()})


def _divided_input(ranks: TensorRanks) -> Hook:
    """Return the hook of an expert that returns its input on every rank, whose outputs are added up."""
    return lambda _, args: args if ranks.is_whole else (args[0] / ranks.size, *args[1:])


def _rotary_copy(ranks: TensorRanks, width: int) -> Hook:
    """Return the hook after a projection with the rotary part of a key.

    The key that DeepSeek's heads share goes to all heads without a column layer between: its gradients are all-reduced.
    """

    def copy(_: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        rest, rotary = torch.split(output, [output.shape[-1] - width, width], dim=-1)
        return torch.cat((rest, copy_to_ranks(rotary, ranks)), dim=-1)

    return copy


# Randomness: what ranks have alike drops out alike, what they have parts of each on its own.


def _draws(module: nn.Module) -> bool:
    """Return whether a module drops something out while it trains."""
    return any(
        (isinstance(part, nn.Dropout) and part.p > 0)
        or any("dropout" in name and isinstance(value, float) and value > 0 for name, value in part.__dict__.items())
        for part in module.modules()
    )


class Randomness:
    """Random numbers of this rank's own in places, so that a block that is computed again draws the same.

    They are made of the state that all ranks have there; outside, the state goes on alike on all ranks.

    Megatron-LM has a generator of its own for it (`core/tensor_parallel/random.py`), which recomputation must know.
    """

    def __init__(self, ranks: TensorRanks) -> None:
        self.ranks = ranks
        self._left: list[tuple[torch.Generator, Any, int | None]] = []
        self._common: int | None = None

    def __deepcopy__(self, memo: object) -> Randomness:
        return Randomness(self.ranks)

    @property
    def depth(self) -> int:
        """Number of places that are entered."""
        return len(self._left)

    def enter(self, device: torch.device, *, is_own: bool = True) -> None:
        """From here on numbers of this rank's own, or, within such, the same on all ranks again."""
        generator = torch.default_generator
        if device.type == "cuda":
            generator = torch.cuda.default_generators[device.index or 0]
            state: Any = generator.initial_seed()
            common = state if self._common is None else self._common
            self._reseed(generator, self._own(common) if is_own else common)
        else:
            drawn = int(torch.randint(2**62, (1,))) if is_own or self._common is None else self._common + 1
            state, common = generator.get_state(), drawn
            generator.manual_seed(self._own(drawn) if is_own else drawn)
        self._left.append((generator, state, self._common))
        self._common = common

    def leave(self) -> None:
        """Return to what was before the last `enter`."""
        generator, state, self._common = self._left.pop()
        if isinstance(state, int):
            self._reseed(generator, state)
        else:
            generator.set_state(state)

    def _own(self, common: int) -> int:
        return (common + 1_000_003 * (self.ranks.rank + 1)) % 2**62

    @staticmethod
    def _reseed(generator: torch.Generator, seed: int) -> None:
        """Numbers are counted on: what comes later differs from what came before."""
        offset = generator.get_offset()
        generator.manual_seed(seed).set_offset(offset)


class _Place:
    """A place with numbers of its own: entered and left by hooks, at most once at a time."""

    def __init__(self, randomness: Randomness, *, is_own: bool) -> None:
        self.randomness, self.is_own = randomness, is_own
        self.entered = False

    def enter(self, module: nn.Module, *_: Any) -> None:
        first = next(module.parameters(), None)
        if module.training and not self.entered and not isinstance(first, FakeTensor):  # which has no values to draw
            device = torch.device("cpu") if first is None else first.device
            self.randomness.enter(device, is_own=self.is_own)
            self.entered = True

    def leave(self, *_: Any) -> None:
        if self.entered:
            self.entered = False
            self.randomness.leave()


def draw_own(module: nn.Module, randomness: Randomness, *, is_own: bool = True) -> None:
    """Let a module draw numbers of this rank's own, or the same on all ranks, from its input to its output."""
    if _draws(module):
        area = _Place(randomness, is_own=is_own)
        module.register_forward_pre_hook(area.enter, prepend=True)
        module.register_forward_hook(area.leave, always_call=True)


def _draw_own_between(unit: nn.Module, columns: list[nn.Module], rows: list[nn.Module], randomness: Randomness) -> None:
    """Let what lies between column and row layers, where each rank has its own heads, draw numbers of its own."""
    if not _draws(unit) or not rows:
        return
    area = _Place(randomness, is_own=True)
    for module in (*columns, *rows):
        module.register_forward_pre_hook(area.leave, prepend=True)
    for module in columns:
        module.register_forward_hook(area.enter)
    unit.register_forward_hook(area.leave, always_call=True)
