"""Instants: the moments of one micro-batch's forward, loss and backward that can be the peak.

An instant says what is alive beside weights and optimizer states: what strategies then add (unsharded weights, reduced
gradients, buckets) depends on which unit is at work and how much of the model is already done.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from typing import Literal

from hardware_db.records import dataclass
from planner.cost.code_bases import code_base
from planner.cost.memory.activations.figures import blocks_on_stage, figures_of
from planner.cost.memory.ledger import NOTHING, Amount, bytes_at, plus, times
from planner.cost.memory.reference import block_token_bytes, has_own_reference, reference_casts
from planner.cost.memory.units import trained_units_of
from planner.cost.precision import Recipe
from planner.cost.split import logit_parts, micro_batches_in_flight, recomputed_blocks
from planner.models.figures import BlockFigures, Figures, Peak
from planner.types.job import Job
from planner.vocabulary import REFERRING, SCORING, Checkpointing

Unit = Literal["head", "block", "table", "reference"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Instant:
    """One moment on one rank.

    `unit` is what runs: the head with the loss, a block, the token table with what surrounds it, or a reference that is
    a model of its own, which runs between the loss and its backward and keeps nothing. `activations` (whatever the
    batch, and by sample) and `cast` (autocast's copies of weights) in bytes; `unit_gradients`: elements of this unit's
    weights whose gradient is made by now; `done_gradients`: elements of weights in the units that have
    finished their backward; `blocks_done`: blocks that have finished in this pass (forward or backward), out of
    `blocks`; `enters`: whether the unit has not begun its pass yet, so that nothing of it is alive but what a strategy
    fetches for it (in backward: the first block, when the head's gradients are all there and the logits gone);
    `leaves`: whether it has just ended its backward, so that nothing of it is left but its gradients; `takes`: whether
    the strategy takes the unit's first gradient, when what the product was made from is gone (of our own ZeRO only).
    """

    phase: Literal["forward", "loss", "backward"]
    unit: Unit
    activations: Amount
    cast: float
    unit_gradients: float = 0.0
    done_gradients: float = 0.0
    blocks_done: int = 0
    blocks: int = 0
    enters: bool = False
    leaves: bool = False
    takes: bool = False


def instants_of(job: Job, recipe: Recipe) -> list[Instant]:
    """Every instant that can be the peak on a rank of the job's pipeline stage.

    The first stage has the table and the last one head and loss (Narayanan et al. 2021, section 2.2); each works beside
    what its other micro-batches in flight keep.
    """
    figures = figures_of(job, recipe)
    step = _Step(job, recipe, figures)
    if figures.moments:
        return [*step.forward(), *step.loss(), *step.whole()]
    ends = [*step.loss()] if job.is_last_stage else []
    begins = [*step.table()] if job.is_first_stage else []
    return [*step.forward(), *ends, *step.backward(), *begins]


def selective_saves(job: Job, recipe: Recipe) -> bool:
    """Return whether selective checkpointing keeps less than no checkpointing.

    It keeps every product, also those that backward does not need, such as the scores of eager attention, of which
    softmax keeps its result alone.
    """
    micro = job.configuration.micro_batch_size
    blocks = figures_of(job, recipe).blocks
    kept = sum(block.count * bytes_at(block.kept, micro) for block in blocks)
    return sum(block.count * bytes_at(plus(block.boundary, block.products), micro) for block in blocks) < kept


class _Step:
    """One stage's blocks."""

    def __init__(self, job: Job, recipe: Recipe, figures: Figures) -> None:
        configuration = job.configuration
        self._job, self._figures = job, figures
        self._checkpointing = configuration.activation_checkpointing
        self._counts = blocks_on_stage(job, figures)
        self._parameters = trained_units_of(job).in_blocks / max(sum(self._counts), 1)
        tied = job.facts.tie_word_embeddings and job.facts.kind != "custom"
        # On two stages a table that head and embedding share is two, each with a gradient of its own.
        self._tied = tied and configuration.pp == 1
        is_apart = tied and configuration.pp > 1
        width = job.facts.embedding_size or job.facts.word_embed_proj_dim or job.facts.hidden_size
        ends = job.counts.trained.outside_blocks
        self._table = job.facts.vocab_size * width / configuration.tp if ends else 0.0
        head = self._table if tied and not self._tied else min(job.counts.head, ends) / configuration.tp
        self._head = 0.0 if self._tied or not job.is_last_stage else head
        self._gradient_width = recipe.gather  # of a gradient that autograd has just made
        # The head's gradient and its sum with the table's, where those are on one stage.
        self._apart = 2 * self._gradient_width * self._table if is_apart else 0.0

        # What waits in host memory is on no device; a CPU's is both.
        self._parks = configuration.activations_on_host and not job.cluster.device.is_cpu
        keeps_all = self._checkpointing == "none"
        keeps_some = keeps_all or configuration.checkpoint_every > 1
        self._once = [
            (block.once if keeps_some else block.handed) if count and (stack or job.is_first_stage) else NOTHING
            for stack, (block, count) in enumerate(zip(figures.blocks, self._counts, strict=True))
        ]
        kept = (plus(once, self._kept(stack, self._counts[stack])) for stack, once in enumerate(self._once))
        # What a stage is sent takes the place of what the embedding makes.
        sent = figures.blocks[0].boundary if figures.blocks else NOTHING
        self._begins = figures.before.activations if job.is_first_stage else sent
        self._earlier = list(accumulate(kept, plus, initial=self._begins))
        # Autocast caches copies of trained weights alone: without a graph that keeps them, those of frozen ones go.
        trained = job.counts.trained.in_blocks / max(job.counts.in_blocks, 1)
        self._cached = 1.0 if keeps_all else trained
        casts = (count * block.cast * self._cached for count, block in zip(self._counts, figures.blocks, strict=True))
        self._earlier_casts = list(accumulate(casts, initial=figures.before.cast))
        self._blocks = sum(self._counts)
        self._waiting = self._waiting_table()
        self._pieces = configuration.virtual_stages if configuration.pp_schedule == "interleaved" else 1
        self._at_first, self._at_last = self._others(0), self._others(self._pieces - 1)
        self._is_replica = configuration.strategy in ("single", "ddp")
        self._unkept_block = configuration.sequence_length * block_token_bytes(job, recipe)
        stacked = sum(count * block.cast for count, block in zip(self._counts, figures.blocks, strict=True))
        self._reference_casts = reference_casts(job, recipe) or figures.before.cast + stacked
        self._takes_first = configuration.backend == "native" and not self._is_replica
        self._product = self._product_input(recipe)

    def _kept(self, stack: int, count: int) -> Amount:
        """Return what the first `count` blocks of a stack keep."""
        block = self._figures.blocks[stack]
        boundary = NOTHING if self._parks else block.boundary
        if self._checkpointing == "selective":
            return times(count, plus(boundary, block.products))
        again = recomputed_blocks(self._job.configuration, count)
        return plus(times(again, boundary), times(count - again, block.kept))

    def _others(self, piece: int) -> Amount:
        """Return what other micro-batches in flight keep while a block of some piece is at work.

        Of an interleaved pipeline one piece of a `virtual_stages`-th is at work at a time, and those before it are of
        the same micro-batch.
        """
        chosen = self._job.configuration
        flight = micro_batches_in_flight(chosen, self._job.stage)
        # Each forward pass under autocast casts the weights anew, and its graph keeps what it multiplied with.
        casts = self._graph_casts(len(self._counts), 0)
        kept = plus(self._earlier[-1], (casts, 0.0))
        if chosen.pp_schedule == "gpipe" and self._job.is_last_stage and chosen.pp > 1:
            # Every forward, loss included, comes before the first backward.
            kept = plus(kept, self._after_loss())
        return plus(self._messages(), times(max(flight - (piece + 1) / self._pieces, 0.0), kept))

    def _messages(self) -> Amount:
        """Return what is on its way at the last stage of a pipeline that takes turns.

        These are hidden states of the next micro-batch, which are there early, and gradients of two that went back
        (`strategies/parallel/pipeline.py`).
        """
        chosen, is_ours = self._job.configuration, code_base(self._job.workload.code).runs_here
        takes_turns = chosen.pp > 1 and chosen.pp_schedule != "gpipe"
        if not (takes_turns and self._job.is_last_stage and is_ours and self._figures.blocks):
            return NOTHING
        return times(3, self._figures.blocks[0].boundary)

    def _after_loss(self) -> Amount:
        """Return what head and loss keep for their backward.

        It is the fp32 log-softmax of all logits, the head's input, the norm's input in fp32 and its output; under
        autocast the head's cast.
        """
        facts, chosen = self._job.facts, self._job.configuration
        tokens = chosen.sequence_length / chosen.cp
        vocabulary = facts.vocab_size / logit_parts(self._job)
        cast = max((peak.cast for peak in self._figures.loss_backward), default=0.0)
        return cast, tokens * (4 * vocabulary + 8 * facts.hidden_size)

    def _before(self, stack: int, blocks_done: int) -> Amount:
        """Return what was kept before a block: by the part in front, earlier stacks, `blocks_done` blocks of this.

        What the first of these blocks hands to the others is there while any of them is at work.
        """
        before = plus(self._earlier[stack], self._once[stack], self._kept(stack, blocks_done))
        # The input of the block at work is on the device.
        return plus(before, times(min(blocks_done, 1), self._figures.blocks[stack].boundary)) if self._parks else before

    def _fetched(self, stack: int, blocks_done: int) -> Amount:
        """Return the parked input of the block that backward comes to next, which is on its way already."""
        return self._figures.blocks[stack].boundary if self._parks and blocks_done > 1 else NOTHING

    def _all_kept(self) -> Amount:
        return self._earlier[-1]

    def _casts(self, stack: int, blocks_done: int) -> float:
        """Cast copies of the weights of all blocks before; under checkpointing they live until the forward ends."""
        cast = self._cached * self._figures.blocks[stack].cast if blocks_done else 0.0
        return self._earlier_casts[stack] + blocks_done * cast

    def _graph_casts(self, stack: int, blocks_done: int) -> float:
        """Return the cast copies that graphs keep for their backward: those of blocks that are not recomputed."""
        if self._checkpointing == "none":
            return self._casts(stack, blocks_done)
        chosen = self._job.configuration
        if self._checkpointing == "selective" or chosen.checkpoint_every == 1:
            return 0.0
        counts = [*self._counts[:stack], blocks_done]
        graphs = zip(counts, self._figures.blocks, strict=False)
        return sum((count - recomputed_blocks(chosen, count)) * block.cast for count, block in graphs)

    def forward(self) -> Iterator[Instant]:
        """Yield the last block of each stack; the end of the pass where a module has no repeated blocks."""
        if not self._blocks:
            yield Instant(phase="forward", unit="table", activations=self._all_kept(), cast=self._casts(0, 0))
        for stack, (block, count) in enumerate(zip(self._figures.blocks, self._counts, strict=True)):
            before = self._before(stack, count - 1)
            for peak in (None, *block.forward) if count else ():
                yield Instant(
                    phase="forward",
                    unit="block",
                    activations=plus(self._at_last, before, peak.activations if peak else NOTHING),
                    cast=self._casts(stack, count - 1) + (peak.cast if peak else 0.0),
                    blocks_done=sum(self._counts[: stack + 1]) - 1,
                    blocks=self._blocks,
                    enters=peak is None,
                )

    def loss(self) -> Iterator[Instant]:
        """Head and loss, forward and backward."""
        kept, casts = plus(self._at_last, self._all_kept()), self._casts(len(self._counts), 0)
        graphs = self._graph_casts(len(self._counts), 0)
        for peak in self._figures.loss:
            yield self._at_the_head("loss", kept, casts, peak)
        if self._job.workload.task in REFERRING and self._job.has_reference:
            yield from self._reference(kept, graphs)
        for peak in self._figures.loss_backward:
            yield self._at_the_head("backward", kept, graphs, peak)

    def _reference(self, kept: Amount, casts: float) -> Iterator[Instant]:
        """Yield a preference's forward of its reference: its largest block, and its head.

        Both are beside what the trained model has kept. Autocast casts every weight of a model of its own, none of them
        frozen, and keeps the copies to the end of its forward.
        """
        figures, own = self._figures, has_own_reference(self._job)
        kept = plus(kept, figures.scored)
        for peak in (Peak(activations=(0.0, self._unkept_block)), *figures.loss):
            yield Instant(
                phase="loss",
                unit="reference" if own else "block",
                activations=plus(kept, peak.activations),
                cast=casts + (self._reference_casts if own else peak.cast),
                blocks_done=max(self._blocks - 1, 0),
                blocks=self._blocks,
            )

    def _at_the_head(self, phase: Literal["loss", "backward"], kept: Amount, casts: float, peak: Peak) -> Instant:
        return Instant(
            phase=phase,
            unit="head",
            activations=plus(kept, peak.activations),
            cast=casts + peak.cast,
            unit_gradients=peak.gradients,
            blocks_done=sum(self._counts) if phase == "loss" else 0,
            blocks=self._blocks,
        )

    def backward(self) -> Iterator[Instant]:
        """Yield the first two blocks and the last two of each stack, in backward order.

        The second one's gradients are made beside the first one's reduction, and beside the one before the last there
        is one more to be fetched.
        """
        finished = 0
        for stack in reversed(range(len(self._counts))):
            count = self._counts[stack]
            if not count:
                continue
            for blocks_done in sorted(self._places(count), reverse=True):
                behind = finished + count - 1 - blocks_done
                others = self._others((self._blocks - 1 - behind) * self._pieces // self._blocks)
                yield from self._block_backward(stack, blocks_done, behind=behind, others=others)
            finished += count
            if stack and self._job.facts.kind.endswith("encoder-decoder"):
                yield self._between_stacks(stack, finished, self._at_first)

    def _places(self, count: int) -> set[int]:
        """Blocks of a stack at which a peak can be; a replica's bytes change evenly from the last to the first."""
        every = self._job.configuration.checkpoint_every
        ends = {count - 1, 0, max(count - every, 0), (count - 1) // every * every} if every > 1 else {count - 1, 0}
        return ends if self._is_replica else ends | {max(count - 2, 0), min(1, count - 1)}

    def _block_backward(self, stack: int, blocks_done: int, *, behind: int, others: Amount) -> Iterator[Instant]:
        """Yield the backward of a block with `blocks_done` others before it in its stack and `behind` after it.

        Beside what forward kept there is the gradient of its output when it begins, of its input when it ends.
        """
        block, recomputes = self._figures.blocks[stack], self._recomputes(blocks_done)
        before = plus(others, self._before(stack, blocks_done), self._fetched(stack, blocks_done))
        gradients = plus(block.boundary, block.waiting, (self._waiting, 0.0))
        casts = self._graph_casts(stack, blocks_done)
        instant = partial(
            Instant,
            phase="backward",
            unit="block",
            done_gradients=self._head + behind * self._parameters + self._finished_table(stack),
            blocks_done=behind,
            blocks=self._blocks,
        )
        if not self._is_replica:
            yield instant(
                activations=plus(others, self._before(stack, blocks_done + 1), gradients),
                cast=self._graph_casts(stack, blocks_done + 1),
                enters=True,
            )
            yield instant(
                activations=plus(before, gradients),
                cast=casts,
                unit_gradients=self._parameters,
                leaves=True,
            )
        # A first block that is run again makes all that it made before, not only what the others are given.
        inside = plus(before, block.again) if recomputes and blocks_done == 0 else before
        for activations, cast, new_gradients in self._inside(block, self._checkpointing if recomputes else "none"):
            yield instant(activations=plus(inside, activations), cast=casts + cast, unit_gradients=new_gradients)
            if self._takes_first and new_gradients:
                after = plus(inside, activations, times(-1, self._product))
                yield instant(activations=after, cast=casts + cast, unit_gradients=new_gradients, takes=True)

    def _recomputes(self, blocks_done: int) -> bool:
        """Return whether the block after so many others of its stack runs again before its backward."""
        chosen = self._job.configuration
        again = recomputed_blocks(chosen, blocks_done + 1) > recomputed_blocks(chosen, blocks_done)
        return self._checkpointing == "selective" or again

    def _product_input(self, recipe: Recipe) -> Amount:
        """Return the input of a block's last product, which nothing else keeps: ReLU keeps its result itself."""
        facts, chosen = self._job.facts, self._job.configuration
        if facts.is_moe or facts.activation == "relu" or facts.kind == "custom":
            return NOTHING
        tokens = chosen.sequence_length / chosen.cp
        return 0.0, tokens * facts.intermediate_size * recipe.compute / chosen.tp

    def _finished_table(self, stack: int) -> float:
        """Return the table's gradient while a speech model's encoder, which reads no tokens, is in its backward."""
        return self._table if stack == 0 and self._job.facts.kind == "speech-encoder-decoder" else 0.0

    def _waiting_table(self) -> float:
        """Return the head's gradient of a table it shares, at the moments inside a block.

        autograd holds it until the table's own is there to be added.
        """
        has_head = self._job.workload.task in SCORING
        if code_base(self._job.workload.code).whole_gradients:
            return 0.0  # both add to one buffer
        return self._gradient_width * self._table if self._tied and has_head else 0.0

    def _between_stacks(self, stack: int, finished: int, others: Amount) -> Instant:
        """Return the backward of a decoder's table, with all that its encoder kept."""
        return Instant(
            phase="backward",
            unit="table",
            activations=plus(others, self._earlier[stack], (self._shared_table(), 0.0)),
            cast=self._graph_casts(stack, 0),
            done_gradients=self._head + finished * self._parameters,
            blocks_done=finished,
            blocks=self._blocks,
        )

    def _shared_table(self) -> float:
        """Return the decoder's gradient of its table, between the stacks.

        Where the head shares the table it is a second tensor beside the head's, and then there is a third, their sum.
        """
        return (3 if self._tied else 1) * self._gradient_width * self._table

    def _inside(self, block: BlockFigures, again: Checkpointing) -> Iterator[tuple[Amount, float, float]]:
        """Yield moments of one block's backward; checkpointed it runs again first, beside its output's gradient."""
        runs = {"none": (), "full": block.recomputed, "selective": block.replayed}[again]
        head = (-self._apart / 2, 0.0)  # which a form with one table for both has beside every block
        for peak in runs:
            yield plus(block.boundary, block.waiting, peak.activations, head), peak.cast, 0.0
        beside = NOTHING if again == "none" else block.input
        if again == "selective":
            beside = plus(beside, block.unused)
        for peak in block.backward:
            yield plus(beside, peak.activations, head), peak.cast, peak.gradients

    def whole(self) -> Iterator[Instant]:
        """Yield a backward pass that was traced as a whole."""
        for peak in self._figures.moments:
            yield Instant(
                phase="backward",
                unit="table",
                activations=peak.activations,
                cast=peak.cast,
                done_gradients=peak.gradients,
            )

    def table(self) -> Iterator[Instant]:
        """Yield what comes after the first block's backward: the token table and the rest outside the blocks."""
        others = self._at_first
        for peak in self._figures.table_backward:
            fixed, grows = peak.activations
            yield Instant(
                phase="backward",
                unit="table",
                activations=plus(others, self._begins, (max(fixed - self._apart, 0.0), grows)),
                cast=peak.cast,
                unit_gradients=peak.gradients,
                done_gradients=self._head + sum(self._counts) * self._parameters,
                blocks_done=sum(self._counts),
                blocks=self._blocks,
            )
