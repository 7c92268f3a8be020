"""The offers of every engine beside training, the same under every strategy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from dsplan.diagnostics.bench.rank_pool import RankPool
from hardware_db.units import format_bytes
from strategies.errors import CannotRun
from tests.strategies import engine_bodies, training_bodies
from tests.strategies.training_bodies import Recipe

DEEPSPEED = ("zero1", "zero2", "zero3")
NATIVE = ("native zero1", "native zero2", "native zero3")
SPREAD = ("ddp", "fsdp", "fsdp-grad-op", *DEEPSPEED, *NATIVE)
ENGINES = ("ddp", "fsdp", "zero3", "native zero2", "native zero3")
PoolOf = Callable[[str], RankPool]


def recipe_of(strategy: str, **how: Any) -> Recipe:
    backend, _, name = strategy.rpartition(" ")
    return Recipe(strategy=name, backend=backend, world_size=2, **how)


@pytest.mark.parametrize("strategy", SPREAD)
@pytest.mark.sweep(suite=lambda strategy: strategy in ENGINES)
def test_figures_of_a_step(strategy: str, pool_of: PoolOf) -> None:
    alone = engine_bodies.figures(Recipe())
    assert alone["norm"] == pytest.approx(first_norms()[-1], rel=1e-5)
    for figures in pool_of(strategy).run(engine_bodies.figures, recipe_of(strategy)):
        assert figures["own"], "the script's own model, whatever runs it"
        assert figures["norm"] == pytest.approx(alone["norm"], rel=1e-5)
        assert (figures["skipped"], figures["scale"], figures["rates"]) == (0, 1.0, [engine_bodies.RATE])
        assert figures["losses"] == pytest.approx(alone["losses"], rel=1e-5)


def first_norms() -> list[float]:
    """The gradient norms of two steps of plain torch."""
    torch.manual_seed(3)
    model = training_bodies.TinyModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=engine_bodies.RATE)
    norms = []
    for step in range(2):
        model(*training_bodies.batch_of(step)).backward()
        norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", *NATIVE])
@pytest.mark.sweep(every=2)
def test_what_is_not_finite_on_one_rank_is_learned_on_none(strategy: str, precision: str, pool_of: PoolOf) -> None:
    for figures in pool_of(strategy).run(engine_bodies.poisoned, recipe_of(strategy, precision=precision)):
        assert figures["unchanged"]
        assert (figures["norm"], figures["skipped"]) == (None, 1)
        assert figures["halved"] == (0.5 if precision == "fp16" else 1.0)
        assert figures["later norm"] > 0
        assert figures["later skips"] == 1


@pytest.mark.parametrize("strategy", SPREAD)
@pytest.mark.sweep(suite=lambda strategy: strategy in ENGINES)
def test_micro_batches_without_sync_add_up_to_the_same_step(strategy: str, pool_of: PoolOf) -> None:
    recipe = recipe_of(strategy, accumulation=3, steps=1)
    reference = training_bodies.reference(Recipe(steps=1)).parameters
    for learned in pool_of(strategy).run(engine_bodies.accumulated_without_sync, recipe):
        for name, expected in reference.items():
            torch.testing.assert_close(learned[name], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_narrow_gradients_may_be_added_up_in_fp32(strategy: str, pool_of: PoolOf) -> None:
    """In bf16, 1 + 1/512 is 1: what 63 micro-batches add is lost one by one, and kept where it is added up wide."""
    recipe = recipe_of(strategy, precision="bf16-pure", accumulation=64, global_batch=128)
    assert pool_of(strategy).run(engine_bodies.summed_gradient, recipe, "bf16") == [1.0, 1.0]
    assert pool_of(strategy).run(engine_bodies.summed_gradient, recipe, "fp32") == pytest.approx(
        [1 + 63 / 512] * 2, abs=2**-8
    )


def test_a_narrower_sum_than_the_gradients_is_refused() -> None:
    with pytest.raises(CannotRun, match="grad_accum_dtype is 'bf16' and the gradients of this strategy are float32"):
        engine_bodies.engine_of(Recipe(), {"data_types": {"grad_accum_dtype": "bf16"}})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", SPREAD)
@pytest.mark.sweep(every=3, suite=lambda strategy, precision: precision == "bf16" or strategy in ENGINES)
def test_whole_weights_are_read_used_and_changed(strategy: str, precision: str, pool_of: PoolOf) -> None:
    first, second = pool_of(strategy).run(engine_bodies.changed_weights, recipe_of(strategy, precision=precision))
    for figures in (first, second):
        assert figures["value"] == 0.5, "rank 0's value counts"
        assert {name: count for name, count in figures["differs"].items() if count} == {"blocks.1.up.weight": 1}
        assert figures["later"] == pytest.approx(0.5, abs=0.01), "training resumes from it"
        assert figures["later"] != 0.5
        assert figures["size"] == 4 * training_bodies.WIDTH**2


@pytest.mark.parametrize("inside", [True, False], ids=["whole", "gathered as it runs"])
@pytest.mark.slow
def test_a_trained_gpt2_generates_the_same_tokens_under_every_strategy(inside: bool, pool_of: PoolOf) -> None:
    expected_loss, expected = engine_bodies.gpt2_tokens(Recipe(), inside=inside)
    assert len(expected[0]) > training_bodies.LENGTH
    for strategy in ("ddp", "fsdp", "zero3", *NATIVE):
        for loss, tokens in pool_of(strategy).run(engine_bodies.gpt2_tokens, recipe_of(strategy), inside):
            assert loss == pytest.approx(expected_loss, rel=1e-4), strategy
            assert tokens == expected, strategy


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", *DEEPSPEED, *NATIVE])
@pytest.mark.sweep(every=2)
def test_the_memory_report_tells_states_apart(strategy: str, pool_of: PoolOf) -> None:
    """Weights, gradients and optimizer states of fp32 AdamW, after a step: 4, 0 and 8 bytes of what is whole or cut."""
    stage = int(strategy[-1]) if strategy[-1].isdigit() else 3 if strategy == "fsdp" else 0
    for live, text, elements in pool_of(strategy).run(engine_bodies.report, recipe_of(strategy)):
        states = 8 * elements / (1 if stage == 0 else 2)
        # DeepSpeed keeps fp32 masters beside fp32 weights, and pads its flat buffers.
        states += 4 * elements / 2 if strategy in DEEPSPEED else 0
        assert live["masters and optimizer states"] == pytest.approx(states, rel=0.05)
        # Stage 3 keeps biases and norms, a tenth of this small model, whole.
        weights = 4 * elements / (2 if stage == 3 else 1)
        assert live["weights and buffers"] == pytest.approx(weights, rel=0.13 if stage == 3 else 0.01)
        assert "predicted" in text.splitlines()[0]


def test_what_is_on_disk_is_in_no_ones_memory(ranks: RankPool) -> None:
    for live, _, elements in ranks.run(engine_bodies.report, recipe_of("native zero2", offload="nvme")):
        # States of small pieces, which are most of this model's, stay in memory.
        assert live["masters and optimizer states"] < 0.5 * 8 * elements / 2
        assert live["weights and buffers"] == pytest.approx(4 * elements, rel=0.01)


@pytest.mark.parametrize("strategy", ["fsdp", "native zero2"])
def test_a_timeline_shows_the_peak_of_a_step(strategy: str, pool_of: PoolOf, tmp_path: Path) -> None:
    peaks = pool_of(strategy).run(engine_bodies.timeline, recipe_of(strategy), str(tmp_path))
    for rank, (peak, reported, layers) in enumerate(peaks):
        assert reported == peak == max(sum(sample) for sample in layers)
        before, after = layers[0], layers[-1]
        assert after[:3] == before[:3], "states are there before and after"
        assert min(before[0], before[2]) > 0
        rise = peak - sum(before)  # engines of other tests may be alive in these processes
        assert sum(after) - sum(before) < 0.2 * rise, "what forward and backward made is gone"
        assert max(sample[4] for sample in layers) > 0.3 * rise, "activations"
        picture = ElementTree.parse(tmp_path / f"{rank}.svg").getroot()
        texts = [element.text or "" for element in picture.iter("{http://www.w3.org/2000/svg}text")]
        assert f"rank {rank} of 2" in texts[0]
        assert [text for text in texts if text in ("forward", "backward", "step")] == ["forward", "backward", "step"]
        assert f"peak {format_bytes(peak)}" in texts[1]


@pytest.mark.parametrize(
    ("strategy", "how", "difference"),
    [
        ("native zero3", "shape", "positions: [7, 16] float32, trained on rank 1, [6, 16] float32, trained on rank 0"),
        ("native zero1", "dtype", "positions: [6, 16] bfloat16, trained on rank 1"),
        ("native zero2", "name", "its tensor 3 is layers.0."),
        ("fsdp", "more", "that of rank 0 has no more.weight"),
        ("ddp", "frozen", "positions: [6, 16] float32, frozen on rank 1"),
        ("zero3", "buffer", "that of rank 0 has no mask"),
        ("native zero3", "none", ""),
    ],
)
def test_ranks_that_built_another_model_are_named(strategy: str, how: str, difference: str, pool_of: PoolOf) -> None:
    of_ranks = pool_of(strategy).run(engine_bodies.models_that_differ, recipe_of(strategy), how, 1)
    for message, seconds in of_ranks:
        if how == "none":
            assert message == "trains"
            continue
        assert message.startswith("rank 1 has another model than rank 0: ")
        assert difference in message
        assert "\n" not in message
        assert seconds < 100  # the patience of ranks is 600
    assert of_ranks[0][0] == of_ranks[1][0]


def test_the_rank_that_differs_from_most_is_named(three_ranks: RankPool) -> None:
    recipe = Recipe(strategy="zero3", backend="native", world_size=3)
    for message, _ in three_ranks.run(engine_bodies.models_that_differ, recipe, "shape", 0):
        assert message.startswith("rank 0 has another model than rank 1: positions: [7, 16]")


def test_all_ranks_say_alike_what_ended_a_joint_doing(ranks: RankPool) -> None:
    first, second = ranks.run(engine_bodies.kinds_of_a_joint_failure)
    nothing = ("refused", "no plan fits this machine")  # which no repetition mends, whichever rank says it first
    assert first == [nothing, ("failed", "rank 1 failed: KeyError: 'gone'")]
    assert second == [nothing, ("failed", "'gone'")]
