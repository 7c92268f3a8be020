"""Blocks: memory forms of decoders that were not traced, from the traits of the code base that runs them.

A block is written as the operations of its forward, each with what it keeps for its backward. Walking them forwards and
backwards gives what `planner.cost.memory.activations.form` keeps of a traced module: bytes kept, and the moments that
can be a peak. How a tensor is divided over ranks follows from its symbols, as it does for traced forms
(`form.per_rank`): what has a width that tensor parallelism splits has all positions of its rank, what lies between
products (norms, residuals, dropout) a part of them under sequence parallelism.

Sources: autograd saves what the derivative's formula names (torch `tools/autograd/derivatives.yaml`); what a compiler
keeps is what torch's min-cut partitioner keeps of a LlamaDecoderLayer and a GPT2Block (torch 2.13): inputs of products,
outputs of products, attention's tensors, the block's input and the norms' scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import field, replace

from hardware_db.records import dataclass
from planner.cost.code_bases import BlockTraits, LogitBytes, Traits
from planner.cost.memory.activations.form import ZERO, BlockForm, Form, Moment, Polynomial, add, scale
from planner.models.facts import ModelFacts
from planner.vocabulary import DEFAULT_RECOMPUTED, Loss

WIDTHS = {"autocast": (2, 4), "mixed": (2, 2), "pure": (2, 2), "fp32": (4, 4)}
"""Bytes of what products compute in, and of the residual stream, by precision mode; `mixed` is autocast over frozen
16-bit weights, which it has not to cast."""
COPIED: LogitBytes = {"forward": (1, 8), "backward": (0, 12)}
"""torch's cross-entropy of fp32 logits: the logits, their fp32 copy and its log-softmax; then that, its gradient and
the logits' gradient."""
CHUNKS = 8
"""Chunks of the tokens whose logits are made one after the other (torchtitan `ChunkedLossWrapper.Config.num_chunks`,
torchtune `LinearCrossEntropyLoss`, both 8)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """One operation of a forward: what it `reads`, what it `makes`, what it `keeps` until its own backward.

    `weights` in elements; `product` marks what selective checkpointing may keep; a `sum` hands its gradient on as it
    is; `working` and `working_back` are bytes it needs only while it runs.
    """

    reads: tuple[str, ...]
    makes: tuple[str, ...]
    keeps: tuple[str, ...] = ()
    weights: Polynomial = field(default_factory=dict)
    product: bool = False
    is_sum: bool = False
    working: Polynomial = field(default_factory=dict)
    working_back: Polynomial = field(default_factory=dict)


class Walk:
    """A list of operations from `x` to `y`, with the bytes of every tensor.

    Views share the storage of another; `frozen` weights get no gradients.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        sizes: dict[str, Polynomial],
        views: dict[str, str],
        *,
        casts: bool,
        frozen: bool = False,
    ) -> None:
        self._operations, self._sizes, self._views = operations, sizes, views
        self._casts, self._frozen = casts, frozen

    def _storages(self, names: Iterable[str]) -> dict[str, Polynomial]:
        storages = (self._views.get(name, name) for name in names)
        return {name: self._sizes[name] for name in storages}

    def _kept_by(self, operations: Iterable[Operation]) -> dict[str, Polynomial]:
        """Return what is kept, without the block's input, which is another's to count."""
        kept = self._storages(name for operation in operations for name in operation.keeps)
        return {name: size for name, size in kept.items() if name != "x"}

    @property
    def kept(self) -> Polynomial:
        """Tensors that some operation keeps for its backward."""
        return add(self._kept_by(self._operations).values())

    def kept_beside(self, dropped: Iterable[str]) -> Polynomial:
        """Return what is kept where recomputation drops some tensors and makes them again before they are needed."""
        kept = self._kept_by(self._operations)
        return add(size for name, size in kept.items() if name not in dropped)

    @property
    def keeps_its_input(self) -> bool:
        """True if the block's input is among what is kept."""
        return any("x" in operation.keeps for operation in self._operations)

    @property
    def cast(self) -> Polynomial:
        """Autocast's copies of weights."""
        return self._cast(self._operations)

    def _cast(self, operations: Iterable[Operation]) -> Polynomial:
        return scale(add(operation.weights for operation in operations if operation.product), 2.0 * self._casts)

    def forward(self, beside: Sequence[Polynomial] = ()) -> tuple[Moment, ...]:
        """Return a moment per operation; `beside`, if given, is what waits at each of them besides."""
        moments = []
        for index, operation in enumerate(self._operations):
            so_far = self._operations[: index + 1]
            later = {name for other in self._operations[index + 1 :] for name in other.reads}
            outputs = {name for other in so_far for name in other.makes}
            in_use = self._storages(
                (outputs & (later | {"y"})) | set(operation.makes) | (set(operation.reads) & outputs)
            )
            alive = {**self._kept_by(so_far), **in_use}
            size = add((*alive.values(), operation.working, beside[index] if beside else ZERO))
            moments.append(Moment(activations=size, cast=self._cast(so_far), gradients=ZERO))
        return tuple(moments)

    def backward(self, held: Polynomial = ZERO) -> tuple[Moment, ...]:
        """Return a moment per operation, last to first.

        Alive are what is still kept, the gradients of activations that wait, and the weights' gradients so far; `held`
        is there at all of them.
        """
        gradients: dict[str, str] = {"y": "y"}
        moments: list[Moment] = []
        weight_gradients: Polynomial = ZERO
        for index in reversed(range(len(self._operations))):
            operation = self._operations[index]
            before = self._operations[: index + 1]
            given = {name: gradients.pop(name) for name in operation.makes if name in gradients}
            waiting = {*given.values(), *gradients.values()}
            fresh = [] if operation.is_sum else [name for name in operation.reads if name in self._sizes]
            weights = ZERO if self._frozen else operation.weights
            weight_gradients = add((weight_gradients, weights))
            alive = (
                *self._kept_by(before).values(),
                *(self._gradient(name) for name in waiting),
                *(self._gradient(name) for name in fresh),
                scale(weights, 2.0 * self._casts),
                operation.working_back,
                held,
            )
            moments.append(Moment(activations=add(alive), cast=self._cast(before), gradients=weight_gradients))
            for name in operation.reads:
                # A second gradient of one tensor is added to the first in place. A sum hands its own on, which is that
                # of the block's output where the operations behind it are left out.
                gradients.setdefault(name, next(iter(given.values()), "y") if operation.is_sum else name)
        return tuple(moments)

    def _gradient(self, name: str) -> Polynomial:
        """Bytes of a gradient; a view has one of its own until its storage's is put together."""
        return self._sizes[name]

    def products(self, choice: str) -> tuple[Operation, ...]:
        """Return the operations whose outputs selective checkpointing keeps."""
        products = [operation for operation in self._operations if operation.product]
        weighed = [operation for operation in products if operation.weights]
        skipped = weighed[1::2] if choice == "every-second-product" else []
        return tuple(operation for operation in products if operation not in skipped)

    def outputs(self, operations: Iterable[Operation]) -> Polynomial:
        """Bytes of what operations make."""
        return add(self._storages(name for operation in operations for name in operation.makes).values())

    def waiting(self, operations: Sequence[Operation]) -> list[Polynomial]:
        """Return, for each operation of a run again, the outputs kept from the first one that are still to be used."""
        return [
            self.outputs(operation for operation in operations if operation in self._operations[index + 1 :])
            for index in range(len(self._operations))
        ]

    @property
    def last(self) -> str:
        """The last operation's addition to the residual: nothing needs it in the backward, unless it is kept."""
        return self._operations[-1].reads[-1]

    def without_the_end(self) -> Walk:
        """Up to the last operation that keeps something: where a run again stops early."""
        last = max((index for index, operation in enumerate(self._operations) if operation.keeps), default=-1)
        operations = self._operations[: last + 1]
        return Walk(operations, self._sizes, self._views, casts=self._casts, frozen=self._frozen)


class _Writer:
    """A writer of one block of a model, operation by operation.

    `frozen` products and norms keep nothing for the sake of their weights.
    """

    def __init__(self, facts: ModelFacts, traits: BlockTraits, mode: str, attention: str, *, frozen: bool) -> None:
        self._facts, self._traits, self._attention, self._frozen = facts, traits, attention, frozen
        self._width, self._residual = WIDTHS[mode]
        self._mode = mode
        self._operations: list[Operation] = []
        self._views: dict[str, str] = {}
        self._sizes: dict[str, Polynomial] = {"x": self._stream()}

    def _stream(self) -> Polynomial:
        return {"b h s": self._residual}

    def _between(self, width: float) -> Polynomial:
        return {"b h s": width}

    def _add(self, operation: Operation, **sizes: Polynomial) -> None:
        self._operations.append(operation)
        self._sizes.update(sizes)

    def dense(self) -> Walk:
        return self._block(self._mlp)

    def routed(self) -> Walk:
        return self._block(self._experts)

    def _block(self, mlp: Callable[[str], None]) -> Walk:
        facts = self._facts
        self._norm("x", "n1")
        self._latent_attention() if facts.mla is not None else self._attend()
        attended = self._after("o", "attended") if facts.norms_per_layer > 2 or facts.post_norm else "o"
        attended = self._dropped(attended)
        if facts.parallel_residual:
            source = "n1"
            if facts.norms_per_layer > 1:
                self._norm("x", "n2")
                source = "n2"
            mlp(source)
            self._add(Operation(reads=("x", attended), makes=("x2",), is_sum=True), x2=self._stream())
        else:
            self._add(Operation(reads=("x", attended), makes=("x2",), is_sum=True), x2=self._stream())
            self._norm("x2", "n2", instead=attended)
            mlp("n2")
        out = self._after("out", "ended") if facts.norms_per_layer > 2 or facts.post_norm else "out"
        out = self._dropped(out)
        self._add(Operation(reads=("x2", out), makes=("y",), is_sum=True), y=self._stream())
        casts = self._mode == "autocast"
        return Walk(self._operations, self._sizes, self._views, casts=casts, frozen=self._frozen)

    def _norm(self, source: str, name: str, *, instead: str = "") -> None:
        """Write a norm; a compiler that would keep the sum before the second keeps `instead` what was added to it."""
        scale, statistics = f"{name} scale", f"{name} input"
        if self._facts.norm != "rmsnorm":
            self._sizes[scale] = {"b s": 8}
        else:
            self._sizes[scale] = {"b s": 4}
        composite = self._traits.norm == "composite" and self._facts.norm == "rmsnorm"
        own = instead if instead and self._traits.sums == "recomputed" else source
        if composite and self._residual != 4:
            self._sizes[statistics] = self._between(4)
            own = statistics
        kept = [own, scale]
        if composite and not self._frozen:
            self._sizes[f"{name} normalised"] = self._between(4 if self._mode == "autocast" else self._width)
            kept.append(f"{name} normalised")
        wide = self._between(4) if self._mode == "autocast" else ZERO
        back = self._between(12) if composite else wide
        self._add(
            Operation(
                reads=(source,),
                makes=(name,),
                keeps=tuple(kept),
                weights={"h": 1 if self._facts.norm == "rmsnorm" else 2},
                working=self._between(4) if composite else wide,
                working_back=back,
            ),
            **{name: self._between(self._width)},
        )

    def _after(self, source: str, name: str) -> str:
        self._norm(source, name)
        return name

    def _linear(self, source: str, name: str, size: Polynomial, weights: Polynomial) -> None:
        """Write a product, which keeps its input for the sake of its weight."""
        kept = () if self._frozen else (source,)
        self._add(Operation(reads=(source,), makes=(name,), keeps=kept, weights=weights, product=True), **{name: size})

    def _attend(self) -> None:
        facts, width, traits = self._facts, self._width, self._traits
        query, key = {"a b d s": width}, {"b d g s": width}
        query_weights, key_weights = {"a d h": 1}, {"d g h": 1}
        rotates = facts.position_type == "rope"
        names = {"q": query, "k": key, "v": key}
        if traits.qkv == "fused":
            whole = add((query, key, key))
            self._linear("n1", "qkv", whole, add((query_weights, key_weights, key_weights)))
            if traits.copies_value and self._attention != "eager" and (rotates or facts.qk_norm):
                self._sizes |= names
            elif rotates or facts.qk_norm:
                self._views["v"] = "qkv"
                self._sizes |= {"v": key}
                for name in ("q", "k"):
                    self._views[name] = "qkv"
                    self._sizes[name] = names[name]
            else:
                self._views |= dict.fromkeys(names, "qkv")
                self._sizes |= names
            self._add(Operation(reads=("qkv",), makes=("q", "k", "v")))
        else:
            for name, weights in (("q", query_weights), ("k", key_weights), ("v", key_weights)):
                self._linear("n1", name, names[name], weights)
        projections = {name: name for name in names}
        if facts.qk_norm:
            for name in ("q", "k"):
                normed = f"{name} normed"
                self._add(Operation(reads=(name,), makes=(normed,), keeps=(name,)), **{normed: names[name]})
                projections[name] = normed
        if rotates:
            for name in ("q", "k"):
                turned = f"{name} turned"
                halves = scale(names[name], 2.0) if traits.rotary == "composite" else ZERO
                self._add(
                    Operation(reads=(projections[name],), makes=(turned,), working=halves, working_back=halves),
                    **{turned: names[name]},
                )
                projections[name] = turned
        if traits.repeats_keys and facts.num_kv_heads < facts.num_heads:
            for name in ("k", "v"):
                self._add(
                    Operation(reads=(projections[name],), makes=(f"{name} repeated",)), **{f"{name} repeated": query}
                )
                projections[name] = f"{name} repeated"
        self._scores(tuple(projections.values()), query)
        self._linear("attended heads", "o", self._between(self._width), query_weights)

    def _latent_attention(self) -> None:
        """Multi-head latent attention as DeepSeek-V3 has it: queries and keys by way of narrow, normalised vectors."""
        width = self._width
        ranked = bool(self._facts.mla and self._facts.mla.q_lora_rank)
        queries = {"a b n s": width, "a b o s": width}
        if ranked:
            self._linear("n1", "q low", {"b ql s": width}, {"h ql": 1})
            self._add(
                Operation(reads=("q low",), makes=("q normed",), keeps=("q low",)), **{"q normed": {"b ql s": width}}
            )
        self._linear("q normed" if ranked else "n1", "q", queries, {"a n ql": 1, "a o ql": 1} if ranked else {"a h": 1})
        self._linear("n1", "kv low", {"b kl s": width, "b o s": width}, {"h kl": 1, "h o": 1})
        self._add(
            Operation(reads=("kv low",), makes=("kv normed",), keeps=("kv low",)), **{"kv normed": {"b kl s": width}}
        )
        self._linear("kv normed", "kv", {"a b n s": width, "a b s v": width}, {"a kl n": 1, "a kl v": 1})
        self._add(Operation(reads=("q",), makes=("q turned",)), **{"q turned": queries})
        self._add(Operation(reads=("kv", "kv low"), makes=("k", "v")), k=queries, v={"a b s v": width})
        self._scores(("q turned", "k", "v"), {"a b s v": width})
        self._linear("attended heads", "o", self._between(width), {"a h v": 1})

    def _scores(self, projections: tuple[str, ...], size: Polynomial) -> None:
        width, traits = self._width, self._traits
        if self._attention == "eager":
            factor = width / 2
            dropped = self._facts.attention_dropout > 0
            each = traits.saved_score_bytes if dropped else min(traits.saved_score_bytes, 2.0)
            self._sizes["scores"] = {"a b s s": each * factor}
            beside: Polynomial = {"a b s s": 2 * width}
        else:
            self._sizes["scores"] = {"a b s": 4}
            beside = ZERO
        self._add(
            Operation(
                reads=projections,
                makes=("attended heads", "scores"),
                keeps=(*projections, "attended heads", "scores"),
                product=self._attention != "eager",
                working=beside,
                working_back=beside,
            ),
            **{"attended heads": size},
        )

    def _dropped(self, source: str) -> str:
        """Write dropout, which keeps a byte for each element, and return its output."""
        if not self._facts.hidden_dropout:
            return source
        mask, name = f"{source} mask", f"{source} dropped"
        self._add(
            Operation(reads=(source,), makes=(name,), keeps=(mask,)),
            **{mask: self._between(1), name: self._between(self._width)},
        )
        return name

    def _mlp(self, source: str) -> None:
        self._feed_forward(source, out="out", batch="b", width="f", size=self._between(self._width))

    def _feed_forward(self, source: str, *, out: str, batch: str, width: str, size: Polynomial, mark: str = "") -> None:
        """Gate and up, or one product; what they make together; down again."""
        inner: Polynomial = {" ".join(sorted((*batch.split(), *width.split(), "s"))): float(self._width)}
        weights = {" ".join(sorted(("h", width.split()[-1]))): 1.0}
        gate, up, product = (f"{name}{mark}" for name in ("gate", "up", "made"))
        if self._facts.gated_mlp:
            self._linear(source, gate, inner, weights)
            self._linear(source, up, inner, weights)
            if self._traits.activation == "composite":
                opened = f"{gate} opened"
                self._add(Operation(reads=(gate,), makes=(opened,), keeps=(gate,)), **{opened: inner})
                self._add(Operation(reads=(opened, up), makes=(product,), keeps=(opened, up)), **{product: inner})
            else:
                self._add(Operation(reads=(gate, up), makes=(product,), keeps=(gate, up)), **{product: inner})
        else:
            self._linear(source, gate, inner, weights)
            kept = [gate]
            if self._traits.sums == "recomputed" and self._facts.composite_activation:
                # The hyperbolic tangent of a GELU that is written out is kept, since it costs more than memory.
                self._sizes[f"{gate} tanh"] = inner
                kept.append(f"{gate} tanh")
            self._add(Operation(reads=(gate,), makes=(product,), keeps=tuple(kept)), **{product: inner})
        self._linear(product, out, size, weights)

    def _experts(self, source: str) -> None:
        """Routed experts over copies of their tokens, and what all tokens pass besides."""
        width = self._width
        self._sizes["routes"] = {"E b s": 8}
        self._add(
            Operation(
                reads=(source,),
                makes=("chosen",),
                keeps=("routes",) if self._frozen else (source, "routes"),
                weights={"E h": 1},
                product=True,
            ),
            chosen={"E b s": 4},
        )
        copies = {"b h k s": width}
        self._add(Operation(reads=(source, "chosen"), makes=("copies",)), copies=copies)
        self._feed_forward("copies", out="expert out", batch="b k", width="m", size=copies, mark=" of experts")
        parts = ["expert out"]
        if self._facts.num_shared_experts or self._facts.shared_expert_intermediate_size:
            self._feed_forward(
                source, out="shared out", batch="b", width="x", size=self._between(width), mark=" of shared"
            )
            parts.append("shared out")
        weighed = ("expert out",) if self._traits.weighs_experts == "outputs" else ()
        self._add(Operation(reads=tuple(parts), makes=("out",), keeps=weighed), out=self._between(width))


def _dropped(modules: Iterable[str], facts: ModelFacts, *, routed: bool) -> frozenset[str]:
    """Return the tensors of a block that recomputing some of its modules drops.

    Transformer Engine's linear layers have the norm before them inside, latent attention's first ones and routed
    experts have not: "layernorm" takes the norms that are modules of their own, "mlp" a dense MLP with its norm
    (NVIDIA/Megatron-LM@d98e8a64 megatron/core, models/gpt/gpt_layer_specs.py and transformer_layer.py line 474).
    """
    dense, experts, shared = (
        {f"gate{mark}", f"gate{mark} opened", f"gate{mark} tanh", f"up{mark}", f"made{mark}"}
        for mark in ("", " of experts", " of shared")
    )
    is_latent = facts.mla is not None
    tensors = {
        "core_attn": {"scores"},
        "layernorm": {*(["n1"] if is_latent else []), *(["n2"] if routed else [])},
        "mla_up_proj": {"q normed", "q", "q turned", "kv normed", "kv", "k", "v"} if is_latent else set(),
        "moe_act": {"made of experts"},
        "shared_experts": shared,
        "mlp": set() if routed else {*dense, "n2"},
        "moe": {*experts, *shared, "routes", "copies", "expert out"} if routed else set(),
    }
    return frozenset(name for module in modules for name in tensors[module])


def _block_form(
    walk: Walk, traits: BlockTraits, boundary: Polynomial, held: Polynomial, dropped: frozenset[str]
) -> BlockForm:
    kept = add((walk.kept, boundary)) if walk.keeps_its_input else walk.kept
    again = walk.without_the_end()
    chosen = walk.products(traits.selective)
    if traits.selective == "attention":
        products = walk.kept_beside(dropped)
        unused = ZERO
        replayed: tuple[Moment, ...] = again.backward(held)[-1:]
    else:
        products = walk.outputs(chosen)
        unused = ZERO if walk.last not in {name for operation in chosen for name in operation.makes} else boundary
        replayed = again.forward(again.waiting(chosen))
    return BlockForm(
        kept=kept,
        cast=walk.cast,
        buffers=ZERO,
        boundary=boundary,
        products=products,
        unused=unused,
        input=ZERO,
        forward=walk.forward(),
        backward=walk.backward(held),
        recomputed=_with(again.forward(), held),
        replayed=_with(replayed, held),
    )


def _with(moments: Iterable[Moment], held: Polynomial) -> tuple[Moment, ...]:
    return tuple(replace(moment, activations=add((moment.activations, held))) for moment in moments)


# Whole models.


def code_form(
    facts: ModelFacts,
    traits: Traits,
    mode: str,
    attention: str,
    *,
    adds_in_place: bool,
    frozen: bool = False,
    recomputed: Sequence[str] = DEFAULT_RECOMPUTED,
) -> Form:
    """Return the form of a decoder as a code base runs it.

    `adds_in_place` says that gradients go to a buffer of their own, so that a tied head's does not wait for its
    table's. `frozen` weights have none. `recomputed` are the modules that selective recomputation drops.
    """
    block = traits.block or BlockTraits()
    width, residual = WIDTHS[mode]
    stream = {"b h s": float(residual)}
    waits = _waits(facts, adds_in_place) and not frozen
    held = {"V h": float(residual if mode == "autocast" else width)} if waits else ZERO
    head: Polynomial = ZERO if frozen else {"V h": 1}
    ending = {"b h s": float(width)}
    if block.norm == "composite" and facts.norm == "rmsnorm":
        ending = {"b h s": 4.0 + (0 if frozen else 2 * width)}
    loss = traits.loss or COPIED
    forward, backward = (_logits(copies, width) for copies in (loss["forward"], loss["backward"]))
    head_cast = {"V h": 2.0} if mode == "autocast" else ZERO
    tokens = {"b s": 20.0}
    dropped = {"b h s": 1.0} if facts.hidden_dropout else ZERO
    return Form(
        blocks=code_blocks(facts, block, mode, attention, held, frozen=frozen, recomputed=recomputed),
        buffers=ZERO,
        before=Moment(activations=add((stream, dropped, {"b s": 16.0})), cast=ZERO, gradients=ZERO),
        loss=(Moment(activations=add((ending, tokens, forward)), cast=head_cast, gradients=ZERO),),
        loss_backward=(
            Moment(activations=add((ending, backward)), cast=head_cast, gradients=ZERO),
            Moment(
                activations=add((ending, {"V b s": float(width), "b h s": float(width)})),
                cast=head_cast,
                gradients=head,
            ),
            Moment(
                activations=add((ending, stream, {"b h s": float(width)})),
                cast=ZERO,
                gradients=add((head, {"h": 1})) if head else ZERO,
            ),
        ),
        table_backward=() if frozen else (Moment(activations=stream, cast=ZERO, gradients={"V h": 1}),),
    )


def _waits(facts: ModelFacts, adds_in_place: bool) -> bool:
    return facts.tie_word_embeddings and not adds_in_place


def code_blocks(
    facts: ModelFacts,
    traits: BlockTraits,
    mode: str,
    attention: str,
    held: Polynomial = ZERO,
    *,
    frozen: bool = False,
    recomputed: Sequence[str] = DEFAULT_RECOMPUTED,
) -> dict[str, BlockForm]:
    """Return the kinds of blocks of a decoder, by the names that `dimensions.block_kinds` gives them."""
    boundary = {"b h s": float(WIDTHS[mode][1])}

    def form(*, routed: bool) -> BlockForm:
        writer = _Writer(facts, traits, mode, attention, frozen=frozen)
        walk, dropped = writer.routed() if routed else writer.dense(), _dropped(recomputed, facts, routed=routed)
        return _block_form(walk, traits, boundary, held, dropped)

    if not facts.is_moe:
        return {"block": form(routed=False)}
    if not facts.first_k_dense:
        return {"block": form(routed=True)}
    return {"dense": form(routed=False), "expert": form(routed=True)}


def _logits(copies: tuple[float, float], width: int) -> Polynomial:
    """Bytes of logits: so many in the dtype of compute, and fp32 copies, of which fp32 logits need one less."""
    narrow, wide = copies
    return {"V b s": narrow * width + (wide - 4 if width == 4 and narrow and wide else wide)}


SPLIT_LOGITS: LogitBytes = {"forward": (1, 8), "backward": (1, 8)}
"""Of logits that tp ranks split, on each: the part in the dtype of compute, in fp32, and its shares of the softmax, of
which backward makes the gradient (`strategies/parallel/layers.py`, vocab_parallel_cross_entropy)."""


def with_logits(form: Form, loss: LogitBytes, width: int) -> Form:
    """Return a traced form whose code makes other copies of the logits."""

    def told(moments: tuple[Moment, ...], copies: tuple[float, float]) -> tuple[Moment, ...]:
        most = max((moment.activations.get("V b s", 0.0) for moment in moments), default=0.0)
        return tuple(
            replace(moment, activations={**moment.activations, **_logits(copies, width)})
            if moment.activations.get("V b s", 0.0) == most > 0
            else moment
            for moment in moments
        )

    forward, backward = told(tuple(form.loss), loss["forward"]), told(tuple(form.loss_backward), loss["backward"])
    return replace(form, loss=forward, loss_backward=backward)


# The loss in chunks, and without logits at all.


def with_loss(form: Form, loss: Loss, *, width: int, weight: int, rows: float, frozen: bool = False) -> Form:
    """Return the same model with another loss.

    `width` is that of logits, `weight` that of the head's gradient, which a `frozen` one has not, `rows` the share of
    the tokens whose logits are made at once.

    Chunked as torchtitan does it (`components/loss.py`): of each chunk the logits, their loss and its backward, before
    the next; the chunks of the hidden states are copies, whose gradients are put together in fp32. Fused as Liger does
    it (`ops/fused_linear_cross_entropy.py`): a chunk's logits become their gradient in place; the gradients of hidden
    states and head are made in the forward and wait for the backward; unless the head's is fp32, every chunk's comes
    in the dtype of its product, and then in fp32.
    """
    if loss == "plain":
        return form
    beside = {term: size for term, size in form.loss[0].activations.items() if "V" not in term.split()}
    cast = form.loss[0].cast
    ends = tuple(moment for moment in form.loss_backward if "V b s" not in moment.activations)
    if loss == "chunked":
        copies = {"b h s": float(width + 4)}
        forward = add((beside, copies, scale(_logits(COPIED["forward"], width), rows)))
        backward = add((beside, copies, scale(_logits(COPIED["backward"], width), rows), {"b h s": width * rows}))
        gradients: Polynomial = ZERO if frozen else {"V h": 1}
        # The next chunk's gradient of the head, as its product makes it and as it is added to what is there.
        head = ZERO if frozen else {"V h": float(weight + (width if width < weight else 0))}
        again = add((beside, copies, {"V b s": width * rows}, head))
        moments = (Moment(activations=each, cast=cast, gradients=gradients) for each in (backward, again))
        return replace(
            form, loss=(Moment(activations=forward, cast=cast, gradients=ZERO),), loss_backward=(*moments, *ends)
        )
    working = add((beside, {"b h s": float(width), "V b s": width * rows}))
    if not frozen:
        working = add((working, {"V h": float(weight + (0 if weight == 4 else width + 4))}))
    return replace(form, loss=(Moment(activations=working, cast=cast, gradients=ZERO),), loss_backward=ends)


def fused_rows(tokens: int, vocabulary: int, hidden: int) -> float:
    """Return the share of the tokens that Liger's fused loss takes at once.

    They are so many that their logits are about as large as the hidden states, rounded up to a power of two.
    """
    at_once = -(-tokens // -(-vocabulary // hidden))
    return min(1.0, (1 << (at_once - 1).bit_length()) / tokens)
