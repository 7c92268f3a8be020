"""Collectives: exact cases, measured NCCL times, and the groups that ranks form."""

from __future__ import annotations

import csv
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardware_db.device import Link
from planner.cost.timing.collectives import (
    COLLECTIVE_LAUNCH_SECONDS,
    COLLECTIVES,
    RING_SHARE_OF_LINK,
    Group,
    collective_seconds,
    group,
    neighbour_seconds,
)
from planner.cost.timing.layout import SLOWDOWN, exposed_seconds
from planner.types.cluster import Cluster, Curve, Rates, constant_rate
from tests.planner.cost.timing.cases import cluster

MEASURED = Path(__file__).parents[4] / "hardware_db" / "measurements" / "all_reduce_nvlink.csv"
SIZE = 1 << 30
BASE = COLLECTIVE_LAUNCH_SECONDS + 6.6e-6


def test_all_reduce_inside_a_node_by_hand() -> None:
    node = cluster()
    expected = BASE + 2 * 7 * 3.4e-6 + 2 * 7 / 8 * SIZE / 234.9e9
    assert collective_seconds(node, "all_reduce", SIZE, group(node, 8, 1)) == pytest.approx(expected)


def test_hoppers_switches_reduce_large_tensors_themselves() -> None:
    node = cluster(device="H100-SXM5-80GB", intra="nvlink4-h100")
    members = group(node, 8, 1)
    assert collective_seconds(node, "all_reduce", SIZE, members) == pytest.approx(
        BASE + 25e-6 + 2 * 7 / 8 * SIZE / 480e9
    )
    small = BASE + 2 * 7 * 3.4e-6 + 2 * 7 / 8 * 4096 / 370e9
    assert collective_seconds(node, "all_reduce", 4096, members) == pytest.approx(min(small, BASE + 25e-6), rel=1e-3)


def test_all_gather_between_nodes_leaves_through_the_nics() -> None:
    two = cluster(nodes=2)
    expected = BASE + 14 * 3.4e-6 + 14e-6 + 15 / 16 * SIZE / (4 * 21.6e9)
    assert collective_seconds(two, "all_gather", SIZE, group(two, 16, 1)) == pytest.approx(expected)


def test_replicas_of_one_shard_share_the_nics() -> None:
    two = cluster(nodes=2)
    members = group(two, 2, 8)
    assert members == Group(size=2, per_node=1, nodes=2, sharing=8)
    expected = BASE + 2 * 14e-6 + 2 * 1 / 2 * SIZE * 8 / (4 * 22.08e9)
    assert collective_seconds(two, "all_reduce", SIZE, members) == pytest.approx(expected)


def test_tensor_parallel_neighbours_sit_in_one_node() -> None:
    assert group(cluster(nodes=4), 4, 1) == Group(size=4, per_node=4, nodes=1, sharing=2)
    assert group(cluster(nodes=4), 16, 2) == Group(size=16, per_node=4, nodes=4, sharing=2)


def test_one_rank_sends_nothing() -> None:
    assert collective_seconds(cluster(), "all_reduce", SIZE, group(cluster(), 1, 1)) == 0


def test_measured_curves_replace_the_datasheet() -> None:
    curve = Curve(points=((4.0, 1e-3), (1e6, 1e-3), (1e9, 1.0)))
    pair = replace(cluster(2), rates=Rates(collectives={("all_reduce", 2): curve}))
    members = group(pair, 2, 1)
    assert collective_seconds(pair, "all_reduce", 1e9, members) == pytest.approx(1.0)
    assert collective_seconds(pair, "all_reduce", 1.0, members) == pytest.approx(1e-3)
    # Half an all-reduce stands in for the gather that nobody measured.
    assert collective_seconds(pair, "all_gather", 1e9, members) == pytest.approx(0.5)


def test_smaller_groups_take_their_share_of_what_all_ranks_took() -> None:
    node = replace(cluster(8), rates=Rates(collectives={("all_gather", 8): constant_rate(1e9)}))
    seconds = collective_seconds(node, "all_gather", 1e9, group(node, 2, 1))
    assert seconds == pytest.approx((1 / 2) / (7 / 8))
    two = replace(node, nodes=2)
    assert collective_seconds(two, "all_gather", 1e9, group(two, 16, 1)) < 0.1


def test_a_link_without_a_measurement_gets_a_share_of_its_rate() -> None:
    bare = Link(name="bare", scope="intra", theoretical_gbs_per_direction=100)
    pair = replace(cluster(2), intra_link=bare)
    seconds = collective_seconds(pair, "all_gather", SIZE, group(pair, 2, 1))
    assert seconds == pytest.approx(SIZE / 2 / (100e9 * RING_SHARE_OF_LINK), rel=1e-2)


def test_a_pipeline_boundary_between_nodes_shares_the_nics_with_the_whole_node() -> None:
    two = cluster(nodes=2)
    assert neighbour_seconds(two, 1e9, 8) == pytest.approx(14e-6 + 8e9 / (4 * 21.6e9))
    assert neighbour_seconds(two, 1e9, 1) < neighbour_seconds(two, 1e9, 8)


@pytest.mark.parametrize("ranks", range(2, 9))
def test_measured_a100_all_reduces(ranks: int) -> None:
    with MEASURED.open(newline="") as lines:
        rows = [row for row in csv.DictReader(lines) if row["device"] == "a100" and int(row["n_gpus"]) == ranks]
    node = cluster(ranks)
    members = group(node, ranks, 1)
    ratios = [
        collective_seconds(node, "all_reduce", int(row["bytes"]), members) / float(row["seconds"]) for row in rows
    ]
    assert len(ratios) > 40
    assert statistics.median(abs(ratio - 1) for ratio in ratios) < 0.25


@settings(deadline=None)
@given(
    name=st.sampled_from(COLLECTIVES),
    size=st.floats(1, 1e11),
    nodes=st.integers(1, 64),
    factor=st.floats(1, 100),
)
def test_a_faster_network_is_never_slower(name: str, size: float, nodes: int, factor: float) -> None:
    slow = cluster(nodes=nodes)
    fast = _sped_up(slow, factor)
    members = group(slow, slow.gpus, 1)
    assert collective_seconds(fast, name, size, members) <= collective_seconds(slow, name, size, members)  # type: ignore[arg-type]


@settings(deadline=None)
@given(st.floats(0, 1e3), st.floats(0, 1e3), st.floats(0, 1e3), st.floats(0, 10))
def test_exposed_communication_is_bounded_and_grows(
    compute: float, communication: float, startup: float, more: float
) -> None:
    exposed = exposed_seconds(compute, communication, startup=startup)
    assert 0 <= exposed <= communication + 1e-9
    assert exposed_seconds(compute, communication + more, startup=startup) >= exposed - 1e-9


def test_communication_that_fits_behind_compute_only_slows_it() -> None:
    assert exposed_seconds(10.0, 4.0) == pytest.approx((SLOWDOWN - 1) * 4)
    assert exposed_seconds(10.0, 4.0, startup=4.0) == 4.0
    assert exposed_seconds(0.0, 4.0) == 4.0


def _sped_up(where: Cluster, factor: float) -> Cluster:
    def faster(link: Link | None) -> Link | None:
        if link is None:
            return None
        figures = {key: value and value * factor for key, value in link.busbw_gbs.items()}
        return replace(link, busbw_gbs=figures)

    return replace(where, intra_link=faster(where.intra_link), inter_link=faster(where.inter_link))
