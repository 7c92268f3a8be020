"""Whole tiles in whole waves: cases by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hardware_db.datasheets import find_device
from planner.cost.timing import step_time
from planner.cost.timing.efficiency import NO_WASTE, block_waste, multiprocessors, waste_of
from planner.cost.timing.stacks import stacks
from planner.models.catalogue import find_model
from tests.planner.cost.timing.cases import cluster, make_job


def test_a_wave_that_is_full_wastes_nothing() -> None:
    assert waste_of(128 * 108, 256, 108) == 1
    assert waste_of(128 * 108, 256, 108) == waste_of(128, 256 * 108, 108)


def test_one_tile_more_takes_a_wave_of_its_own() -> None:
    assert waste_of(128 * 109, 256, 108) == pytest.approx(2 * 108 / 109)
    assert waste_of(100, 256, 1) == pytest.approx(128 / 100)


def test_a_block_is_the_mean_of_its_products() -> None:
    (stack,) = stacks(
        replace(find_model("gpt2"), hidden_size=1024, intermediate_size=1024, num_heads=16, num_kv_heads=16)
    )
    # Queries, keys and values: 8 x 12 tiles of 108; output, up and down projection: 8 x 4.
    forward = (3 * 108 / 96 + 3 * 108 / 32) / 6
    assert block_waste(stack, 1024, 1, 108).forward == pytest.approx(forward)
    # Input gradients have 8 x 4 tiles throughout, the weight gradient of queries, keys and values 24 x 4.
    backward = (6 * 108 / 32 + 3 * 108 / 96 + 3 * 108 / 32) / 12
    assert block_waste(stack, 1024, 1, 108).backward == pytest.approx(backward)


def test_waste_is_known_of_some_devices_only() -> None:
    assert multiprocessors(find_device("A100-SXM4-80GB")) == 108
    assert multiprocessors(find_device("B200-SXM-180GB")) == 0
    assert multiprocessors(find_device("MI250X-GCD")) == 0
    (stack,) = stacks(find_model("gpt2"))
    assert block_waste(stack, 1024, 1, 0) == NO_WASTE
    (experts,) = stacks(find_model("mixtral-8x7b"))
    assert block_waste(experts, 1024, 1, 108) == NO_WASTE


def test_tensor_parallel_slices_waste_more() -> None:
    whole, sliced = (
        step_time(make_job("facebook/opt-6.7b", cluster(), tp=tp, micro_batch_size=1)).compute_seconds for tp in (1, 8)
    )
    assert sliced > whole / 8 * 1.05
