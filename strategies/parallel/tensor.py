"""Tensor and sequence parallelism: which layers of a model are split how, and the proof that they are split rightly.

The styles come from the script (`tp_plan`), from the plan that a transformers model has for itself, or from a rule:
pairs of linear layers around an attention or an MLP. Before a model is split, the first block of each kind is split on
a copy, and must compute what it computes whole: outputs, gradients of its input and of every parameter.
"""

from __future__ import annotations

import copy
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hardware_db.notices import notice
from strategies.errors import CannotRun
from strategies.parallel.blocks import Elsewhere, repeated_blocks
from strategies.parallel.expert import is_mixture
from strategies.parallel.layers import SharedLayer, split_in_place
from strategies.parallel.loss import CausalLoss, WholeLogits
from strategies.parallel.mesh import Mesh
from strategies.parallel.model import SplitOptions
from strategies.parallel.ranks import TensorRanks, all_reduce, gather_from_ranks
from strategies.parallel.split import ModelParts, Split, parts_of, splits_in
from strategies.parallel.stages import looked_at
from strategies.parallel.styles import (
    ROWS,
    Applied,
    Change,
    NotSplit,
    Randomness,
    RegionEnd,
    RegionStart,
    Variant,
    as_columns,
    can_share,
    draw_own,
    has_heads,
    is_columns,
    is_linear,
    is_style,
    make_columns,
    make_vocabulary,
    split_unit,
    widths,
)
from strategies.torch_compat.dispatch import FakeTensor
from strategies.torch_compat.tensors import own_parameters, tree_map

Styles = dict[str, str]
"""Styles by the names of modules and parameters."""
_TOLERANCE = 1e-3
"""Of a block computed in fp32, against the largest element: sums in another order differ by 2^-24 each."""


def split_layers(model: nn.Module, mesh: Mesh, options: SplitOptions, parts: ModelParts) -> None:
    """Leave this tp rank's part of every layer that can be split.

    Raises:
        CannotRun: the model's plan names a style that is not known, a pattern of `tp_plan` fits no module, or a block
            does not compute the same when it is split.
    """
    ranks, device = TensorRanks(mesh.group("tp")), mesh.environment.device
    if not _is_fake(model):
        _same_random_state(ranks, device)
    _Splitter(model, ranks, device, options, parts).split()


def _same_random_state(ranks: TensorRanks, device: torch.device) -> None:
    """Give the ranks one random state: what all of them have whole must be dropped out alike."""
    assert ranks.group is not None
    states = [(torch.get_rng_state(), torch.set_rng_state)]
    if device.type == "cuda":
        states.append((torch.cuda.get_rng_state(device), partial(torch.cuda.set_rng_state, device=device)))
    for state, restore in states:
        here = state.to(device)
        dist.broadcast(here, dist.get_global_rank(ranks.group, 0), group=ranks.group)
        restore(here.cpu())


class _Splitter:
    """One model's split."""

    def __init__(
        self, model: nn.Module, ranks: TensorRanks, device: torch.device, options: SplitOptions, parts: ModelParts
    ) -> None:
        self.model, self.ranks, self.device, self.options, self.parts = model, ranks, device, options, parts
        self.sequence = options.configuration.sequence_parallel
        self.randomness = Randomness(ranks)
        self.inner = _inner(model)
        self.prefix = next(name for name, module in model.named_modules() if module is self.inner)
        self.changes: list[Change] = []
        self.others: set[TensorRanks] = set()
        self.blocks = repeated_blocks(self.inner)
        is_spread = options.configuration.ep > 1
        self.spread = {name for name, module in model.named_modules() if is_spread and is_mixture(module)}

    def split(self) -> None:
        self._split_layers_of_the_script()
        names = {id(module): name for name, module in self.model.named_modules()}
        blocks = {names[id(block)]: block for block in self.blocks}
        styles = self._styles(blocks)
        within = {name: _below(styles, name) for name in blocks}
        if self.sequence and not blocks:
            raise CannotRun(
                f"sequence parallelism is between the blocks of a model, and {type(self.inner).__name__} has no stack"
                " of like blocks (a ModuleList of one class); leave it out"
            )
        plans = self._plans(blocks, within)
        for name, block in blocks.items():
            plan = plans[_signature(block, within[name])]
            applied = self._split_block(block, plan.choices)
            if plan.summed is not None:
                applied.summed = set(plan.summed)
            self._take(name, applied)
        for stack in _stacks(self.inner, self.blocks) if self.sequence else ():
            stack[0].register_forward_pre_hook(RegionStart(self.ranks), prepend=True, with_kwargs=True)
            stack[-1].register_forward_hook(RegionEnd(self.ranks))
        inside = tuple(f"{name}." for name in blocks)
        outside = {name: style for name, style in styles.items() if not name.startswith(inside) and name not in blocks}
        self._split_outside(outside)
        if not self.parts.splits:
            raise CannotRun(
                f"tensor parallelism found no layers to split in {type(self.inner).__name__}; name them by tp_plan="
                '{"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}, or use tp 1'
            )
        self.parts.opened.append(self._open)

    # What is split how.

    def _styles(self, blocks: Mapping[str, nn.Module]) -> Styles:
        given = self.options.tp_plan
        if given:
            return self._less_experts(self._matched(given, "tp_plan", is_strict=True))
        own = getattr(self.inner, "tp_plan", None) or getattr(self.inner, "_tp_plan", None)
        if own and hasattr(self.inner, "config"):
            start = f"{self.prefix}." if self.prefix else ""
            name = f"the tensor-parallel plan of {type(self.inner).__name__}"
            matched = self._matched({start + pattern: style for pattern, style in own.items()}, name, is_strict=False)
            return self._less_experts(matched)
        return {}

    def _less_experts(self, styles: Styles) -> Styles:
        """Without the styles of experts that ep ranks have whole."""
        starts = tuple(f"{name}." for name in self.spread)
        return {name: style for name, style in styles.items() if not f"{name}.".startswith(starts)}

    def _matched(self, plan: Mapping[str, str], what: str, *, is_strict: bool) -> Styles:
        known = [name for name, _ in (*self.model.named_modules(), *self.model.named_parameters())]
        found: Styles = {}
        for pattern, style in plan.items():
            if not isinstance(style, str) or not is_style(style):
                raise CannotRun(
                    f"{what} has style {style!r} for {pattern}, which is not known; give tp_plan= with"
                    " colwise, rowwise, packed:3, vocabulary, sequence or replicate"
                )
            fits = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
            names = [name for name in known if fits.fullmatch(name)]
            if not names and is_strict:
                raise CannotRun(f"{what}: {pattern!r} fits no module or parameter of {type(self.inner).__name__}")
            found.update(dict.fromkeys(names, style))
        return found

    # Blocks: several ways are tried on a copy of the first of each kind, and the first that is right is taken.

    def _plans(self, blocks: Mapping[str, nn.Module], within: Mapping[str, Styles]) -> dict[Any, _Plan]:
        plans: dict[Any, _Plan] = {}
        trial: _Trial | None = None
        signatures = {name: _signature(block, within[name]) for name, block in blocks.items()}
        alike = Counter(signatures.values())
        for name, block in blocks.items():
            signature = signatures[name]
            if signature not in plans:
                trial = trial or _Trial(self.inner, block, self.ranks, self.device, sequence=self.sequence)
                plans[signature] = self._choose(name, block, within[name], trial, alike[signature])
        return plans

    def _choose(self, name: str, block: nn.Module, styles: Styles, trial: _Trial, count: int) -> _Plan:
        """How the units of `count` blocks like this one are split."""
        around = self._around_spread(block)
        candidates = _units_of(styles, block, around) if styles else _found_units(block, around)
        chosen: list[_Choice] = []
        if not styles and candidates and not trial.runs(block):
            raise CannotRun(
                f"tensor parallelism found layers of {name} to split, and cannot check them: the block does not run on"
                " activations alone; name styles by tp_plan=, for example"
                f' {{"{re.sub(r"[0-9]+", "*", name)}.up": "colwise"}}'
            )
        for unit, ways in candidates:
            where = f"{name}.{unit}" if unit else name
            where += f" and {count - 1} like it" if count > 1 else ""
            found, problem = self._choose_way(block, unit, ways, chosen, trial)
            if found is None:
                self._notice(f"tensor parallelism leaves {where} whole: split, it would not compute the same{problem}")
                continue
            chosen.append(found)
            if found.variant.gathers:
                self._notice(
                    f"tensor parallelism splits weights of {where} and gathers what they compute, which is slower"
                    f"{self._instead(block.get_submodule(unit), ways[-1], problem)}"
                )
        summed = trial.agrees(block, chosen, self._split_block)
        if summed is None:
            what = "sequence parallelism" if self.sequence else "tensor parallelism"
            raise CannotRun(
                f"{what}: {type(block).__name__}, split, does not compute what it computes whole{trial.problem}; let it"
                " take shapes from its projections' outputs, or name styles by tp_plan="
            )
        return _Plan(choices=tuple(chosen), summed=summed if trial.runs(block) else None)

    def _choose_way(
        self, block: nn.Module, unit: str, ways: Sequence[Styles], before: Sequence[_Choice], trial: _Trial
    ) -> tuple[_Choice | None, str]:
        """The first way that is right, and what stood against one before it."""
        problem = ""
        for way in ways:
            for variant in _variants(block.get_submodule(unit), way, sequence=self.sequence, is_block=not unit):
                choice = _Choice(unit=unit, styles=way, variant=variant)
                try:
                    if trial.agrees(block, [*before, choice], self._split_block) is not None:
                        return choice, problem
                    problem = trial.problem
                except NotSplit as reason:
                    problem = f" ({reason})"
        return None, problem

    def _instead(self, unit: nn.Module, styles: Styles, problem: str) -> str:
        """Why the outputs of column layers have to be gathered, and what a script can do about it."""
        if not any(style in ROWS for style in styles.values()):
            columns = " and ".join(name for name, style in styles.items() if is_columns(style))
            return f': give the layer that takes what {columns} makes the style "rowwise" in tp_plan='
        divides = all(widths(layer)[1] % self.ranks.size == 0 for layer in unit.modules() if is_linear(layer))
        if divides and not any(has_heads(module) for module in unit.modules()):
            return ": if it is attention, name the attribute with its number of heads num_heads, to split by heads"
        return problem

    def _notice(self, text: str) -> None:
        if _is_fake(self.model):
            return
        if self.ranks.rank == 0 and (not dist.is_initialized() or dist.get_rank() == 0):
            notice(text)

    def _split_block(self, block: nn.Module, choices: Sequence[_Choice]) -> Applied:
        applied = Applied()
        for choice in choices:
            unit = block.get_submodule(choice.unit)
            how = {"sequence": self.sequence, "is_block": not choice.unit}
            applied.add(choice.unit, split_unit(unit, choice.styles, self.randomness, choice.variant, **how))
        if self.sequence:
            names = {name for name, _ in block.named_parameters()}
            around = self._around_spread(block)
            for name in [unit for unit in _whole_units(block, choices) if unit not in around]:
                self._keep_whole(block, name, applied)
            applied.summed |= names - applied.splits.keys() - applied.complete
            draw_own(block, self.randomness)
        return applied

    def _around_spread(self, block: nn.Module) -> list[str]:
        """Modules of a block with experts that ep ranks will have: they take this rank's part of the sequence as it
        is."""
        return _around_mixtures(block) if self.spread else []

    def _keep_whole(self, block: nn.Module, unit: str, applied: Applied) -> None:
        """A part of a block that is left whole needs the whole sequence."""
        made = split_unit(
            block.get_submodule(unit), {}, self.randomness, Variant(shares_input=False), sequence=True, is_block=False
        )
        applied.add(unit, made)

    def _take(self, name: str, applied: Applied) -> None:
        self.parts.splits.update((f"{name}.{key}", split) for key, split in applied.splits.items())
        summed = (f"{name}.{key}" for key in applied.summed)
        self.parts.summed.update(key for key in summed if key.rpartition(".")[0] not in self.spread)
        self.changes += applied.changes

    # Outside the blocks: tables, heads and their loss.

    def _split_outside(self, styles: Styles) -> None:
        names = {id(module): name for name, module in self.model.named_modules()}
        named = {self.model.get_submodule(name) for name in styles if name in names.values()}
        table, head = _ends(self.inner, self.blocks, named if self.options.tp_plan else None)
        done: dict[int, Split] = {}
        ends = {names[id(module)] for module in (table, head) if module is not None}
        if head is None and _multiplies_with_head(self.inner):
            output = _of(self.inner, "get_output_embeddings")
            ends |= {name for name in styles if _weight_in(self.model.get_submodule(name)) is _weight_in(output)}
        for name, style in styles.items():
            if name not in ends:
                self._take_one(name, style)
        if table is not None:
            first = table.weight
            splits = make_vocabulary(table, self.ranks)
            self.parts.splits[f"{names[id(table)]}.weight"] = splits["weight"]
            done[id(first)] = splits["weight"]
        if head is not None:
            self._split_head(head, names[id(head)], done)

    def _take_one(self, name: str, style: str) -> None:
        owner, _, last = name.rpartition(".")
        unit = self.model.get_submodule(owner)
        made = split_unit(
            unit, {last: style}, self.randomness, Variant(shares_input=False), sequence=False, is_block=True
        )
        prefix = f"{owner}." if owner else ""
        self.parts.splits.update((prefix + key, split) for key, split in made.splits.items())
        self.parts.summed.update(prefix + key for key in made.summed)
        self.changes += made.changes

    def _split_head(self, head: Any, name: str, done: dict[int, Split]) -> None:
        local_loss = _has_causal_loss(self.inner) and head is _of(self.inner, "get_output_embeddings")
        vocabulary = head.weight.shape[0] if id(head.weight) not in done else done[id(head.weight)].shape[0]
        gathered = 0 if local_loss else vocabulary
        if id(head.weight) in done:  # tied: its weight is this rank's already
            as_columns(head, self.ranks, gathered_length=gathered)
            splits = {"weight": done[id(head.weight)]}
            splits |= split_in_place(head, {"bias": 0}, splits["weight"].pieces)
        else:
            splits = make_columns(head, self.ranks, ((self.ranks.share(vocabulary),), 1), gathers=not local_loss).splits
        self.parts.splits.update((f"{name}.{key}", split) for key, split in splits.items())
        if local_loss:
            model: Any = self.inner
            whole = model.loss_function
            model.loss_function = CausalLoss(self.ranks, vocabulary, whole)
            model.register_forward_hook(WholeLogits(self.ranks, vocabulary))

    # The script's own parallel layers, and whole parameters.

    def _split_layers_of_the_script(self) -> None:
        """Split the script's own layers that are whole, and note those that are not."""
        holders: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            holders.setdefault(id(parameter), []).append(name)
        for name, module in self.model.named_modules():
            if not isinstance(module, SharedLayer):
                continue
            if module.ranks.size == 1:
                shared = next((names for p in module.parameters() if len(names := holders[id(p)]) > 1), None)
                if shared:
                    raise CannotRun(
                        f"{name} cannot be split over tp {self.ranks.size}: {' and '.join(shared)} are one parameter;"
                        " use nn.Embedding and nn.Linear, which tensor parallelism splits together, or tp 1"
                    )
                module.split_over(self.ranks)
            self.others.add(module.ranks)
        self.parts.splits.update(splits_in(self.model))

    @contextmanager
    def _open(self) -> Iterator[None]:
        """Modules inside compute with whole parameters."""
        with ExitStack() as opened:
            for ranks in {self.ranks, *self.others}:
                opened.enter_context(ranks.open_layers())
            for change in self.changes:
                setattr(change.module, change.name, change.whole)
            try:
                yield
            finally:
                for change in self.changes:
                    setattr(change.module, change.name, change.part)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Choice:
    """How one unit of a block is split."""

    unit: str
    """The name of the module in the block that it is, "" for the block itself."""
    styles: Styles
    """By names in the unit."""
    variant: Variant


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """How blocks of one kind are split."""

    choices: tuple[_Choice, ...]
    summed: frozenset[str] | None
    """Parameters of the block of whose gradients each rank was seen to have a part; None: not seen."""


# Trials.


_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class _Reached(Exception):
    """A forward pass has come to the block whose arguments are wanted."""


class _Trial:
    """A block of a model run whole and split, on a copy and in fp32, with the arguments that the model calls it with.

    `problem` is what was raised by a run that failed.
    """

    problem = ""

    def __init__(
        self, inner: nn.Module, block: nn.Module, ranks: TensorRanks, device: torch.device, *, sequence: bool
    ) -> None:
        self._ranks, self._device, self._sequence = ranks, device, sequence
        self._is_fake = _is_fake(block)
        positions = getattr(getattr(inner, "config", None), "max_position_embeddings", None) or 4 * ranks.size
        self._arguments = _arguments_of(inner, block, ranks.size * max(1, min(4, positions // ranks.size)))
        self._wholes: dict[nn.Module, tuple[nn.Module, _Found] | None] = {}

    def runs(self, block: nn.Module) -> bool:
        """Whether the block can be run by itself."""
        return self._whole(block) is not None

    def agrees(
        self, block: nn.Module, choices: Sequence[_Choice], split: Callable[[nn.Module, Sequence[_Choice]], Applied]
    ) -> frozenset[str] | None:
        """Split a copy of the block: which of its unsplit parameters have a part of their gradient on each rank; None:
        it does not compute what the whole block computes, on some rank.

        Raises:
            NotSplit: it cannot be split so.
        """
        known = self._whole(block)
        if known is None:
            return frozenset(split(copy.deepcopy(block), choices).summed)
        reference, whole = known
        copied = copy.deepcopy(reference)
        applied = split(copied, choices)
        if self._sequence:
            copied.register_forward_pre_hook(RegionStart(self._ranks), prepend=True, with_kwargs=True)
            copied.register_forward_hook(RegionEnd(self._ranks))
        self.problem = ""
        try:
            found = self._run(copied)
        except Exception as problem:  # whatever a forward raises with shapes that it does not expect, on every rank
            found, self.problem = None, f" ({type(problem).__name__}: {str(problem).partition(chr(10))[0]})"
        if found is None or self._is_fake:
            return None if found is None else frozenset(applied.summed)
        return self._compared(found, whole, applied)

    def _compared(self, found: _Found, whole: _Found, applied: Applied) -> frozenset[str] | None:
        ranks, floor = self._ranks, 1e-3 * max(float(g.abs().max()) for g in whole.gradients.values())
        is_right = [_close(found.output, whole.output, 0.0), _close(found.input, whole.input, 0.0)]
        names, own, total = [], [], []
        for name, gradient in found.gradients.items():
            expected = whole.gradients[name]
            if split := applied.splits.get(name):
                complete = sum_over_copies(gradient, split, ranks)
                is_right.append(_close(complete, split.take(expected), floor))
                continue
            names.append(name)
            own.append(_close(gradient, expected, floor))
            total.append(_close(all_reduce(gradient.clone(), ranks), expected, floor))
        flags = torch.tensor([*is_right, *own, *total], dtype=torch.int32, device=self._device)
        seen = all_reduce(flags, ranks, "min").tolist()
        count = len(is_right)
        summed = set()
        for name, whole_there, parts_there in zip(
            names, seen[count : count + len(names)], seen[count + len(names) :], strict=True
        ):
            if not whole_there and not parts_there:
                return None
            if parts_there and (name in applied.summed or not whole_there):
                summed.add(name)
        return frozenset(summed) if all(seen[:count]) else None

    def _whole(self, block: nn.Module) -> tuple[nn.Module, _Found] | None:
        if block not in self._wholes:
            self._wholes.clear()  # one block's copy at a time
            self._wholes[block] = self._measured(block)
        return self._wholes[block]

    def _measured(self, block: nn.Module) -> tuple[nn.Module, _Found] | None:
        if self._arguments is None:
            return None
        reference = copy.deepcopy(block).eval()
        if not self._is_fake:
            reference.to(self._device).float()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in reference.parameters():
                if parameter.is_floating_point():
                    parameter.requires_grad_()
                    if not self._is_fake and not parameter.any():  # zeros hide what they are multiplied with
                        parameter.copy_(torch.randn(parameter.shape, generator=generator) / 10)
        try:
            return reference, self._run(reference)
        except Exception:  # a block that wants other arguments may raise anything
            return None

    def _run(self, block: nn.Module) -> _Found:
        assert self._arguments is not None
        positional, named = self._arguments
        with torch.enable_grad(), torch.autocast(self._device.type, enabled=False):
            dtype = next(parameter.dtype for parameter in block.parameters() if parameter.is_floating_point())
            states, *rest = tree_map(lambda leaf: _moved(leaf, self._device, dtype), positional)
            named = tree_map(lambda leaf: _moved(leaf, self._device, dtype), named)
            states = states.clone().requires_grad_()
            output = block(states, *rest, **named)
            output = output if isinstance(output, torch.Tensor) else output[0]
            generator = torch.Generator().manual_seed(1)
            weights = torch.randn(output.shape, generator=generator).to(output)
            names = [name for name, parameter in block.named_parameters() if parameter.requires_grad]
            wanted = [dict(block.named_parameters())[name] for name in names]
            found = torch.autograd.grad((output * weights).sum(), [states, *wanted], allow_unused=True)
        gradients = {
            name: torch.zeros_like(parameter) if gradient is None else gradient
            for name, parameter, gradient in zip(names, wanted, found[1:], strict=True)
        }
        first = torch.zeros_like(states) if found[0] is None else found[0]
        return _Found(output=output.detach(), input=first, gradients=gradients)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """What a block computed."""

    output: torch.Tensor
    input: torch.Tensor
    """The gradient of the activations that it was given."""
    gradients: dict[str, torch.Tensor]


def _close(found: torch.Tensor, expected: torch.Tensor, floor: float) -> bool:
    if found.shape != expected.shape:
        return False
    scale = max(float(expected.abs().max()), floor) if expected.numel() else 0.0
    return not expected.numel() or float((found - expected).abs().max()) <= _TOLERANCE * scale


def _is_fake(module: nn.Module) -> bool:
    """Whether a module has shapes and no values, so that a split can be tried and not compared."""
    return any(parameter.is_meta or isinstance(parameter, FakeTensor) for parameter in module.parameters())


def _moved(leaf: Any, device: torch.device, dtype: torch.dtype) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    leaf = leaf.detach() if isinstance(leaf, FakeTensor) else leaf.detach().to(device)
    return leaf.to(dtype) if leaf.is_floating_point() else leaf


def _arguments_of(inner: Any, block: nn.Module, length: int) -> _Arguments | None:
    """What a model calls its block with for tokens of so many positions; activations first. None: not known."""
    vocabulary = getattr(getattr(inner, "config", None), "vocab_size", 0)
    is_named = bool(vocabulary) and getattr(inner, "main_input_name", "") == "input_ids"
    if not is_named:
        rows = [module.num_embeddings for module in inner.modules() if isinstance(module, nn.Embedding)]
        vocabulary = min(rows, default=0)  # which of its tables tokens are looked up in is not known
    if vocabulary:
        device = next(inner.parameters()).device
        tokens = torch.randint(0, vocabulary, (2, length), generator=torch.Generator().manual_seed(2)).to(device)
        named = {"input_ids": tokens, "use_cache": False} if is_named else {}
        captured = _captured(inner, block, () if is_named else (tokens,) * _required(inner), named)
        if captured is not None:
            return captured
    inputs = [widths(module)[0] for module in block.modules() if is_linear(module)]
    if not inputs:
        return None
    return (torch.randn(2, length, inputs[0], generator=torch.Generator().manual_seed(2)),), {}


def _required(module: nn.Module) -> int:
    """How many positional arguments a forward pass has to be given; one at least."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(module.forward).parameters.values()
    return max(1, sum(1 for taken in parameters if taken.kind in kinds and taken.default is inspect.Parameter.empty))


def _captured(
    inner: nn.Module, block: nn.Module, given: tuple[Any, ...], named: Mapping[str, Any]
) -> _Arguments | None:
    seen: list[_Arguments] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append((args, dict(kwargs)))
        raise _Reached

    handle = block.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with torch.no_grad(), looked_at(inner):
            inner(*given, **named)
    except Exception:  # _Reached, or whatever a model raises that wants other arguments
        pass
    finally:
        handle.remove()
    if not seen:
        return None
    args, kwargs = seen[0]
    if not args and "hidden_states" in kwargs:
        args = (kwargs.pop("hidden_states"),)
    return (args, kwargs) if args and isinstance(args[0], torch.Tensor) else None


# Which modules are split together, and the rule for models without a plan.


def _around_mixtures(block: nn.Module) -> list[str]:
    """Modules of a block that routed experts lie in."""
    return [
        name
        for name, child in block.named_modules()
        if name and any(is_mixture(module) for module in child.modules() if module is not child)
    ]


def _unit_with(name: str, block: nn.Module, around: Sequence[str]) -> str:
    """The module of a block that a layer is split with, "" for the block itself: the child that it lies in, or what
    lies beside a mixture in that child."""
    unit, _, rest = name.partition(".")
    while unit in around and rest:
        first, _, rest = rest.partition(".")
        unit = f"{unit}.{first}"
    try:
        is_own = not rest or is_linear(block.get_submodule(unit))
    except AttributeError:
        is_own = True
    return "" if is_own else unit


def _units_of(styles: Styles, block: nn.Module, around: Sequence[str]) -> list[tuple[str, list[Styles]]]:
    """Styles by the part of the block that they lie in; those of the block's own layers together."""
    units: dict[str, Styles] = {}
    for name, style in styles.items():
        unit = _unit_with(name, block, around)
        units.setdefault(unit, {})[name.removeprefix(f"{unit}.") if unit else name] = style
    return [(unit, [found]) for unit, found in units.items()]


def _found_units(block: nn.Module, around: Sequence[str]) -> list[tuple[str, list[Styles]]]:
    """Pairs of linear layers, found by their order and widths: query, key, value and output; gate, up and down."""
    layers = [(name, *widths(module)) for name, module in block.named_modules() if is_linear(module)]
    found: list[tuple[str, list[Styles]]] = []
    index = 0
    while index < len(layers):
        for taken, ways in _patterns(layers[index:]):
            names = [name for name, _, _ in layers[index : index + taken]]
            units = {_unit_with(name, block, around) for name in names}
            unit = units.pop() if len(units) == 1 else ""
            start = f"{unit}." if unit else ""
            named = [{name.removeprefix(start): style for name, style in zip(names, way, strict=True)} for way in ways]
            found.append((unit, named))
            index += taken - 1
            break
        index += 1
    return found


def _patterns(layers: Sequence[tuple[str, int, int]]) -> Iterator[tuple[int, list[tuple[str, ...]]]]:
    """How many of the next layers lie between two sums over ranks, and the styles that they may have."""
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


def _variants(unit: nn.Module, styles: Styles, *, sequence: bool, is_block: bool) -> list[Variant]:
    columns = [style for style in styles.values() if is_columns(style)]
    shares = [False] if is_block or not can_share(unit, styles) else [True, False]
    if not sequence and len(columns) < 2:
        shares = [False]
    adapts = range(3) if any(has_heads(module) for module in unit.modules()) else range(1)
    adapts = range(-1, adapts.stop) if is_block else adapts  # an MLP beside the attention whose heads the block has
    found = [Variant(shares_input=share, adapts=how) for how in adapts for share in shares]
    is_plain = columns and all(is_columns(style) or style in ROWS for style in styles.values())
    return [*found, Variant(shares_input=False, gathers=True)] if is_plain else found


def _whole_units(block: nn.Module, choices: Sequence[_Choice]) -> list[str]:
    """Children of a block with layers that are not split: they need the whole sequence."""
    split = {choice.unit or name.partition(".")[0] for choice in choices for name in choice.styles}
    return [
        name
        for name, child in block.named_children()
        if name not in split
        and any(is_linear(m) or has_heads(m) or isinstance(m, SharedLayer) for m in child.modules())
    ]


def _signature(block: nn.Module, styles: Styles) -> Any:
    return type(block), frozenset(styles.items()), tuple((n, p.shape) for n, p in block.named_parameters())


def _below(styles: Styles, prefix: str) -> Styles:
    start = f"{prefix}."
    return {name.removeprefix(start): style for name, style in styles.items() if name.startswith(start)}


def _stacks(inner: nn.Module, blocks: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Blocks that follow each other, by the list that they are in; those of a pipeline by their stage, since another
    rank's are between two stages of one rank."""
    members = {id(block) for block in blocks}
    stacks: list[list[nn.Module]] = []
    for module in inner.modules():
        for away, run in groupby(module.children(), key=lambda child: isinstance(child, Elsewhere)):
            stacks.append([] if away else [child for child in run if id(child) in members])
    return [stack for stack in stacks if stack]


def _inner(model: Any) -> nn.Module:
    """The model inside adapters."""
    found: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
    return found


def _of(model: Any, getter: str) -> Any:
    try:
        return getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None


def _ends(inner: nn.Module, blocks: Sequence[nn.Module], named: set[nn.Module] | None) -> tuple[Any, Any]:
    """Embedding and head over the vocabulary, where both that share a weight can be split; `named`: those alone that
    the script names, and what shares a weight with them."""
    inside = {id(module) for block in blocks for module in block.modules()}
    outer = [
        module
        for module in inner.modules()
        if id(module) not in inside
        and getattr(module, "weight", None) is not None
        and not isinstance(module, SharedLayer)
    ]
    heads: list[Any] = [module for module in outer if is_linear(module) and isinstance(module, nn.Linear)]
    tables: list[Any] = [m for m in outer if isinstance(m, nn.Embedding) and not m.sparse and m.max_norm is None]
    if hasattr(inner, "get_input_embeddings"):
        table, head = _of(inner, "get_input_embeddings"), _of(inner, "get_output_embeddings")
        table, head = (table if table in tables else None), (head if head in heads else None)
    else:
        pairs = [(t, h) for h in heads for t in tables if h.weight.shape == t.weight.shape]
        table, head = pairs[-1] if pairs else (None, None)
    # Without a weight of its own a table or a head is another pipeline stage's.
    table, head = (end if end is not None and _weight_in(end) is not None else None for end in (table, head))
    if _multiplies_with_head(inner):
        head = None
    is_tied = table is not None and head is not None and head.weight is table.weight
    if named is not None and not (is_tied and named & {table, head}):
        table, head = (table if table in named else None), (head if head in named else None)
    weights = [weight for module in inner.modules() for weight in own_parameters(module).values()]
    shared = sum(1 for weight in weights if table is not None and weight is table.weight)
    if table is not None and shared != 1 + is_tied:
        return None, None  # something else computes with the same weight
    return table, head


def _multiplies_with_head(inner: Any) -> bool:
    """Whether a model's forward pass makes its loss of the head's whole weight, without the head's own."""
    forward: Any = inspect.unwrap(inner.forward)
    is_liger = type(inner).forward.__module__.startswith("liger_kernel")
    return is_liger or getattr(forward, "multiplies_with_head", False)


def _weight_in(module: Any) -> Any:
    return own_parameters(module).get("weight")


def _has_causal_loss(inner: Any) -> bool:
    """Whether a model's loss is transformers' cross-entropy of the next token, called through `loss_function`."""
    function = getattr(inner, "loss_function", None)
    if getattr(function, "__name__", "") != "ForCausalLMLoss":
        return False
    code = inspect.unwrap(type(inner).forward).__code__
    return "loss_function" in code.co_names


# What an engine does with a model that is split.


def sum_over_copies(part: torch.Tensor, split: Split, ranks: TensorRanks) -> torch.Tensor:
    """The sum of the gradients of the ranks that have the same pieces of a parameter."""
    if split.copies == 1:
        return part
    parts = gather_from_ranks(part.detach().unsqueeze(0), ranks, 0)
    first = ranks.rank // split.copies * split.copies
    return parts[first : first + split.copies].sum(0)


def sum_copies(model: nn.Module, parts: ModelParts, mesh: Mesh) -> None:
    """Add up the gradients of the parameters of which several tp ranks have the same part."""
    ranks = TensorRanks(mesh.group("tp"))
    for name, parameter in model.named_parameters():
        split = parts.splits.get(name)
        if split is None or split.over != "tp" or split.copies == 1 or parameter.grad is None:
            continue
        gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        gradient.copy_(sum_over_copies(gradient.to(mesh.environment.device), split, ranks))


@contextmanager
def whole_layers(model: nn.Module, mesh: Mesh, *, keeps_changes: bool) -> Iterator[None]:
    """Parameters that tp ranks have parts of are whole inside; `keeps_changes` takes over what the first of them wrote
    to any."""
    parts = parts_of(model)
    splits = {name: split for name, split in parts.splits.items() if split.over == "tp"}
    named = dict(model.named_parameters(remove_duplicate=False))
    held = {named[name]: (named[name].data, split) for name, split in splits.items() if name in named}
    ranks = TensorRanks(mesh.group("tp"))
    for parameter, (part, split) in held.items():
        parameter.data = _assembled(part, split, ranks)
    with ExitStack() as opened:
        for make in parts.opened:
            opened.enter_context(make())
        yield
    for parameter in dict.fromkeys(model.parameters()) if keeps_changes else ():
        dist.broadcast(parameter.data, dist.get_global_rank(mesh.group("tp"), 0), group=mesh.group("tp"))
    for parameter, (part, split) in held.items():
        if keeps_changes:
            part.copy_(split.take(parameter.data))
        parameter.data = part


def _assembled(part: torch.Tensor, split: Split, ranks: TensorRanks) -> torch.Tensor:
    whole = part.new_zeros(split.shape)
    if ranks.rank % split.copies == 0:
        start = 0
        for first, end in split.pieces:
            whole.narrow(split.dim, first, end - first).copy_(part.narrow(split.dim, start, end - first))
            start += end - first
    return all_reduce(whole, ranks)
