"""Our own ZeRO: what the contract of all strategies does not ask. Models with everything awkward, when things travel,
what overflows, what is alive between steps, and checkpoints that every strategy reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dsplan.diagnostics.bench.rank_pool import RankError, RankPool
from planner.cost.precision import recipe_of
from planner.search.estimate import job_of
from tests.planner.search.questions import question
from tests.strategies import training_bodies, zero_bodies
from tests.strategies.training_bodies import Recipe
from tests.strategies.zero_bodies import OPTIMIZERS, OddRecipe

STAGES = ("zero1", "zero2", "zero3")


def native(strategy: str, **how: object) -> Recipe:
    return Recipe(strategy=strategy, backend="native", world_size=2, **how)  # type: ignore[arg-type]


def assert_equal(learned: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert learned.keys() == expected.keys()
    for name, value in expected.items():
        assert (learned[name] - value).norm() <= tolerance * value.norm(), name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", STAGES)
@pytest.mark.sweep(every=6)
def test_any_model_and_any_optimizer_that_works_element_by_element(
    strategy: str, optimizer: str, ranks: RankPool
) -> None:
    """Tied, shared, frozen, scalar and unused parameters, two dtypes, groups and schedulers, a branch of one rank."""
    recipe = OddRecipe(strategy=strategy, optimizer=optimizer, is_built=optimizer in ("sgd", "adagrad"))
    for learned in ranks.run(zero_bodies.train_odd, recipe):
        assert_equal(learned, zero_bodies.reference_odd(recipe))


@pytest.mark.parametrize("strategy", STAGES)
@pytest.mark.sweep(every=4)
def test_three_ranks(strategy: str, three_ranks: RankPool) -> None:
    odd = OddRecipe(strategy=strategy, optimizer="adam amsgrad", world_size=3)
    assert_equal(three_ranks.run(zero_bodies.train_odd, odd)[2], zero_bodies.reference_odd(odd))
    for how in ({}, {"accumulation": 2, "clipping": 0.5}):
        recipe = Recipe(strategy=strategy, backend="native", world_size=3, steps=10, **how)  # type: ignore[arg-type]
        trained, reference = three_ranks.run(training_bodies.train, recipe)[1], training_bodies.reference(recipe)
        assert trained.losses == pytest.approx(reference.losses, rel=1e-5)
        assert_equal(trained.parameters, reference.parameters)


@pytest.mark.parametrize("strategy", STAGES)
def test_one_rank_alone(strategy: str) -> None:
    recipe = Recipe(strategy=strategy, backend="native", accumulation=3)
    try:
        trained, reference = training_bodies.train(recipe), training_bodies.reference(recipe)
    finally:
        torch.distributed.destroy_process_group()
    assert trained.losses == pytest.approx(reference.losses, rel=1e-5)
    assert_equal(trained.parameters, reference.parameters)


@pytest.mark.parametrize("strategy", STAGES)
@pytest.mark.sweep(every=4)
def test_bf16_steps_masters_in_fp32(strategy: str, ranks: RankPool) -> None:
    """The loss is the rounding of weights to 8 bits of mantissa, 2^-9 each, and not of their sum of updates: after
    30 steps at 2e-3 the losses of DDP under autocast, whose weights are fp32, are within that of the largest weight."""
    expected = ranks.run(training_bodies.train, Recipe(strategy="ddp", world_size=2, precision="bf16", steps=30))[0]
    trained = ranks.run(training_bodies.train, native(strategy, precision="bf16", steps=30))[0]
    assert trained.losses == pytest.approx(expected.losses, rel=2**-6)


@pytest.mark.parametrize(("strategy", "sent"), [("zero1", 1), ("zero2", 3), ("zero3", 3)])
def test_gradients_travel_no_oftener_than_needed(strategy: str, sent: int, ranks: RankPool) -> None:
    """Stage 1 keeps them until the last micro-batch; stages 2 and 3 do where the plan counts on whole gradients."""
    elements, whole = ranks.run(zero_bodies.reductions_of_a_step, native(strategy, accumulation=3))[0]
    assert elements == sent * whole
    once = native(strategy, accumulation=3, sync_each=False)
    assert ranks.run(zero_bodies.reductions_of_a_step, once)[0] == (whole, whole)


@pytest.mark.parametrize("strategy", STAGES)
def test_no_sync_sends_nothing_and_changes_nothing(strategy: str, ranks: RankPool) -> None:
    recipe = native(strategy, accumulation=3, steps=1)
    for inside, weights in ranks.run(zero_bodies.train_without_syncing, recipe):
        assert inside == 0
        assert_equal(weights, training_bodies.reference(recipe).parameters)


@pytest.mark.parametrize("compression", ["none", "int8"])
@pytest.mark.parametrize("strategy", STAGES)
@pytest.mark.sweep(every=2)
def test_gradients_are_reduced_while_backward_runs(strategy: str, compression: str, ranks: RankPool) -> None:
    """With a bucket for each matrix, sums are under way after the first and half of them there before the last gradient
    of the step is made."""
    config = {"zero_optimization": {"reduce_bucket_size": 1200}, "communication": {"compression": compression}}
    events = ranks.run(zero_bodies.events_of_a_step, native(strategy), config)[0]
    sends = sorted(begin for name, begin, _ in events if name == "dsplan::reduce")
    sums = sorted(end for name, _, end in events if name == "dsplan::sum")
    gradients = sorted(begin for name, begin, _ in events if "AccumulateGrad" in name)
    assert len(sends) == len(sums) >= 6
    assert sends[0] < gradients[len(gradients) // 2], "the first bucket travels while most of the rest is being made"
    assert sums[len(sums) // 2] < gradients[-1]


def test_weights_are_gathered_ahead_while_forward_runs(ranks: RankPool) -> None:
    events = ranks.run(zero_bodies.events_of_a_step, native("zero3"))[0]
    gathers = sorted(begin for name, begin, _ in events if name == "dsplan::gather")
    waits = sorted(begin for name, begin, _ in events if name == "dsplan::wait_for_weights")
    products = sorted(begin for name, begin, _ in events if name == "aten::addmm")
    backward = min(begin for name, begin, _ in events if name.startswith("autograd::engine"))
    forward = [begin for begin in gathers if begin < backward]
    assert len(forward) == 4, "the root and three blocks"
    for begun, waited in list(zip(forward, waits[:4], strict=True))[2:]:
        between = [begin for begin in products if begun < begin < waited]
        assert len(between) == 2, "the block in front computes while the next one's weights travel"


def test_an_overflow_skips_the_step_everywhere_and_halves_the_scale(ranks: RankPool) -> None:
    recipe = native("zero2", precision="fp16", steps=24)
    answers = ranks.run(zero_bodies.overflow_and_recover, recipe, 24)
    for scales, skipped, losses, stayed in answers:
        assert stayed
        assert scales[0] == 2.0**23
        assert scales == answers[0][0]
        assert 0 < skipped < 12
        assert losses[-1] < losses[0] - 1
        assert max(scales[skipped:]) > min(scales), "it grows again after steps without overflow"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", STAGES)
def test_what_is_not_a_number_on_one_rank_is_not_learned(strategy: str, precision: str, ranks: RankPool) -> None:
    for stayed, skipped, norm, losses in ranks.run(zero_bodies.poison_on_rank_1, native(strategy, precision=precision)):
        assert stayed
        assert skipped == 1
        assert norm is None
        assert losses[-1] < losses[0]


def test_stage_3_is_whole_where_it_must_be(ranks: RankPool) -> None:
    expected = training_bodies.train(Recipe(steps=1))
    for report in ranks.run(zero_bodies.evaluate_and_change, native("zero3")):
        assert report["released"]
        assert report["released after evaluation"]
        assert report["shape"] == tuple(expected.parameters["blocks.1.up.weight"].shape)
        assert report["whole"]
        assert report["evaluated"] == pytest.approx(report["inside"], rel=1e-6)
        assert report["changed"] == [0.25], "rank 0's"
        assert report["continued"] != report["evaluated"]


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", STAGES)
@pytest.mark.sweep(every=4, suite=lambda precision, world_size: (precision, world_size) in (("fp32", 3), ("bf16", 2)))
def test_live_bytes_are_those_of_the_zero_arithmetic(
    strategy: str, precision: str, world_size: int, request: pytest.FixtureRequest
) -> None:
    """Rajbhandari et al. 2020, figure 1, with K = 12 for 16-bit weights: masters and two moments. In fp32 the weights
    are their own masters, so that K = 8 and weights and gradients are 4 bytes each; stage 3 gathers 16-bit weights from
    the masters and keeps none but the small ones."""
    pool = request.getfixturevalue("ranks" if world_size == 2 else "three_ranks")
    accumulation = 2 if strategy == "zero1" else 1
    recipe = Recipe(
        strategy=strategy, backend="native", world_size=world_size, precision=precision, accumulation=accumulation
    )
    sixteen = precision == "bf16"
    config = {"data_types": {"grad_accum_dtype": precision}}
    for live in pool.run(zero_bodies.live_states, recipe, config):
        width, states, part = (2, 12, live["all"] / world_size) if sixteen else (4, 8, live["all"] / world_size)
        kept = width * live["small"] * (1 - 1 / world_size)
        cut = 2 * live["small"] if sixteen else width * part + kept
        weights = cut if strategy == "zero3" else width * live["all"]
        assert live["between"] == pytest.approx(weights + states * part, rel=0.02)
        if strategy == "zero1":
            assert live["first"] == pytest.approx(2 * weights + states * part, rel=0.02)
        assert live["last"] == pytest.approx(weights + (states + width) * part, rel=0.02)


@pytest.mark.parametrize(("strategy", "precision", "accumulation"), [("zero1", "bf16", 2), ("zero2", "bf16", 1)])
def test_a_gradient_that_waits_has_the_bytes_that_memory_and_time_count(
    strategy: str, precision: str, accumulation: int, ranks: RankPool
) -> None:
    """4 bytes while several 16-bit micro-batches add up, 2 where there is one."""
    recipe = Recipe(strategy=strategy, backend="native", world_size=2, precision=precision, accumulation=accumulation)
    counted = recipe_of(job_of(question("opt-125m", "h100", 2), recipe.plan().configuration)).gradient
    assert counted == (4 if accumulation > 1 else 2)
    for live in ranks.run(zero_bodies.live_states, recipe, {}):
        assert live["last"] - live["between"] == pytest.approx(counted * live["all"] / 2, rel=0.02)
        if strategy == "zero1":
            assert live["first"] - live["between"] == pytest.approx(counted * live["all"], rel=0.02)


def test_a_second_gradient_in_one_backward_pass_is_named(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"got a second gradient in one backward pass"):
        ranks.run(zero_bodies.two_gradients, native("zero2"))


def test_a_16_bit_checkpoint_holds_the_masters(ranks: RankPool, tmp_path: Path) -> None:
    bf16 = native("zero3", precision="bf16")
    expected = ranks.run(zero_bodies.save_after, bf16, str(tmp_path), 3)[0]
    assert ranks.run(zero_bodies.resume_from, bf16, str(tmp_path), 3)[0] == expected
    other = native("zero1", precision="bf16")
    assert ranks.run(zero_bodies.resume_from, other, str(tmp_path), 3)[0] == pytest.approx(expected, rel=1e-3)
    wide = ranks.run(zero_bodies.resume_from, Recipe(strategy="ddp", world_size=2), str(tmp_path), 3)[0]
    assert wide == pytest.approx(expected, rel=2**-6)
