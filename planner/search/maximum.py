"""The most that fits: of each strategy the largest micro-batch, the longest sequence and the largest model.

Each of the three is searched alone, with the two others as they are asked for, and fits as `estimate` judges it. Memory
grows with each of them, so a search narrows down to one number by halves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from math import log2

from hardware_db.records import dataclass
from planner import limits
from planner import vocabulary as words
from planner.cost.combinations import offloads_of
from planner.errors import ContradictoryRequest
from planner.models.counting.count import count_parameters
from planner.models.facts import ModelFacts, ParameterCounts
from planner.models.resolve import LARGEST, SMALLEST, model_of_size
from planner.models.tasks import facts_for_task
from planner.search.estimate import price, why_impossible
from planner.search.exact import ExactOptions, exact
from planner.search.request import Request
from planner.search.space import why_inapplicable
from planner.types.plan import Configuration

SEQUENCE_STEP = 128
"""Tokens to which the longest sequence is found: kernels of attention work on tiles of so many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MaximumOptions:
    """Traits of every row; a field is None where rows of several are wanted."""

    strategy: words.Strategy | None = None
    backend: words.Backend | None = None
    checkpointing: words.Checkpointing | None = None
    offload: words.Offload | None = None
    shard: int | None = None
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Maximum:
    """The most that fits in one way of running; a number is None where not even the smallest does or nothing is known.

    `configuration` has micro-batch 1, at which `sequence_length` fits, and the largest decoder like LLaMA
    (`planner.models.resolve.model_of_size`), of `model_parameters` and asked for as `model_size`.
    """

    configuration: Configuration
    micro_batch_size: int | None = None
    sequence_length: int | None = None
    model_size: str | None = None
    model_parameters: int | None = None


def maxima(request: Request, options: MaximumOptions) -> tuple[Maximum, ...]:
    """Return the most that fits, by strategy and by what it recomputes and offloads.

    Raises:
        ContradictoryRequest: nothing can run as `options` ask.
    """
    most_that_fits: list[Maximum] = []
    problem: str | None = None
    for options_of_row in _ways(request, options):
        try:
            exactly, configuration = exact(request, options_of_row)
        except ContradictoryRequest as error:
            problem = problem or str(error)
            continue
        impossible = why_impossible(exactly, configuration)
        problem = problem or impossible
        if not impossible:
            most_that_fits.append(_maximum(request, options_of_row, configuration))
    if not most_that_fits:
        why = why_inapplicable(request, options.strategy or "single")
        raise ContradictoryRequest(problem or f"--strategy {options.strategy}: {why}; leave it out")
    return tuple(most_that_fits)


def _ways(request: Request, options: MaximumOptions) -> Iterator[ExactOptions]:
    """Without recomputation, with all of it, and with all of it and everything offloaded that the strategy can."""
    for strategy in words.STRATEGIES:
        if options.strategy not in (None, strategy) or why_inapplicable(request, strategy):
            continue
        backend = options.backend or words.default_backend(strategy, zero=request.zero_backend)
        kept: tuple[words.Offload, ...] = ("none",) if request.cluster.device.is_cpu else ("none", "all", "optimizer")
        possible = [offload for offload in kept if offload in ("none", *offloads_of(strategy, backend))][:2]
        for offload in possible if options.offload is None else [options.offload]:
            usual: tuple[words.Checkpointing, ...] = ("none", "full") if offload == "none" else ("full",)
            for checkpointing in usual if options.checkpointing is None else [options.checkpointing]:
                yield ExactOptions(
                    strategy=strategy,
                    backend=options.backend,
                    micro_batch=1,
                    grad_accum=1,
                    checkpointing=checkpointing,
                    offload=offload,
                    shard=None if strategy in ("single", "ddp") else options.shard,
                    tp=options.tp,
                    pp=options.pp,
                    cp=options.cp,
                    ep=options.ep,
                )


def _maximum(request: Request, options: ExactOptions, configuration: Configuration) -> Maximum:
    def fits(question: Request, micro_batch: int = 1) -> bool:
        there, chosen = exact(question, replace(options, micro_batch=micro_batch))
        return not why_impossible(there, chosen) and price(there, chosen).judgement.keeps_margins

    micro = largest(lambda size: fits(request, size), 1, int(limits.SAMPLES.most))
    guess = (micro or 1) * request.workload.sequence_length // SEQUENCE_STEP
    longest = longest_steps(request)
    steps = longest and largest(lambda count: fits(of_length(request, count * SEQUENCE_STEP)), guess, longest)
    models = sizes() if scales(request.facts) else ()
    position = models and largest(
        lambda index: fits(_of_size(request, models[index - 1])), _guess(request), len(models)
    )
    size = models[position - 1] if position else None
    return Maximum(
        configuration=configuration,
        micro_batch_size=micro or None,
        sequence_length=steps * SEQUENCE_STEP if steps else None,
        model_size=size,
        model_parameters=_model(size)[1].total if size else None,
    )


def largest(fits: Callable[[int], bool], guess: int, most: int) -> int:
    """Return the largest number from 1 to `most` that fits, where every smaller one does; 0 without one.

    Numbers near the guess are tried first, then ever farther ones.
    """
    low, high = 0, most + 1
    probe, stride = min(max(guess, 1), most), max(guess // 8, 1)
    while low < probe < high and not (low and high <= most):
        if fits(probe):
            low, probe = probe, min(probe + stride, most)
        else:
            high, probe = probe, max(probe - stride, 1)
        stride *= 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


# Other lengths, and other sizes of model.


def scales(facts: ModelFacts) -> bool:
    """Return whether a larger model of its kind is a decoder of so many parameters."""
    return facts.kind == "decoder" and not facts.traced


def longest_steps(request: Request) -> int:
    """Return the steps of the longest sequence there may be; 0 where none is varied: in images, and what was traced."""
    facts = request.facts
    varies = facts.kind in ("decoder", "encoder", "encoder-decoder") and not (facts.traced or facts.recorded_as)
    if not varies or request.workload.task == "image-cls":
        return 0
    limit = facts.max_position_embeddings if facts.learned_positions else 0
    return int(limit or limits.TOKENS.most) // SEQUENCE_STEP


def of_length(request: Request, length: int) -> Request:
    """Return the request with sequences of so many tokens."""
    return replace(request, workload=replace(request.workload, sequence_length=length))


def _of_size(request: Request, size: str) -> Request:
    facts, counts = _model(size)
    return replace(request, facts=facts_for_task(facts, request.workload.task), counts=counts)


@lru_cache(maxsize=1)
def sizes() -> tuple[str, ...]:
    """Sizes of two digits, as people say them: 1.1M, 13B, 1.2T."""
    names = []
    for unit, scale in (("M", 10**6), ("B", 10**9), ("T", 10**12)):
        digits = [*(tenths / 10 for tenths in range(10, 100)), *range(10, 100), *range(100, 1000, 10)]
        names += [f"{digit:g}{unit}" for digit in digits if SMALLEST <= digit * scale <= LARGEST]
    return tuple(names)


@lru_cache(maxsize=64)
def _model(size: str) -> tuple[ModelFacts, ParameterCounts]:
    facts = model_of_size(size)
    return facts, count_parameters(facts)


def _guess(request: Request) -> int:
    """Return where in `sizes` the asked model would be, as 270 sizes are three decades."""
    return max(round(90 * log2(max(request.counts.total, SMALLEST) / SMALLEST) / log2(10)), 1)
