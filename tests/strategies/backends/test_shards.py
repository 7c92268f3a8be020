"""States that fewer ranks share than there are, in several copies: two shards on each of two replicas, four ranks.

FSDP2 has it as a mesh of two dimensions (HSDP), our ZeRO reduces inside a copy and then between copies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dsplan.diagnostics.bench.rank_pool import RankError, RankPool
from planner.models.from_hf.config import facts_from_config
from planner.search.estimate import estimate
from planner.search.request import WorkOptions, make_request
from planner.types.plan_io import plan_to_dict
from scripts.measure.machines import measured_cluster
from scripts.measure.measured_run import Subject, measure_subject
from scripts.measure.memory_grid import SMALL
from tests.strategies import checkpoint_bodies, parallel_bodies, training_bodies, zero_bodies
from tests.strategies.conftest import DeepSpeedRanks
from tests.strategies.parallel_bodies import Composition
from tests.strategies.training_bodies import Recipe, Trained

ZERO = ("zero1", "zero2", "zero3")
EVERY = (*ZERO, "fsdp", "fsdp-grad-op", "hsdp")


def two_copies(strategy: str, **how: Any) -> Recipe:
    backend = "native" if strategy in ZERO else ""
    return Recipe(strategy=strategy, backend=backend, world_size=4, dp_replicate=2, **how)


def one_copy(strategy: str, **how: Any) -> Recipe:
    return Recipe(strategy=strategy, backend="native", world_size=4, **how)


@pytest.fixture(scope="module")
def replicas(four_ranks: RankPool) -> Trained:
    """Ten steps of DDP on the same ranks, three micro-batches each, with gradients clipped."""
    recipe = Recipe(strategy="ddp", world_size=4, accumulation=3, clipping=0.5, steps=10)
    trained: Trained = four_ranks.run(training_bodies.train, recipe)[0]
    return trained


@pytest.mark.parametrize("strategy", EVERY)
@pytest.mark.sweep(every=2, suite={"fsdp", "zero3"})
def test_copies_of_shards_train_as_replicas_do(strategy: str, four_ranks: RankPool, replicas: Trained) -> None:
    """Clipped, so that a norm that counts a copy twice gives other weights."""
    for trained in four_ranks.run(training_bodies.train, two_copies(strategy, accumulation=3, clipping=0.5, steps=10)):
        assert trained.losses == pytest.approx(replicas.losses, rel=1e-6)
        for name, value in replicas.parameters.items():
            assert (trained.parameters[name] - value).norm() <= 1e-6 * value.norm(), name


@pytest.mark.parametrize("strategy", ZERO)
def test_the_norm_counts_every_gradient_once(strategy: str, four_ranks: RankPool) -> None:
    norms = {
        recipe.strategy: four_ranks.run(zero_bodies.norm_of_a_step, recipe)
        for recipe in (Recipe(strategy="ddp", world_size=4), two_copies(strategy))
    }
    assert norms[strategy] == pytest.approx(norms["ddp"], rel=1e-6)


@pytest.mark.parametrize(
    ("strategy", "how", "tolerance"),
    [
        ("zero1", {"precision": "bf16", "accumulation": 3}, 2**-6),
        ("zero3", {"precision": "bf16"}, 2**-6),
        ("zero2", {"offload": "optimizer", "accumulation": 3}, 1e-6),
        ("zero3", {"offload": "all"}, 1e-6),
        ("zero2", {"optimizer": "muon"}, 1e-6),
    ],
)
@pytest.mark.sweep(every=4)
def test_two_copies_train_as_one(strategy: str, how: dict[str, Any], tolerance: float, four_ranks: RankPool) -> None:
    body = training_bodies.train_with_planned_optimizer if "optimizer" in how else training_bodies.train
    one, two = (four_ranks.run(body, recipe(strategy, **how))[0] for recipe in (one_copy, two_copies))
    losses = (one[1], two[1]) if isinstance(one, tuple) else (one.losses, two.losses)
    assert losses[1] == pytest.approx(losses[0], rel=tolerance)


@pytest.mark.parametrize("strategy", ZERO)
def test_between_copies_a_step_sends_its_shards_once(strategy: str, four_ranks: RankPool) -> None:
    """However many micro-batches it has: sums of a copy add up first."""
    for sent, elements in four_ranks.run(zero_bodies.all_reduced_in_a_step, two_copies(strategy, accumulation=3)):
        assert elements / 2 <= sent <= 0.55 * elements, "half of them, and the padding of odd buckets"


@pytest.mark.parametrize("strategy", ZERO)
@pytest.mark.slow
def test_a_rank_of_two_copies_has_what_one_of_half_as_many_ranks_has(
    strategy: str, four_ranks: RankPool, ranks: RankPool
) -> None:
    """Live bytes between steps, and after the backward passes of a first and a last micro-batch."""
    how = {"precision": "bf16", "accumulation": 3 if strategy == "zero1" else 1}
    two = Recipe(strategy=strategy, backend="native", world_size=2, **how)  # type: ignore[arg-type]
    expected = ranks.run(zero_bodies.live_states, two, {})
    assert four_ranks.run(zero_bodies.live_states, two_copies(strategy, **how), {}) == expected * 2


def test_mics_of_a_config_is_run_by_our_own_zero(four_ranks: RankPool) -> None:
    """DeepSpeed 0.19 has MiCS no more."""
    zero = {"stage": 3, "mics_shard_size": 2, "mics_hierarchical_params_gather": True}
    for backend, degrees, losses in four_ranks.run(zero_bodies.train_by_config, zero, 4):
        assert (backend, degrees) == ("native", (2, 2, 1))
        assert losses == pytest.approx(training_bodies.reference(Recipe(steps=4)).losses, rel=1e-6)
    with pytest.raises(RankError, match="shard 3 with tp 1 x pp 1 x cp 1 = 1 does not divide the 4 ranks of this job"):
        four_ranks.run(zero_bodies.train_by_config, {"stage": 3, "mics_shard_size": 3}, 1)


@pytest.mark.slow
def test_hpz_of_a_config_is_planned_and_run_by_deepspeed(deepspeed_ranks: DeepSpeedRanks) -> None:
    zero = {"stage": 3, "zero_hpz_partition_size": 2, "stage3_param_persistence_threshold": 0}
    for (backend, degrees, losses), second, whole in deepspeed_ranks.run(zero_bodies.train_with_hpz, zero, 4):
        assert (backend, degrees) == ("deepspeed", (1, 2, 2))
        assert losses == pytest.approx(training_bodies.reference(Recipe(steps=4)).losses, rel=1e-6)
        assert whole / 2 <= second <= 0.55 * whole, "half of the weights, and padding"
    with pytest.raises(RankError, match="zero_quantized_weights needs a GPU, for DeepSpeed's quantizer"):
        deepspeed_ranks.run(zero_bodies.train_by_config, {"stage": 3, "zero_quantized_weights": True}, 1)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [*ZERO, "hsdp"])
def test_live_bytes_are_as_planned(strategy: str, four_ranks: RankPool) -> None:
    """Between steps within 1 %; peaks within what the planner is off by without copies."""
    config = {"model_type": "llama", **SMALL["llama"]}
    configuration = replace(
        two_copies(strategy, precision="bf16", accumulation=2, global_batch=8).plan().configuration, sequence_length=64
    )
    cluster = measured_cluster("cpu", 4)
    work = WorkOptions(seq_len=64, global_batch=8, precision="bf16")
    planned = estimate(make_request(facts_from_config(config, "llama"), cluster, work), configuration)
    subject = Subject(config=config, task="causal-lm", plan=plan_to_dict(planned))
    states = planned.memory.states
    resident = states["parameters_bytes"] + states["optimizer_bytes"]
    for step in four_ranks.run(measure_subject, subject):
        assert step.resident_bytes == pytest.approx(resident, rel=0.01)
        assert step.peak_bytes == pytest.approx(planned.memory.peak_allocated_bytes, rel=0.03)


@pytest.mark.slow
def test_checkpoints_go_from_copies_to_every_strategy_and_back(
    four_ranks: RankPool, ranks: RankPool, tmp_path: Path
) -> None:
    """Only one copy writes: a file holds every element once."""
    pools = {2: ranks, 4: four_ranks}
    relay = (two_copies("zero2"), Recipe(strategy="fsdp", world_size=2), two_copies("zero3"), two_copies("hsdp"),
             Recipe(strategy="ddp", world_size=2))  # fmt: skip
    folders = [str(tmp_path / str(index)) for index in range(len(relay))]
    expected = four_ranks.run(checkpoint_bodies.save_after, relay[0], folders[0], 3)[0]
    for recipe, source, goal in zip(relay[1:], folders, folders[1:], strict=False):
        pools[recipe.world_size].run(checkpoint_bodies.pass_on, recipe, source, goal)
    first, *others = (checkpoint_bodies.tensors_of(Path(folder)) for folder in folders)
    for other in others:
        assert other.keys() == first.keys()
        assert all(torch.equal(other[name], value) for name, value in first.items())
    for reader in (two_copies("zero3"), one_copy("zero1")):
        resumed = four_ranks.run(checkpoint_bodies.resume_each, reader, folders[:1], 3)[0]
        assert resumed[0] == pytest.approx(expected, rel=1e-6)
    for folder in folders:
        assert set(checkpoint_bodies.times_written(Path(folder)).values()) == {1.0}


@pytest.mark.parametrize(
    "composition",
    [
        Composition(strategy="zero2", dp_replicate=2, tp=2, accumulation=2, clipping=0.5),
        Composition(strategy="zero1", dp_replicate=2, pp=2, accumulation=2, clipping=0.5),
    ],
)
@pytest.mark.sweep(every=2)
def test_copies_of_split_models(composition: Composition, four_ranks: RankPool) -> None:
    for difference in four_ranks.run(parallel_bodies.train, "llama", composition):
        assert max(difference.loss, difference.parameter, difference.norm) < 1e-5, difference


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "composition"),
    [
        ("llama", Composition(strategy="zero2", dp_replicate=2, dp_shard=2, tp=2, clipping=0.5)),
        ("llama", Composition(strategy="zero3", dp_replicate=2, dp_shard=2, cp=2, clipping=0.5)),
        ("mixtral", Composition(strategy="zero1", dp_replicate=2, dp_shard=4, ep=2, clipping=0.5)),
        ("llama", Composition(strategy="zero1", dp_replicate=2, dp_shard=2, pp=2, accumulation=2, clipping=0.5)),
    ],
)
def test_copies_of_shards_of_split_models(kind: Any, composition: Composition, eight_ranks: RankPool) -> None:
    for difference in eight_ranks.run(parallel_bodies.train, kind, composition):
        assert max(difference.loss, difference.parameter, difference.norm) < 1e-5, difference
