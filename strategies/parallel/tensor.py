"""Tensor parallelism of a live model: each rank keeps its part of the layers that a plan names, in place.

A plan says for modules by name how they are split, in the words of transformers' `base_model_tp_plan`. Where neither
the script nor the model brings one, pairs of layers around an attention or an MLP are found by running a block, and
what was found is checked by running it again, split.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from strategies.errors import CannotRun
from strategies.parallel.blocks import repeated_blocks
from strategies.parallel.layers import (
    ColumnParallelLinear,
    Group,
    RowParallelLinear,
    VocabParallelEmbedding,
    copy_to_ranks,
    gather,
    own_part,
    reduce_scatter,
    sum_over_ranks,
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
    widths,
)
from strategies.parallel.mesh import Mesh
from strategies.parallel.model import SplitOptions
from strategies.parallel.split import ModelParts, Split, even_split, hold_part, note_split, splits_in


@dataclass(frozen=True, kw_only=True, slots=True)
class Style:
    """How a module is split."""

    kind: str
    """colwise (some of the outputs), rowwise (a term of all outputs), table (some rows of an embedding), experts (some
    of every expert's inner width), summed (whole, with a term of the gradient on every rank), or whole."""
    fused: int = 1
    """Products of equal width in one weight, each of which is split."""
    whole_outside: bool = False
    """Columns gather their outputs, rows take whole inputs."""


_STYLES: dict[str, Style] = {
    "colwise": Style(kind="colwise"),
    "colwise_rep": Style(kind="colwise", whole_outside=True),
    "colwise_gather_output": Style(kind="colwise", whole_outside=True),
    "packed_colwise": Style(kind="colwise", fused=2),
    "rowwise": Style(kind="rowwise"),
    "rowwise_rep": Style(kind="rowwise", whole_outside=True),
    "rowwise_split_input": Style(kind="rowwise", whole_outside=True),
    "embedding_rowwise": Style(kind="table"),
    "moe_tp_experts": Style(kind="experts"),
    "replicated_with_grad_allreduce": Style(kind="summed"),
    "sequence_parallel": Style(kind="whole"),
    "replicate": Style(kind="whole"),
}
"""By the words that scripts and transformers' plans use; `packed:3` are columns of three products in one."""
_EXPERT_WEIGHTS = {"gate_up_proj": (1, 2), "down_proj": (2, 1)}
"""Dimension, and products in one, of transformers' routed experts: [experts, outputs, inputs]."""


def split_layers(model: nn.Module, mesh: Mesh, options: SplitOptions, parts: ModelParts) -> None:
    """Split a whole model's layers over the tp ranks, by the script's plan, the model's own, or one found by rule.

    Raises:
        CannotRun: a plan names a module or a style that there is not, widths do not divide, or no plan can be found.
    """
    group, ranks = mesh.group("tp"), mesh.size("tp")
    same_random_state(mesh)
    if any(isinstance(module, _PARALLEL) for module in model.modules()):
        parts.splits.update(splits_in(model))  # the script's own blocks are split already
        return
    splitter = _Splitter(group=group, rank=mesh.rank("tp"), ranks=ranks, model=model)
    is_sequence_parallel = options.configuration.sequence_parallel
    named = _plan_of(model, options.tp_plan)
    if named:
        splitter.by_plan(named, is_sequence_parallel=is_sequence_parallel)
    elif is_sequence_parallel:
        raise CannotRun(
            f"sequence parallelism needs the places where {type(model).__name__} gathers its tokens, and it has no"
            " tensor-parallel plan; use --no-sequence-parallel"
        )
    else:
        splitter.by_rule()
    splitter.head(_loss_of(model))
    splitter.tables(named)
    parts.splits.update(splits_in(model))
    parts.summed.update(splitter.summed)


def same_random_state(mesh: Mesh) -> None:
    """Give the tp ranks of a group one random state: what all of them have whole must be dropped out alike."""
    device = mesh.environment.device
    state = torch.get_rng_state().to(device)
    dist.broadcast(state, mesh.ranks("tp")[0], group=mesh.group("tp"))
    torch.set_rng_state(state.cpu())
    if device.type == "cuda":
        on_device = torch.cuda.get_rng_state(device).to(device)
        dist.broadcast(on_device, mesh.ranks("tp")[0], group=mesh.group("tp"))
        torch.cuda.set_rng_state(on_device.cpu(), device)


_PARALLEL = (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)


def unwrapped(model: nn.Module) -> Any:
    """The model inside PEFT's adapters."""
    inner: Any = model
    return inner.get_base_model() if hasattr(inner, "get_base_model") else inner


# Plans: the script's, and transformers' own.


def _plan_of(model: nn.Module, asked: Mapping[str, str]) -> dict[str, Style]:
    """Styles by the names of modules, and of parameters that are not in a layer of their own."""
    own = unwrapped(model)
    prefix = "" if own is model else f"{next(name for name, module in model.named_modules() if module is own)}."
    plan: Mapping[str, str] = asked or getattr(own, "tp_plan", None) or getattr(own, "_tp_plan", None) or {}
    names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    found: dict[str, Style] = {}
    for pattern, word in plan.items():
        style = _style(word, pattern)
        shape = re.compile(re.escape(pattern if asked else prefix + pattern).replace(r"\*", r"[^.]+"))
        matching = [name for name in names if shape.fullmatch(name)]
        if not matching and asked:
            raise CannotRun(f"tp_plan: no module of {type(model).__name__} is named like {pattern!r}")
        found.update((name, style) for name in matching)
    has_layers = any(style.kind in ("colwise", "rowwise") and not style.whole_outside for style in found.values())
    return found if has_layers or asked else {}


def _style(word: str, pattern: str) -> Style:
    packed = re.fullmatch(r"packed:(\d+)", word)
    if packed:
        return Style(kind="colwise", fused=int(packed[1]))
    if word not in _STYLES:
        raise CannotRun(
            f"tp_plan: {pattern} is {word!r}, which is not run here; choose from {', '.join(_STYLES)}, packed:N"
        )
    return _STYLES[word]


@dataclass(kw_only=True, slots=True)
class _Splitter:
    """Splits one model's modules in place over the ranks of a group."""

    group: Group
    rank: int
    ranks: int
    model: nn.Module
    summed: set[str]

    def __init__(self, *, group: Group, rank: int, ranks: int, model: nn.Module) -> None:
        self.group, self.rank, self.ranks, self.model, self.summed = group, rank, ranks, model, set()

    def by_plan(self, named: Mapping[str, Style], *, is_sequence_parallel: bool) -> None:
        modules = dict(self.model.named_modules())
        layers = {name: style for name, style in named.items() if name in modules and style.kind in _LAYERS}
        heads = {name for name, style in layers.items() if style.kind == "colwise" and style.whole_outside}
        parents = self._parents({name: style for name, style in layers.items() if name not in heads}, modules)
        for name, style in layers.items():
            if name in heads and modules[name] is self._head:
                continue  # with its loss
            parent = name.rpartition(".")[0]
            self.layer(modules[name], style, name, copies=parent not in parents, parent=modules.get(parent))
        for name, style in named.items():
            if style.kind == "summed":
                self.summed.update(f"{name}.{own}" for own, _ in modules[name].named_parameters())
            if style.kind == "experts":
                self._experts(modules[name], name, copies=not is_sequence_parallel)
        rows = {name for name, style in layers.items() if style.kind == "rowwise"}
        for parent in parents:
            # What acts on this rank's heads alone (norms of queries and keys) has a term of its gradient here.
            inside = [f"{parent}.{name}" for name, _ in modules[parent].named_parameters()]
            split = splits_in(self.model)
            self.summed.update(name for name in inside if name not in split and name.rpartition(".")[0] not in rows)
        if is_sequence_parallel:
            self._split_sequence(parents, modules)
        else:
            for name in parents:
                modules[name].register_forward_pre_hook(partial(_copied, self.group), with_kwargs=True)

    def by_rule(self) -> None:
        blocks = repeated_blocks(self.model)
        found = _Found.of(blocks[0], self) if blocks else None
        if found is None or not found.pairs:
            raise CannotRun(
                f"nothing is known of how the layers of {type(self.model).__name__} split over tp ranks; give"
                ' tp_plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}'
            )
        for block in blocks:
            found.apply(block, self)

    def layer(self, module: nn.Module, style: Style, name: str, *, copies: bool, parent: nn.Module | None) -> None:
        """Split a linear layer, nn.Linear's [outputs, inputs] or transformers' Conv1D's [inputs, outputs]."""
        weight = getattr(module, "weight", None)
        if not isinstance(weight, nn.Parameter) or weight.dim() != 2:
            raise CannotRun(f"{name} is a {type(module).__name__} and no linear layer that tp ranks could split")
        outputs, inputs = (0, 1) if isinstance(module, nn.Linear) else (1, 0)
        if style.kind == "colwise" and (few := self._few_heads(module, name, parent)):
            self._repeated_heads(module, name, few, copies=copies)
            return
        if style.kind == "colwise":
            self._hold(module, "weight", outputs, style.fused, name)
            self._hold(module, "bias", 0, style.fused, name)
        else:
            self._hold(module, "weight", inputs, 1, name)
        if isinstance(module, nn.Linear):
            kind = ColumnParallelLinear if style.kind == "colwise" else RowParallelLinear
            module.__class__ = kind
            settings: dict[str, Any] = (
                {"gather_output": style.whole_outside, "fused": style.fused, "copies_input": copies}
                if style.kind == "colwise"
                else {"input_is_parallel": not style.whole_outside, "scatters_sequence": False, "sums_terms": True}
            )
            module.__dict__.update(group=self.group, **settings)
        else:
            forward = _conv_columns if style.kind == "colwise" else _conv_rows
            module.__dict__["forward"] = partial(forward, module, self.group, style, copies)
        if style.kind == "colwise" and not style.whole_outside and parent is not None:
            self._fewer_heads(parent)

    def head(self, loss: Callable[..., Any] | None) -> None:
        """Split the head over the vocabulary, where the loss can be made of its parts; with it the table that it is."""
        head, table = self._head, self._tokens
        if head is None or not isinstance(head, nn.Linear) or loss is None or isinstance(head, _PARALLEL):
            return
        is_tied = table is not None and table.weight is head.weight
        lengths, first = self._rows(head)
        even = None if len(set(lengths)) == 1 else tuple(lengths)
        head.__dict__["forward"] = partial(_vocabulary_head, head, self.group, even)
        if is_tied and table is not None:
            note_split(table, "weight", splits_in(head)["weight"])
            table.__dict__["forward"] = partial(_table_rows, table, self.group, first)
        owner: Any = self._causal_lm
        owner.loss_function = partial(_vocabulary_loss, owner, self.group, first, loss)
        owner.register_forward_pre_hook(_labels_are_given, with_kwargs=True)
        owner.register_forward_hook(partial(_whole_logits, head, self.group, even), with_kwargs=True)

    def tables(self, named: Mapping[str, Style]) -> None:
        """Split the embeddings that a plan names, by their rows."""
        modules = dict(self.model.named_modules())
        for name, style in named.items():
            if style.kind == "table":
                self._table(modules[name])

    @property
    def _causal_lm(self) -> Any:
        return unwrapped(self.model)

    @property
    def _head(self) -> nn.Linear | None:
        own = self._causal_lm
        return own.get_output_embeddings() if hasattr(own, "get_output_embeddings") else None

    @property
    def _tokens(self) -> Any:
        own = self._causal_lm
        return own.get_input_embeddings() if hasattr(own, "get_input_embeddings") else None

    def _hold(self, module: nn.Module, name: str, dim: int, fused: int, path: str) -> None:
        parameter = getattr(module, name, None)
        if parameter is None:
            return
        try:
            split = even_split(parameter.shape, dim, rank=self.rank, ranks=self.ranks, fused=fused)
        except ValueError as problem:
            raise CannotRun(f"tp {self.ranks} does not divide {path}.{name}: {problem}; use another tp") from None
        hold_part(parameter, split)
        note_split(module, name, split)

    def _parents(self, layers: Mapping[str, Style], modules: Mapping[str, nn.Module]) -> set[str]:
        """Attentions and MLPs all of whose input goes to split layers: it is copied, or gathered, once for all."""
        found = set()
        for parent in {name.rpartition(".")[0] for name in layers}:
            inside = {
                name for name, module in modules.items() if name.startswith(f"{parent}.") and _takes_hidden(module)
            }
            if parent and inside <= layers.keys() and any(layers[name].kind == "rowwise" for name in inside):
                found.add(parent)
        return found

    def _few_heads(self, module: nn.Module, name: str, parent: nn.Module | None) -> int:
        """The width of a key or value head, where there are fewer of them than ranks; 0 elsewhere."""
        head_dim = getattr(parent, "head_dim", None)
        is_key = name.rpartition(".")[2] in ("k_proj", "v_proj")
        if not isinstance(head_dim, int) or not is_key or not isinstance(module, nn.Linear):
            return 0
        heads = module.out_features // head_dim
        if heads % self.ranks == 0:
            return 0
        if self.ranks % heads:
            raise CannotRun(f"tp {self.ranks} and the {heads} heads of {name} do not divide; use another tp")
        return head_dim

    def _repeated_heads(self, module: nn.Module, name: str, head_dim: int, *, copies: bool) -> None:
        """Keep keys and values whole where ranks share a head, and let each take the head that its queries want."""
        linear: Any = module
        first = self.rank * (linear.out_features // head_dim) // self.ranks * head_dim
        linear.forward = partial(_own_head, linear, self.group, first, head_dim, copies)
        self.summed.update(f"{name}.{own}" for own, _ in module.named_parameters())

    def _fewer_heads(self, parent: nn.Module) -> None:
        """Make an attention's counts those of this rank's heads."""
        if parent.__dict__.get("_dsplan_heads") is not None:
            return
        parent.__dict__["_dsplan_heads"] = self.ranks
        config = getattr(parent, "config", None)
        for name in ("num_heads", "num_attention_heads", "num_key_value_heads", "split_size"):
            value = parent.__dict__.get(name)
            if isinstance(value, int):
                parent.__dict__[name] = max(value // self.ranks, 1)
        queries, keys = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
        if isinstance(queries, int) and isinstance(keys, int) and hasattr(parent, "num_key_value_groups"):
            parent.__dict__["num_key_value_groups"] = (queries // self.ranks) // max(keys // self.ranks, 1)

    def _experts(self, module: nn.Module, name: str, *, copies: bool) -> None:
        for weight, (dim, fused) in _EXPERT_WEIGHTS.items():
            if not isinstance(getattr(module, weight, None), nn.Parameter):
                raise CannotRun(
                    f"{name} has no {weight}, so that tp ranks cannot split its experts; use --ep, or --tp 1"
                )
            self._hold(module, weight, dim, fused, name)
        if copies:
            module.__dict__["forward"] = partial(_experts, module, module.forward, self.group)

    def _table(self, module: nn.Module) -> None:
        if not isinstance(module, nn.Embedding):
            raise CannotRun(f"tp_plan: a {type(module).__name__} is no table whose rows could be split")
        if "weight" in splits_in(module):
            return  # with the head that it is tied to
        _, first = self._rows(module)
        module.__dict__["forward"] = partial(_table_rows, module, self.group, first)

    def _rows(self, module: nn.Linear | nn.Embedding) -> tuple[list[int], int]:
        """Keep this rank's rows of a vocabulary, which need not divide; how many each rank has, and its first."""
        lengths = list(widths(module.weight.shape[0], self.ranks))
        first = sum(lengths[: self.rank])
        for name, parameter in list(module.named_parameters(recurse=False)):
            pieces = ((first, first + lengths[self.rank]),)
            split = Split(shape=tuple(parameter.shape), dim=0, pieces=pieces, over="tp")
            hold_part(parameter, split)
            note_split(module, name, split)
        return lengths, first

    def _split_sequence(self, parents: set[str], modules: Mapping[str, nn.Module]) -> None:
        """Between the first block's input and the last one's output every rank has some of the tokens; what takes part
        in a split product gathers them, and scatters the sums."""
        blocks = repeated_blocks(self.model)
        names = {module: name for name, module in modules.items()}
        for block in blocks:
            path = names[block]
            borders = {name for name in parents if name.startswith(f"{path}.")}
            mixtures = {name for name, module in modules.items() if _is_mixture(module) and name.startswith(f"{path}.")}
            borders = {name for name in borders if not any(name.startswith(f"{mixture}.") for mixture in mixtures)}
            for name in borders | mixtures:
                modules[name].register_forward_pre_hook(partial(_gathered, self.group), with_kwargs=True)
                self._scatters(modules[name])
            inside = [name for name, _ in block.named_parameters()]
            self.summed.update(f"{path}.{name}" for name in inside if f"{path}.{name}" not in splits_in(self.model))
        blocks[0].register_forward_pre_hook(partial(_own_tokens, self.group), with_kwargs=True)
        blocks[-1].register_forward_hook(partial(_all_tokens, self.group))

    def _scatters(self, module: nn.Module) -> None:
        is_mixture = _is_mixture(module)
        if is_mixture:
            module.register_forward_hook(partial(_scattered, self.group))
        for part in module.modules():
            if isinstance(part, RowParallelLinear):
                part.__dict__["sums_terms" if is_mixture else "scatters_sequence"] = not is_mixture


_LAYERS = ("colwise", "rowwise")


def _takes_hidden(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _is_mixture(module: nn.Module) -> bool:
    return isinstance(getattr(module, "experts", None), nn.Module)


def _loss_of(model: nn.Module) -> Callable[..., Any] | None:
    """transformers' loss of causal language models, where a model uses it."""
    own = unwrapped(model)
    if not type(own).__module__.startswith("transformers.") or not hasattr(own, "loss_function"):
        return None
    loss: Callable[..., Any] = own.loss_function
    return loss if getattr(loss, "__name__", "") == "ForCausalLMLoss" else None


# What split modules do instead of their own forward pass, and around it.


def _conv_columns(module: Any, group: Group, style: Style, copies: bool, x: torch.Tensor) -> torch.Tensor:
    here = copy_to_ranks(x, group) if copies else x
    return torch.addmm(module.bias, here.flatten(0, -2), module.weight).view(*x.shape[:-1], -1)


def _conv_rows(module: Any, group: Group, style: Style, copies: bool, x: torch.Tensor) -> torch.Tensor:
    here = own_part(x, -1, group) if style.whole_outside else x
    total = sum_over_ranks((here.flatten(0, -2) @ module.weight).view(*x.shape[:-1], -1), group)
    outputs: torch.Tensor = total + module.bias
    return outputs


def _own_head(module: Any, group: Group, first: int, width: int, copies: bool, x: torch.Tensor) -> torch.Tensor:
    here = copy_to_ranks(x, group) if copies else x
    return functional.linear(here, module.weight, module.bias).narrow(-1, first, width)


def _experts(module: nn.Module, forward: Any, group: Group, hidden: torch.Tensor, index: Any, weights: Any) -> Any:
    return sum_over_ranks(forward(copy_to_ranks(hidden, group), index, copy_to_ranks(weights, group)), group)


def _table_rows(table: Any, group: Group, first: int, ids: torch.Tensor) -> torch.Tensor:
    return vocab_parallel_embedding(ids, table.weight, group, first)


def _vocabulary_head(head: Any, group: Group, lengths: Sequence[int] | None, hidden: torch.Tensor) -> torch.Tensor:
    logits = functional.linear(copy_to_ranks(hidden, group), head.weight, head.bias)
    return logits if head.__dict__.get("_dsplan_labels") else gather(logits, -1, group, lengths=lengths)


def _labels_are_given(owner: Any, args: Any, kwargs: Mapping[str, Any]) -> None:
    owner.get_output_embeddings().__dict__["_dsplan_labels"] = kwargs.get("labels") is not None


def _whole_logits(
    head: Any, group: Group, lengths: Sequence[int] | None, owner: Any, args: Any, kwargs: Any, output: Any
) -> Any:
    """Logits that leave the model are whole; in training they are left out, since only the loss is made of them."""
    if not head.__dict__.get("_dsplan_labels") or getattr(output, "logits", None) is None:
        return output
    output.logits = None if owner.training else gather(output.logits, -1, group, lengths=lengths)
    return output


def _vocabulary_loss(
    owner: Any,
    group: Group,
    first: int,
    usual: Callable[..., Any],
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor:
    """transformers' `ForCausalLMLoss` of this rank's part of the logits."""
    if not owner.get_output_embeddings().__dict__.get("_dsplan_labels"):
        found: torch.Tensor = usual(
            logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **options
        )
        return found
    if shift_labels is None:
        shift_labels = functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.reshape(-1).to(logits.device)
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = vocab_parallel_cross_entropy(
        logits.reshape(-1, logits.shape[-1]),
        targets,
        group,
        first=first,
        ignore_index=ignore_index,
        reduction=reduction,
    )
    return loss if num_items_in_batch is None else loss / num_items_in_batch


def _on_hidden(change: Callable[[torch.Tensor], torch.Tensor], args: Any, kwargs: dict[str, Any]) -> Any:
    """Arguments with the hidden states changed, which come first or by name."""
    if args and isinstance(args[0], torch.Tensor):
        return (change(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}


def _copied(group: Group, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    return _on_hidden(lambda hidden: copy_to_ranks(hidden, group), args, kwargs)


def _gathered(group: Group, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    return _on_hidden(lambda hidden: gather(hidden, 1, group, sums_gradients=True), args, kwargs)


def _own_tokens(group: Group, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    return _on_hidden(lambda hidden: own_part(hidden, 1, group), args, kwargs)


def _all_tokens(group: Group, module: nn.Module, args: Any, output: Any) -> Any:
    return _on_first(lambda hidden: gather(hidden, 1, group), output)


def _scattered(group: Group, module: nn.Module, args: Any, output: Any) -> Any:
    return _on_first(lambda hidden: reduce_scatter(hidden, 1, group), output)


def _on_first(change: Callable[[torch.Tensor], torch.Tensor], output: Any) -> Any:
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


# Blocks without a plan.


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pair:
    """Layers by name in a block: columns that take one input, and the row layer that follows them."""

    columns: tuple[str, ...]
    row: str
    fused: int
    whole_outside: bool = False
    counts: tuple[tuple[str, str], ...] = ()
    """Counts of an attention that become this rank's: (module, attribute)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """How a block's layers split."""

    pairs: tuple[_Pair, ...]

    @classmethod
    def of(cls, block: nn.Module, splitter: _Splitter) -> _Found:
        """The pairs of a block, each of them checked: split, it gives what it gave whole."""
        calls = _calls(block)
        if calls is None:
            return cls(pairs=())
        example, whole, order = calls
        kept: list[_Pair] = []
        for pair in _pairs(block, order):
            for candidate in _ways(block, pair):
                if _gives_the_same(block, (candidate,), splitter, example, whole):
                    kept.append(candidate)
                    break
        return cls(pairs=tuple(kept))

    def apply(self, block: nn.Module, splitter: _Splitter) -> None:
        _apply(block, self.pairs, splitter)


def _apply(block: nn.Module, pairs: Sequence[_Pair], splitter: _Splitter) -> None:
    modules = dict(block.named_modules())
    for pair in pairs:
        columns = Style(kind="colwise", fused=pair.fused, whole_outside=pair.whole_outside)
        for name in pair.columns:
            splitter.layer(modules[name], columns, name, copies=True, parent=None)
        row = Style(kind="rowwise", whole_outside=pair.whole_outside)
        splitter.layer(modules[pair.row], row, pair.row, copies=True, parent=None)
        for name, attribute in pair.counts:
            setattr(modules[name], attribute, getattr(modules[name], attribute) // splitter.ranks)


def _calls(block: nn.Module) -> tuple[torch.Tensor, torch.Tensor, list[tuple[str, torch.Tensor]]] | None:
    """A small input, what the block makes of it, and its linear layers with their inputs, in the order of use; None
    where the block wants more than hidden states."""
    linear = {module: name for name, module in block.named_modules() if _takes_hidden(module)}
    if not linear:
        return None
    first: Any = next(iter(linear))
    order: list[tuple[str, torch.Tensor]] = []
    handles = [
        module.register_forward_pre_hook(lambda module, args: order.append((linear[module], args[0])))
        for module in linear
    ]
    was_training = block.training
    try:
        block.eval()
        inputs = first.weight.shape[1 if isinstance(first, nn.Linear) else 0]
        generator = torch.Generator().manual_seed(0)
        example = torch.randn(1, 8, inputs, generator=generator).to(first.weight)
        with torch.no_grad():
            output = block(example)
    except Exception:  # whatever a script's block raises where it is not given all that it wants
        return None
    finally:
        block.train(was_training)
        for handle in handles:
            handle.remove()
    return example, _first(output), order


def _first(output: Any) -> torch.Tensor:
    found: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return found


def _pairs(block: nn.Module, order: Sequence[tuple[str, torch.Tensor]]) -> Iterator[_Pair]:
    """Layers that take the same tensor, each time followed by one that leads back to the hidden states."""
    modules = dict(block.named_modules())
    groups: list[tuple[list[str], torch.Tensor]] = []
    for name, given in order:
        if groups and groups[-1][1] is given:
            groups[-1][0].append(name)
        else:
            groups.append(([name], given))
    used = -1
    for index, ((columns, _), (rows, _)) in enumerate(pairwise(groups)):
        if len(rows) != 1 or index <= used:
            continue
        inputs, outputs = _shape(modules[rows[0]])
        wide = _shape(modules[columns[0]])[1]
        if outputs != _shape(modules[columns[0]])[0] or wide % inputs or (len(columns) > 1 and wide != inputs):
            continue
        used = index + 1
        yield _Pair(columns=tuple(columns), row=rows[0], fused=wide // inputs)


def _shape(module: Any) -> tuple[int, int]:
    """Inputs and outputs of a linear layer."""
    first, second = module.weight.shape
    return (second, first) if isinstance(module, nn.Linear) else (first, second)


def _ways(block: nn.Module, pair: _Pair) -> Iterator[_Pair]:
    """How a pair may split, the best first: as it is, with an attention's counts made this rank's, or, where neither
    gives the same, with whole activations between."""
    yield pair
    modules = dict(block.named_modules())
    width = _shape(modules[pair.row])[0]
    owner = pair.columns[0].rpartition(".")[0]
    attributes = vars(modules[owner])
    heads = [name for name, value in attributes.items() if _is_count(name, value)]
    sizes = [name for name, value in attributes.items() if value == width and name not in heads]
    for names in (heads, [*heads, *(name for name in sizes if "split" in name)], [*heads, *sizes]):
        yield replace(pair, counts=tuple((owner, name) for name in names))
    yield replace(pair, whole_outside=True)


def _is_count(name: str, value: object) -> bool:
    is_number = isinstance(value, int) and not isinstance(value, bool) and value > 1
    return is_number and "head" in name and not any(word in name for word in ("dim", "size"))


def _gives_the_same(
    block: nn.Module, pairs: Sequence[_Pair], splitter: _Splitter, example: torch.Tensor, whole: torch.Tensor
) -> bool:
    """Whether a copy of a block, split so, makes the same of the same input; called by all ranks together."""
    split = copy.deepcopy(block).eval()
    try:
        _apply(split, pairs, splitter)
        with torch.no_grad():
            found = _first(split(example))
        same = found.shape == whole.shape and torch.allclose(found.float(), whole.float(), rtol=1e-2, atol=1e-3)
    except Exception:  # a forward pass that does not go with the split raises what it likes, on every rank the same
        same = False
    verdict = torch.tensor(float(same), device=example.device)
    dist.all_reduce(verdict, op=dist.ReduceOp.MIN, group=splitter.group)
    return bool(verdict.item())
