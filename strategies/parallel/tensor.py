"""Tensor and sequence parallelism: which layers of a model are split how, and the proof that they are split rightly.

The styles come from the script (`tp_plan`), from the plan that a transformers model has for itself, or from a rule:
pairs of linear layers around an attention or an MLP. Before a model is split, the first block of each kind is split on
a copy, and must compute what it computes whole: outputs, gradients of its input and of every parameter.
"""

from __future__ import annotations

import inspect
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hardware_db.notices import notice
from strategies.errors import CannotRun
from strategies.parallel import units
from strategies.parallel.blocks import repeated_blocks, without_adapters
from strategies.parallel.expert import is_mixture
from strategies.parallel.layers import SharedLayer, split_in_place
from strategies.parallel.loss import CausalLoss, WholeLogits
from strategies.parallel.mesh import Mesh
from strategies.parallel.model import SplitOptions
from strategies.parallel.ranks import TensorRanks
from strategies.parallel.split import ModelParts, Split, splits_in
from strategies.parallel.styles import (
    ROWS,
    Applied,
    Change,
    NotSplit,
    Randomness,
    Variant,
    as_columns,
    draw_own,
    has_heads,
    is_columns,
    is_linear,
    is_style,
    make_columns,
    make_vocabulary,
    region_end,
    region_start,
    split_unit,
    widths,
)
from strategies.parallel.trial import Trial, is_fake
from strategies.parallel.units import Choice, Styles
from strategies.torch_compat.tensors import own_parameters


@dataclass(frozen=True, kw_only=True, slots=True)
class _Plan:
    """Plan of splitting blocks of one kind."""

    choices: tuple[Choice, ...]
    summed: frozenset[str] | None
    """Parameters of the block of whose gradients each rank was seen to have a part; None: not seen."""


def split_layers(model: nn.Module, mesh: Mesh, options: SplitOptions, parts: ModelParts) -> None:
    """Leave this tp rank's part of every layer that can be split.

    Raises:
        CannotRun: the model's plan names a style that is not known, a pattern of `tp_plan` fits no module, or a block
            does not compute the same when it is split.
    """
    ranks, device = TensorRanks(mesh.group("tp")), mesh.environment.device
    if not is_fake(model):
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
        self.inner: nn.Module = without_adapters(model)
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
        styles = self._styles()
        within = {name: units.styles_below(styles, name) for name in blocks}
        if self.sequence and not blocks:
            raise CannotRun(
                f"sequence parallelism is between the blocks of a model, and {type(self.inner).__name__} has no stack"
                " of like blocks (a ModuleList of one class); leave it out"
            )
        plans = self._plans(blocks, within)
        for name, block in blocks.items():
            plan = plans[units.signature_of(block, within[name])]
            applied = self._split_block(block, plan.choices)
            if plan.summed is not None:
                applied.summed = set(plan.summed)
            self._take(name, applied)
        for stack in units.stacks_of(self.inner, self.blocks) if self.sequence else ():
            stack[0].register_forward_pre_hook(region_start(self.ranks), prepend=True, with_kwargs=True)
            stack[-1].register_forward_hook(region_end(self.ranks))
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

    def _styles(self) -> Styles:
        if self.options.tp_plan:
            return self._less_experts(self._match(self.options.tp_plan, "tp_plan", is_strict=True))
        own = getattr(self.inner, "tp_plan", None) or getattr(self.inner, "_tp_plan", None)
        if own and hasattr(self.inner, "config"):
            start = f"{self.prefix}." if self.prefix else ""
            name = f"the tensor-parallel plan of {type(self.inner).__name__}"
            matched = self._match({start + pattern: style for pattern, style in own.items()}, name, is_strict=False)
            return self._less_experts(matched)
        return {}

    def _less_experts(self, styles: Styles) -> Styles:
        """Leave out the styles of experts that ep ranks have whole."""
        starts = tuple(f"{name}." for name in self.spread)
        return {name: style for name, style in styles.items() if not f"{name}.".startswith(starts)}

    def _match(self, plan: Mapping[str, str], what: str, *, is_strict: bool) -> Styles:
        every = [name for name, _ in (*self.model.named_modules(), *self.model.named_parameters())]
        styles: Styles = {}
        for pattern, style in plan.items():
            if not isinstance(style, str) or not is_style(style):
                raise CannotRun(
                    f"{what} has style {style!r} for {pattern}, which is not known; give tp_plan= with"
                    " colwise, rowwise, packed:3, vocabulary, sequence or replicate"
                )
            fits = re.compile(re.escape(pattern).replace(r"\*", r"[^.]+"))
            names = [name for name in every if fits.fullmatch(name)]
            if not names and is_strict:
                raise CannotRun(f"{what}: {pattern!r} fits no module or parameter of {type(self.inner).__name__}")
            styles.update(dict.fromkeys(names, style))
        return styles

    # Blocks: styles and variants are tried on a copy of the first of each kind; the first that is right is taken.

    def _plans(self, blocks: Mapping[str, nn.Module], within: Mapping[str, Styles]) -> dict[Any, _Plan]:
        plans: dict[Any, _Plan] = {}
        trial: Trial | None = None
        signatures = {name: units.signature_of(block, within[name]) for name, block in blocks.items()}
        alike = Counter(signatures.values())
        for name, block in blocks.items():
            signature = signatures[name]
            if signature not in plans:
                trial = trial or Trial(self.inner, block, self.ranks, self.device, sequence=self.sequence)
                plans[signature] = self._choose(name, block, within[name], trial, alike[signature])
        return plans

    def _choose(self, name: str, block: nn.Module, styles: Styles, trial: Trial, count: int) -> _Plan:
        """Choose how the units of `count` blocks like this one are split."""
        candidates = units.units_of(block, styles, self._around_spread(block))
        chosen: list[Choice] = []
        if not styles and candidates and not trial.runs(block):
            raise CannotRun(
                f"tensor parallelism found layers of {name} to split, and cannot check them: the block does not run on"
                " activations alone; name styles by tp_plan=, for example"
                f' {{"{re.sub(r"[0-9]+", "*", name)}.up": "colwise"}}'
            )
        for unit, possible in candidates:
            where = f"{name}.{unit}" if unit else name
            where += f" and {count - 1} like it" if count > 1 else ""
            choice, problem = self._choose_styles(block, unit, possible, chosen, trial)
            if choice is None:
                self._notice(f"tensor parallelism leaves {where} whole: split, it would not compute the same{problem}")
                continue
            chosen.append(choice)
            if choice.variant.gathers:
                self._notice(
                    f"tensor parallelism splits weights of {where} and gathers what they compute, which is slower"
                    f"{self._instead(block.get_submodule(unit), possible[-1], problem)}"
                )
        summed = trial.agrees(block, chosen, self._split_block)
        if summed is None:
            what = "sequence parallelism" if self.sequence else "tensor parallelism"
            raise CannotRun(
                f"{what}: {type(block).__name__}, split, does not compute what it computes whole{trial.problem}; let it"
                " take shapes from its projections' outputs, or name styles by tp_plan="
            )
        return _Plan(choices=tuple(chosen), summed=summed if trial.runs(block) else None)

    def _choose_styles(
        self, block: nn.Module, unit: str, possible: Sequence[Styles], before: Sequence[Choice], trial: Trial
    ) -> tuple[Choice | None, str]:
        """Return the first choice that is right, and what stood against one before it."""
        problem = ""
        for styles in possible:
            module = block.get_submodule(unit)
            for variant in units.variants_of(module, styles, sequence=self.sequence, is_block=not unit):
                choice = Choice(unit=unit, styles=styles, variant=variant)
                try:
                    if trial.agrees(block, [*before, choice], self._split_block) is not None:
                        return choice, problem
                    problem = trial.problem
                except NotSplit as reason:
                    problem = f" ({reason})"
        return None, problem

    def _instead(self, unit: nn.Module, styles: Styles, problem: str) -> str:
        """Say why the outputs of column layers have to be gathered, and what a script can do about it."""
        if not any(style in ROWS for style in styles.values()):
            columns = " and ".join(name for name, style in styles.items() if is_columns(style))
            return f': give the layer that takes what {columns} makes the style "rowwise" in tp_plan='
        divides = all(widths(layer)[1] % self.ranks.size == 0 for layer in unit.modules() if is_linear(layer))
        if divides and not any(has_heads(module) for module in unit.modules()):
            return ": if it is attention, name the attribute with its number of heads num_heads, to split by heads"
        return problem

    def _notice(self, text: str) -> None:
        if not is_fake(self.model) and self.ranks.rank == 0 and (not dist.is_initialized() or dist.get_rank() == 0):
            notice(text)

    def _split_block(self, block: nn.Module, choices: Sequence[Choice]) -> Applied:
        applied = Applied()
        for choice in choices:
            unit = block.get_submodule(choice.unit)
            how = {"sequence": self.sequence, "is_block": not choice.unit}
            applied.add(choice.unit, split_unit(unit, choice.styles, self.randomness, choice.variant, **how))
        if self.sequence:
            names = {name for name, _ in block.named_parameters()}
            around = self._around_spread(block)
            whole = Variant(shares_input=False)  # what is left whole needs the whole sequence
            for name in [unit for unit in units.whole_units(block, choices) if unit not in around]:
                unit = block.get_submodule(name)
                applied.add(name, split_unit(unit, {}, self.randomness, whole, sequence=True, is_block=False))
            applied.summed |= names - applied.splits.keys() - applied.complete
            draw_own(block, self.randomness)
        return applied

    def _around_spread(self, block: nn.Module) -> list[str]:
        """Name modules with experts that ep ranks will have: they take this rank's part of the sequence as it is."""
        return units.around_mixtures(block) if self.spread else []

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
        tied: dict[int, Split] = {}
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
            tied[id(first)] = splits["weight"]
        if head is not None:
            self._split_head(head, names[id(head)], tied)

    def _take_one(self, name: str, style: str) -> None:
        owner, _, last = name.rpartition(".")
        unit, whole = self.model.get_submodule(owner), Variant(shares_input=False)
        applied = split_unit(unit, {last: style}, self.randomness, whole, sequence=False, is_block=True)
        prefix = f"{owner}." if owner else ""
        self.parts.splits.update((prefix + key, split) for key, split in applied.splits.items())
        self.parts.summed.update(prefix + key for key in applied.summed)
        self.changes += applied.changes

    def _split_head(self, head: Any, name: str, tied: dict[int, Split]) -> None:
        local_loss = _has_causal_loss(self.inner) and head is _of(self.inner, "get_output_embeddings")
        split = tied.get(id(head.weight))
        vocabulary = head.weight.shape[0] if split is None else split.shape[0]
        gathered = 0 if local_loss else vocabulary
        if split is not None:  # its weight is this rank's already
            as_columns(head, self.ranks, gathered_length=gathered)
            splits = {"weight": split, **split_in_place(head, {"bias": 0}, split.pieces)}
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
        """Have modules compute with whole parameters inside."""
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


def _of(model: Any, getter: str) -> Any:
    try:
        return getattr(model, getter)()
    except (AttributeError, NotImplementedError):
        return None


def _ends(inner: nn.Module, blocks: Sequence[nn.Module], named: set[nn.Module] | None) -> tuple[Any, Any]:
    """Return embedding and head over the vocabulary, where both that share a weight can be split.

    With `named` those alone that the script names, and what shares a weight with them.
    """
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
    """Return whether a model's forward pass makes its loss of the head's whole weight, without the head's own."""
    forward: Any = inspect.unwrap(inner.forward)
    is_liger = type(inner).forward.__module__.startswith("liger_kernel")
    return is_liger or getattr(forward, "multiplies_with_head", False)


def _weight_in(module: Any) -> Any:
    return own_parameters(module).get("weight")


def _has_causal_loss(inner: Any) -> bool:
    """Return whether a model's loss is transformers' cross-entropy of the next token through `loss_function`."""
    function = getattr(inner, "loss_function", None)
    if getattr(function, "__name__", "") != "ForCausalLMLoss":
        return False
    code = inspect.unwrap(type(inner).forward).__code__
    return "loss_function" in code.co_names
