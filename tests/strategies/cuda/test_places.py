"""Places that do something else on a card, one by one: files, errors, figures, kernels, reports."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.emulated_cuda.fixtures import CardPool
from tests.strategies import seed_bodies, tensor_bodies
from tests.strategies.cuda import place_bodies as bodies


@pytest.mark.slow
def test_mpi_does_not_receive_into_memory_of_a_card(card: CardPool, tmp_path: Path) -> None:
    assert card.run(bodies.written_through_mpi, tmp_path) == [(False, [0.0, 1.0, 2.0])]


def test_an_error_of_the_driver_is_no_refusal_where_there_is_a_card(card: CardPool, tmp_path: Path) -> None:
    assert card.run(bodies.ended, tmp_path) == [("failed", False)]


def test_a_rank_of_a_benchmark_measures_its_card(card: CardPool, tmp_path: Path) -> None:
    assert card.run(bodies.measured, tmp_path) == [("Rate", "bytes/s")]


def test_measuring_leaves_the_random_numbers_of_a_card_alone(card: CardPool, tmp_path: Path) -> None:
    assert card.run(bodies.random_numbers_beside_measuring, tmp_path) == [(["memory"], True)]


def test_a_monitor_without_an_engine_looks_at_the_card_of_its_process(card: CardPool, tmp_path: Path) -> None:
    assert card.run(bodies.monitored, tmp_path) == [(True, True)]


def test_batches_are_pinned_where_the_script_asks_for_it(card: CardPool, tmp_path: Path) -> None:
    assert card.run(bodies.pinned, tmp_path) == [[True, False]]
    assert card.run(bodies.pinned_by_the_engine, tmp_path) == [True]


def test_losses_are_counted_where_they_lie_and_read_now_and_then(card: CardPool, tmp_path: Path) -> None:
    [(clean, line)] = card.run(bodies.ended_by_its_losses, tmp_path)
    assert clean == [False, True, False, False]
    assert line.startswith("losses of the last 3 steps are NaN or infinite, up to step 7")


def test_a_checkpoint_in_the_background_has_the_weights_of_when_it_was_asked_for(
    card: CardPool, tmp_path: Path
) -> None:
    assert card.run(bodies.saved_in_the_background, tmp_path) == [(True, False)]


def test_the_time_to_the_first_loss_is_a_part_of_the_step(card: CardPool, tmp_path: Path) -> None:
    [[(first, to_loss), (second, none)]] = card.run(bodies.timed_steps, tmp_path)
    assert to_loss is not None
    assert 0 < to_loss < first, "what came before the step counted"
    assert second > 0
    assert none is None


@pytest.mark.slow  # imports Trainer
def test_a_trainer_may_split_its_model_on_cards(card: CardPool, tmp_path: Path) -> None:
    [(output, refused)] = card.run(bodies.split_by_the_script, tmp_path)
    assert output.startswith(
        "dsplan: no plan: the script splits its model by from_pretrained(tp_plan=...) (tp 2); it runs"
    )
    assert refused.startswith("--strategy zero3 cannot be applied: the script splits its model by from_pretrained(")


def test_a_kernel_whose_library_is_missing_says_what_to_install(card: CardPool, tmp_path: Path) -> None:
    line = "kernels: torch's own rms_norm: liger is not installed (pip install liger-kernel)"
    assert card.run(bodies.without_its_library, tmp_path) == [(line,)]


def test_a_loss_without_logits_is_computed_in_autocasts_dtype(card: CardPool, tmp_path: Path) -> None:
    [(usual, loss, dtypes)] = card.run(bodies.losses_in_16_bits, tmp_path)
    assert loss == pytest.approx(usual, rel=1e-2)
    assert {*dtypes} == {torch.bfloat16}


def test_sections_of_a_step_are_timed_by_events_of_the_card(card: CardPool, tmp_path: Path) -> None:
    [(figures, traced)] = card.run(bodies.logged, tmp_path)
    parts = [figures[f"{name}_seconds"] for name in ("forward", "backward", "step", "preparing")]
    assert min(parts) > 0
    assert sum(parts) <= figures["whole_step_seconds"]
    assert figures["peak_bytes"] >= figures["allocated_bytes"] > 0
    assert {"forward", "backward", "step", "preparing"} <= {*traced}


def test_memory_is_what_torchs_allocator_counts(card: CardPool, tmp_path: Path) -> None:
    [figures] = card.run(bodies.reported, tmp_path)
    assert figures["report"] == figures["allocator"]
    assert 0.75 < figures["counted"] / figures["peak"] <= 1, "each tensor is rounded up to 512 bytes"


def test_counters_of_a_fused_optimizer_come_back_to_the_card(card: CardPool, tmp_path: Path) -> None:
    [(unbroken, resumed)] = card.run(bodies.resumed_fused, tmp_path)
    assert resumed == pytest.approx(unbroken, rel=1e-6)


@pytest.mark.slow
def test_what_two_cards_split_drops_out_differently(two_cards: CardPool) -> None:
    first, second = two_cards.run(tensor_bodies.dropped_out)
    assert first["shared"] == second["shared"]
    assert first["own"] != second["own"]
    assert first["again"] != first["own"]


def test_a_process_group_on_cards_is_nccls(two_cards: CardPool, tmp_path: Path) -> None:
    two_cards.run(seed_bodies.messages_before_the_engine, str(tmp_path))
