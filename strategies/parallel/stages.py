"""Cut a model into pipeline stages, by what its own forward pass does.

A forward pass under fake tensors shows which weights are used before the stack of blocks, inside it and after it, and
what goes from block to block. A stage then runs the model's own forward with the blocks of other stages replaced: the
one before its first gives what was received, the one after its last ends the pass. Whatever comes before the blocks
besides weights (masks, positions) is so computed on every stage, as the model does it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, update_wrapper
from itertools import accumulate, pairwise, product
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from planner.cost.split import blocks_per_piece, why_other_layers
from planner.types.plan import Configuration
from strategies.errors import CannotRun
from strategies.parallel.blocks import Elsewhere, block_stacks, members
from strategies.parallel.empty import stand_in
from strategies.parallel.mesh import Mesh
from strategies.parallel.model import CALL_TRAIN_BATCH, Arguments, Partition, SplitOptions
from strategies.parallel.ranks import SEQUENCE, tokens_of_each
from strategies.parallel.split import ModelParts
from strategies.torch_compat.dispatch import FakeTensorMode, without_fake_log
from strategies.torch_compat.tensors import own_modules, own_parameters, replace_modules, tree_leaves, tree_map_only

_ATTRIBUTE = "_dsplan_stages"
_READS = frozenset({"__get__", "size", "dim", "numel", "element_size", "stride", "is_floating_point"})
"""Calls on a weight that do not use its values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Travel:
    """Message from one stage to the next: hidden states of a micro-batch."""

    sizes: tuple[int | tuple[str | int, int], ...]
    """Of each dimension: a number, or the argument of the model (by name or place) and its dimension that it is."""
    dtype: torch.dtype
    cp: int = 1
    """How many ranks share the tokens of every sample, which their hidden states have in dimension `SEQUENCE`."""

    def shape(self, arguments: Arguments) -> tuple[int, ...]:
        """For a micro-batch with these arguments of the model, which are of whole samples.

        Raises:
            CannotRun: the tokens do not divide over the ranks that share them.
        """
        inputs = _tensors(arguments)
        sizes = [size if isinstance(size, int) else inputs[size[0]].shape[size[1]] for size in self.sizes]
        if self.cp > 1:
            sizes[SEQUENCE] = tokens_of_each(sizes[SEQUENCE], self.cp)
        return tuple(sizes)


class Stages:
    """The stages of a model that this rank has, and the forward pass of each."""

    def __init__(self, model: nn.Module, stack: nn.Module, cut: _Cut, travels: Sequence[Travel]) -> None:
        self.number, self.own, self.ranges, self._ranks = cut.number, cut.own, cut.ranges, cut.ranks
        self._stack, self._travels = stack, travels
        self._forward: Callable[..., Any] = model.forward
        self._running: int | None = None
        self.is_looked_at = False
        self.requirements: list[Callable[[Arguments], None]] = []
        self._received: torch.Tensor | None = None
        self._of: dict[int, dict[str, nn.Module | None]] = {}

    @property
    def has_first(self) -> bool:
        """True if the first stage is on this rank."""
        return 0 in self.own

    @property
    def has_last(self) -> bool:
        """True if the last stage, which makes the loss, is on this rank."""
        return self.number - 1 in self.own

    def require(self, arguments: Arguments) -> None:
        """Ask what was required of the model's arguments, on every rank before it waits for another.

        Raises:
            CannotRun: they are not what the model can be run with.
        """
        for requirement in self.requirements:
            requirement(arguments)

    def received_by(self, stage: int) -> Travel:
        """Return what a stage but the first receives."""
        return self._travels[self.ranges[stage].start - 1]

    def lies_on(self, stage: int) -> int:
        """Return the rank of the pipeline that has a stage."""
        return stage % self._ranks

    @contextmanager
    def running(self, stage: int, received: torch.Tensor | None) -> Iterator[None]:
        """Have calls of the model inside run a stage, with what the stage before it made."""
        self._running, self._received = stage, received
        before = own_modules(self._stack)
        replace_modules(self._stack, self._of.get(stage, before))
        try:
            yield
        finally:
            replace_modules(self._stack, before)
            self._running = self._received = None

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the stage in the place of the model: return hidden states, or the last stage's result."""
        if self._running is None:
            raise CannotRun(CALL_TRAIN_BATCH)
        try:
            return self._forward(*args, **kwargs)
        except _Passed as passed:
            hidden, passed.hidden = passed.hidden, None
            return hidden

    def pass_on(self, index: int, hidden: torch.Tensor) -> torch.Tensor:
        """Return what a block that is elsewhere gives: nothing before the stage's, and behind them nothing comes."""
        assert self._running is not None
        here = self.ranges[self._running]
        if index >= here.stop:
            raise _Passed(hidden)
        if self.is_looked_at and index == here.start - 1:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)
                return torch.randn(hidden.shape, dtype=hidden.dtype).to(hidden.device)
        return hidden if self._received is None or index < here.start - 1 else self._received


class _Passed(Exception):
    """A stage's last block is over."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__("the stage is over")
        self.hidden: torch.Tensor | None = hidden


def stages_of(model: nn.Module) -> Stages | None:
    """Return the stages of a model that was cut; None of a whole one."""
    stages = model.__dict__.get(_ATTRIBUTE)
    return stages if isinstance(stages, Stages) else None


@contextmanager
def show_inputs(model: nn.Module) -> Iterator[None]:
    """Have calls of a model inside show what this rank's first blocks are called with, whatever they return.

    Hidden states are random where another stage makes them.
    """
    stages = next((vars(module)["stages"] for module in model.modules() if isinstance(module, Elsewhere)), None)
    if stages is None:
        yield
        return
    stages.is_looked_at = True
    try:
        with stages.running(stages.own[0], None):
            yield
    finally:
        stages.is_looked_at = False


def cut_stages(model: nn.Module, mesh: Mesh, options: SplitOptions, parts: ModelParts) -> None:
    """Leave this rank's stages of a model in place.

    The memory of what other stages have is freed, whoever holds the parameters. A weight that is used before the blocks
    and after them (tied embeddings) stays on the first stage and on the last.

    Raises:
        CannotRun: the model cannot be cut; the line says what stands against it.
    """
    configuration = options.configuration
    number = configuration.pp * configuration.virtual_stages
    stack = _stack_of(model, number)
    record = _record_pass(model, stack, options)
    counts = _blocks_of_each(model, stack, record, options)
    ranges = [range(first, end) for first, end in pairwise(accumulate(counts, initial=0))]
    own = [stage for stage in range(number) if stage % configuration.pp == mesh.rank("pp")]
    cut = _Cut(number=number, own=own, ranges=ranges, ranks=configuration.pp)
    device = mesh.environment.device

    def nothing(weight: torch.Tensor) -> torch.Tensor:
        dtype = _computed_in(weight.dtype, configuration)  # rotary positions have the dtype of hidden states
        return stand_in(weight.shape, dtype, device)

    _drop_outside(model, record, cut, parts, nothing)
    stages = Stages(model, stack, cut, record.travels)
    _drop_blocks(stack, stages, record)
    parts.blocks = tuple(ranges[stage] for stage in own)
    vars(model)[_ATTRIBUTE] = stages
    # What splits the model further reads which arguments it takes.
    vars(model)["forward"] = update_wrapper(partial(stages.run), model.forward)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Cut:
    """Assignment of blocks to stages, and of stages to this rank."""

    number: int
    own: Sequence[int]
    ranges: Sequence[range]
    ranks: int


def _stack_of(model: nn.Module, number: int) -> nn.Module:
    name = type(model).__name__
    stacks = block_stacks(model)
    if len(stacks) > 1:
        raise CannotRun(
            f"a pipeline cuts one stack of blocks, and {name} has {len(stacks)}; use tp or cp, or give pp 1"
        )
    if not stacks:
        raise CannotRun(
            f"a pipeline cuts a stack of like blocks (a ModuleList of one class), and {name} has none; put its blocks"
            " in a ModuleList, or give pp 1"
        )
    blocks = len(members(stacks[0]))
    if blocks < number:
        raise CannotRun(f"{name} has {blocks} blocks, and the pipeline has {number} stages; use fewer stages")
    return stacks[0]


# What a forward pass shows.


@dataclass(kw_only=True, slots=True)
class _Record:
    """Uses that the forward pass of the whole model makes of its weights and its blocks."""

    before: set[nn.Parameter]
    """Weights used before the blocks, and those that are not used at all."""
    after: set[nn.Parameter]
    called_after: set[nn.Module]
    """Modules that run after the blocks."""
    travels: list[Travel]
    """What each block but the last gives to the next."""
    makers: list[Callable[[torch.Tensor], Any]]
    """What each block returns, from its hidden states."""
    place: str | int
    """The argument of a block that hidden states are."""
    products: list[int]
    """Floating-point operations of the products in each block, and last of those after them."""


class _Watch(TorchFunctionMode):
    """Notes which weights are used in which part of a forward pass, and what every block is given and returns."""

    def __init__(self, model: nn.Module, stack: nn.Module) -> None:
        super().__init__()
        self.part = -1
        self.uses: dict[nn.Parameter, set[int]] = {parameter: set() for parameter in model.parameters()}
        self.called_after: set[nn.Module] = set()
        self.given: list[dict[str | int, Any]] = []
        self.made: list[Any] = []
        self.counter = FlopCounterMode(display=False)
        self.products: list[int] = []
        self._blocks = {block: index for index, block in enumerate(members(stack))}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.__name__ not in _READS:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, nn.Parameter) and leaf in self.uses:
                    self.uses[leaf].add(self.part)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def watching(self) -> Iterator[None]:
        handles: list[Any] = [register_module_forward_pre_hook(self._called)]
        for block in self._blocks:
            handles.append(block.register_forward_pre_hook(self._begins, with_kwargs=True))
            handles.append(block.register_forward_hook(self._ends))
        try:
            with self.counter, self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _called(self, module: nn.Module, _: Any) -> None:
        if self.part == len(self._blocks):
            self.called_after.add(module)

    def _begins(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.part = self._blocks[block]
        self.products.append(self.counter.get_total_flops())
        self.given.append(_by_place_or_name(args, kwargs))

    def _ends(self, block: nn.Module, _: Any, output: Any) -> None:
        self.made.append(output)
        if self._blocks[block] + 1 == len(self._blocks):
            self.products.append(self.counter.get_total_flops())
        self.part = self._blocks[block] + 1 if self._blocks[block] + 1 == len(self._blocks) else self._blocks[block]


def _record_pass(model: nn.Module, stack: nn.Module, options: SplitOptions) -> _Record:
    """Look at a forward pass under fake tensors.

    Raises:
        CannotRun: there is nothing to call it with, or it does what no pipeline can cut.
    """
    name, problem, device = type(model).__name__, "", next(model.parameters()).device
    for arguments, kinds in product(options.examples or _usual_arguments(model, options), (_as_they_are, _as_stubs)):
        watch, fake = _Watch(model, stack), FakeTensorMode(allow_non_fake_inputs=True)
        try:
            with without_fake_log(), kinds(stack), fake, torch.random.fork_rng(devices=[]):
                inputs = tree_map_only(torch.Tensor, lambda leaf: _empty(leaf, device), arguments)
                with watch.watching(), _autocast(options.configuration, device), torch.enable_grad():
                    output = model(*inputs[0], **inputs[1])
        except Exception as error:  # a script's own module may raise anything
            problem = problem or (str(error).strip().splitlines() or [type(error).__name__])[0]
            continue
        return _read(model, stack, watch, inputs, output, options.configuration)
    raise CannotRun(
        f"a pipeline is cut by a look at a forward pass of {name}, and there is none: "
        + (problem or "give training_data= or sample_data= to dsplan.initialize")
    )


@contextmanager
def _as_they_are(stack: nn.Module) -> Iterator[None]:
    yield


@contextmanager
def _as_stubs(stack: nn.Module) -> Iterator[None]:
    """Blocks that give on hidden states: some run what fake tensors cannot (grouped products, choices by value)."""
    before = {block: vars(block).get("forward") for block in members(stack)}
    for block in before:
        block.forward = _Stub(block)
    try:
        yield
    finally:
        for block, forward in before.items():
            del block.forward
            if forward is not None:
                block.forward = forward


class _Stub:
    def __init__(self, block: nn.Module) -> None:
        self._weight = next(block.parameters())

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        floats = (leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, torch.Tensor))
        hidden = next(leaf for leaf in floats if leaf.is_floating_point())
        return hidden + self._weight.sum().to(hidden.dtype)


def _empty(leaf: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty(leaf.shape, dtype=leaf.dtype, device=device)


_TOKENS = ("input_ids", "labels", "ids", "idx", "tokens", "targets")


def _usual_arguments(model: nn.Module, options: SplitOptions) -> list[Arguments]:
    """Token ids and labels, where a model asks for nothing else."""
    accepted = inspect.signature(model.forward).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [item.name for item in accepted if item.default is item.empty and item.kind not in kinds]
    tokens = [item.name for item in accepted if item.name in _TOKENS]
    if not tokens or not set(required) <= set(_TOKENS):
        return []
    ids = torch.zeros(2, options.configuration.sequence_length, dtype=torch.long)
    return [((), dict.fromkeys(tokens, ids))]


def _read(
    model: nn.Module, stack: nn.Module, watch: _Watch, inputs: Arguments, output: Any, plan: Configuration
) -> _Record:
    name, blocks = type(model).__name__, members(stack)
    if len(watch.made) != len(blocks):
        raise CannotRun(
            f"{name} runs {len(watch.made)} blocks and has {len(blocks)}; a pipeline runs each of them once"
        )
    key_of_hidden = _place_of_hidden(name, watch)
    hidden = [given[key_of_hidden] for given in watch.given]
    for given in watch.given:
        beside = {key: leaf for key, value in given.items() if key != key_of_hidden for leaf in tree_leaves(value)}
        trained = [key for key, leaf in beside.items() if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        if trained:
            raise CannotRun(
                f"the blocks of {name} take {trained[0]!r} beside hidden states, which is made from weights; a pipeline"
                " sends hidden states alone, so use tp or cp"
            )
    _require_one_way(name, hidden[0], watch.made[-1], output)
    in_blocks = [set(block.parameters()) for block in blocks]
    inside = set().union(*in_blocks)
    if sum(map(len, in_blocks)) > len(inside):
        raise CannotRun(f"blocks of {name} share weights, which a pipeline would have on several stages; use tp or cp")
    before, after = set[nn.Parameter](), set[nn.Parameter]()
    for parameter, uses in watch.uses.items():
        if parameter in inside:
            if uses & {-1, len(blocks)}:
                raise CannotRun(f"{name} uses weights of a block outside of it, which a pipeline cannot; use tp or cp")
            continue
        if uses - {-1, len(blocks)}:
            raise CannotRun(f"blocks of {name} use weights that are none of theirs; a pipeline cannot, so use tp or cp")
        if len(blocks) in uses:
            after.add(parameter)
        if -1 in uses or not uses:
            before.add(parameter)
    return _Record(
        before=before,
        after=after,
        called_after=watch.called_after,
        travels=[_travel(output, inputs, plan) for output in hidden[1:]],
        makers=[_maker(name, output, states) for output, states in zip(watch.made, hidden[1:], strict=False)],
        place=key_of_hidden,
        products=[end - begin for begin, end in pairwise([*watch.products, watch.counter.get_total_flops()])],
    )


def _place_of_hidden(name: str, watch: _Watch) -> str | int:
    """Find the argument of every block that is what the block before it made."""
    candidates: set[str | int] = set(watch.given[0])
    for output, given in zip(watch.made, watch.given[1:], strict=False):
        leaves = {id(leaf) for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)}
        candidates &= {key for key, value in given.items() if id(value) in leaves}
    if not candidates:
        raise CannotRun(
            f"{name} changes hidden states between its blocks, or blocks do not take them as an argument of their own;"
            " put the change into the block, or use tp or cp"
        )
    return min(candidates, key=str)


def _require_one_way(name: str, first: torch.Tensor, last: Any, output: Any) -> None:
    """Check that what comes after the blocks takes nothing of what comes before them but what the blocks made."""
    earlier = _nodes([first.grad_fn], stop=set())
    last_nodes = {leaf.grad_fn for leaf in tree_leaves(last) if isinstance(leaf, torch.Tensor)}
    results = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    later = _nodes([leaf.grad_fn for leaf in results], stop=last_nodes)
    crossing = {node for node in earlier & later if not hasattr(node, "variable")}
    if crossing:
        raise CannotRun(
            f"{name} uses after its blocks what it computed before them; a pipeline sends hidden states alone, so use"
            " tp or cp"
        )


def _nodes(roots: Iterable[Any], *, stop: set[Any]) -> set[Any]:
    """Return the nodes of an autograd graph that are reached from some without passing others."""
    reached, waiting = set[Any](), [node for node in roots if node is not None and node not in stop]
    while waiting:
        node = waiting.pop()
        if node in reached:
            continue
        reached.add(node)
        waiting += [after for after, _ in node.next_functions if after is not None and after not in stop]
    return reached


def _tensors(arguments: Arguments) -> dict[str | int, torch.Tensor]:
    arguments_by_key = _by_place_or_name(*arguments)
    return {key: value for key, value in arguments_by_key.items() if isinstance(value, torch.Tensor) and value.dim()}


def _by_place_or_name(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str | int, Any]:
    by_key: dict[str | int, Any] = dict(enumerate(args))
    by_key.update(kwargs)
    return by_key


_COMPUTE = {"bf16": torch.bfloat16, "fp16": torch.float16, "bf16-pure": torch.bfloat16}


def _is_cast(plan: Configuration) -> bool:
    """Return whether autocast makes the precision, and weights keep their dtype."""
    return plan.strategy in ("single", "ddp") and plan.precision in ("bf16", "fp16")


def _autocast(plan: Configuration, device: torch.device) -> AbstractContextManager[object]:
    return torch.autocast(device.type, dtype=_COMPUTE[plan.precision]) if _is_cast(plan) else nullcontext()


def _travel(hidden: torch.Tensor, inputs: Arguments, plan: Configuration) -> Travel:
    """Write the shape in terms of what the model is called with; the last dimension is always the model's own."""
    sizes: list[int | tuple[str | int, int]] = []
    for dimension, size in enumerate(hidden.shape):
        sources = [
            (key, axis)
            for key, tensor in _tensors(inputs).items()
            for axis, length in enumerate(tensor.shape)
            if length == size and dimension < hidden.dim() - 1
        ]
        sources.sort(key=lambda source: (source[1] != dimension, str(source[0]) != "input_ids"))
        sizes.append(sources[0] if sources else size)
    return Travel(sizes=tuple(sizes), dtype=_computed_in(hidden.dtype, plan), cp=plan.cp)


def _computed_in(dtype: torch.dtype, plan: Configuration) -> torch.dtype:
    """Return the dtype of hidden states: sharded weights compute in the plan's, whatever they were loaded in."""
    return dtype if _is_cast(plan) else _COMPUTE.get(plan.precision, dtype)


def _maker(name: str, output: Any, hidden: torch.Tensor) -> Callable[[torch.Tensor], Any]:
    """Return what makes a block's result with other hidden states in it."""
    if isinstance(output, torch.Tensor):
        return lambda states: states
    if not isinstance(output, tuple):
        raise CannotRun(
            f"blocks of {name} return a {type(output).__name__}; have them return hidden states, or a tuple with them"
        )
    # What else a block returns (attention weights) no block is given: it would require gradients.
    return lambda states: tuple(states if value is hidden else None for value in output)


# Where to cut.


@dataclass(frozen=True, kw_only=True, slots=True)
class _Costs:
    """Weights that balance stages: before the blocks, of each block, and after them."""

    before: float
    blocks: Sequence[float]
    after: float


def _blocks_of_each(model: nn.Module, stack: nn.Module, record: _Record, options: SplitOptions) -> tuple[int, ...]:
    """Return how many blocks each stage has: as the plan names them, else as the script has them cut.

    Raises:
        CannotRun: both name a cut, or the plan's is of another model.
    """
    plan, blocks = options.configuration, len(members(stack))
    number, named = plan.pp * plan.virtual_stages, plan.stage_layers
    if named and options.partition != "uniform":
        raise CannotRun(
            f"the plan gives stages {plan.layers_per_stage} blocks, and pipeline.partition of the config is"
            f" {options.partition}; leave one of them out"
        )
    if problem := why_other_layers(named, blocks, type(model).__name__):
        raise CannotRun(problem)
    if options.partition == "uniform":
        return named or blocks_per_piece(blocks, number)
    return _counts(_costs(model, stack, record, options.partition), number)


def _costs(model: nn.Module, stack: nn.Module, record: _Record, partition: Partition) -> _Costs:
    def size(parameters: Iterable[nn.Parameter]) -> float:
        return float(sum(parameter.numel() for parameter in parameters))

    if partition == "seconds" and all(record.products):
        # Products are what a step's time goes into: those of the head and the loss too, while a table is looked up.
        return _Costs(before=0.0, blocks=record.products[:-1], after=record.products[-1])
    blocks = [size(block.parameters()) for block in members(stack)]
    return _Costs(before=size(record.before), blocks=blocks, after=size(record.after))


def _counts(costs: _Costs, number: int) -> tuple[int, ...]:
    """Share blocks out so that the largest stage is as small as can be, and of such cuts the earlier are smaller."""
    blocks = len(costs.blocks)
    sums = list(accumulate(costs.blocks, initial=0.0))

    def cost(first: int, end: int, stage: int) -> float:
        ends = (costs.before if stage == 0 else 0.0) + (costs.after if stage == number - 1 else 0.0)
        return sums[end] - sums[first] + ends

    best: list[dict[int, tuple[float, tuple[int, ...]]]] = [{0: (0.0, ())}]
    for stage in range(number):
        row: dict[int, tuple[float, tuple[int, ...]]] = {}
        for first, (largest, counts) in best[-1].items():
            for end in range(first + 1, blocks - (number - stage - 1) + 1):
                cut = max(largest, cost(first, end, stage)), (*counts, end - first)
                row[end] = min(row.get(end, cut), cut)
        best.append(row)
    return best[-1][blocks][1]


# Leaving out what other stages have.


def _drop_outside(
    model: nn.Module, record: _Record, cut: _Cut, parts: ModelParts, nothing: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Put `nothing`, a stand-in of no memory, for other stages' weights outside the blocks: only their dtype counts."""
    is_first, is_last = 0 in cut.own, cut.number - 1 in cut.own
    names: dict[nn.Parameter, str] = {parameter: name for name, parameter in model.named_parameters()}
    shared = record.before & record.after
    heads = {parameter: _head_of(model, parameter, names[parameter], record) for parameter in shared}
    for path, module in list(model.named_modules()):
        for name, parameter in list(own_parameters(module).items()):
            if parameter is None or parameter not in record.before | record.after:
                continue
            own = f"{path}.{name}" if path else name
            is_here = is_first and parameter in record.before
            is_here |= is_last and parameter in record.after and own in heads.get(parameter, (own,))
            if not is_here:
                del own_parameters(module)[name]
                vars(module)[name] = nothing(parameter)
    if is_first != is_last:
        for parameter, own_names in heads.items():
            parts.shared[names[parameter] if is_first else own_names[0]] = names[parameter]
    _free(names, model)


def _head_of(model: nn.Module, parameter: nn.Parameter, canonical: str, record: _Record) -> tuple[str, ...]:
    """Name a weight in the modules that use it after the blocks.

    Raises:
        CannotRun: no module but that before the blocks has it.
    """
    # A loss that makes no logits takes the weight from its layer, and does not call that.
    whole: Any = model
    head = whole.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    names = tuple(
        f"{path}.{name}" if path else name
        for path, module in model.named_modules()
        for name, weight in own_parameters(module).items()
        if weight is parameter and (module in record.called_after or module is head)
    )
    if not names or canonical in names:
        raise CannotRun(
            f"{type(model).__name__} uses {canonical} before its blocks and after them; give the head a layer of its"
            " own whose weight is tied to it (head.weight = embedding.weight)"
        )
    return names


def _drop_blocks(stack: nn.Module, stages: Stages, record: _Record) -> None:
    """Replace the blocks of other stages, and for each stage those of this rank's other stages."""
    blocks = dict(own_modules(stack))
    indices = {key: index for index, key in enumerate(blocks)}
    away = {key: _elsewhere(block, indices[key], stages, record) for key, block in blocks.items() if block is not None}

    def with_own(own: Iterable[range]) -> dict[str, nn.Module | None]:
        here = {index for part in own for index in part}
        return {key: blocks[key] if index in here else away[key] for key, index in indices.items()}

    replace_modules(stack, with_own(stages.ranges[stage] for stage in stages.own))
    if len(stages.own) > 1:
        stages._of = {stage: with_own([stages.ranges[stage]]) for stage in stages.own}
    for key, block in blocks.items():
        if block is not None and own_modules(stack)[key] is not block:
            for tensor in [*block.parameters(), *block.buffers()]:
                tensor.data = tensor.data.new_empty(0)


def _elsewhere(block: nn.Module, index: int, stages: Stages, record: _Record) -> Elsewhere:
    stand_in = Elsewhere(block)
    returned = record.makers[min(index, len(record.makers) - 1)]

    def forward(*args: Any, **kwargs: Any) -> Any:
        hidden = args[record.place] if isinstance(record.place, int) else kwargs[record.place]
        return returned(stages.pass_on(index, hidden))

    stand_in.forward = forward  # type: ignore[method-assign]
    vars(stand_in)["stages"] = stages
    return stand_in


def _free(names: Mapping[nn.Parameter, str], model: nn.Module) -> None:
    here = set(model.parameters())
    for parameter in names:
        if parameter not in here:
            parameter.data = parameter.data.new_empty(0)


def without_elsewhere(model: nn.Module, given: Any) -> Any:
    """Leave what other stages have out of an optimizer, or of parameters, (name, parameter) pairs or their groups."""
    here = set(model.parameters())

    def left(items: Iterable[Any]) -> list[Any]:
        kept: list[Any] = []
        for item in items:
            if isinstance(item, Mapping):
                own = item["params"]
                kept.append({**item, "params": left([own] if isinstance(own, torch.Tensor) else own)})
            elif (item[1] if isinstance(item, tuple) else item) in here:
                kept.append(item)
        return kept

    if not isinstance(given, torch.optim.Optimizer):
        return None if given is None else left(given)
    for group in given.param_groups:
        for parameter in group["params"]:
            if parameter not in here:
                given.state.pop(parameter, None)
        group["params"] = left(group["params"])
    return given
