"""Clusters whose nodes differ: shares by speed, the slower of each for all, and what the odd nodes cost."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from itertools import combinations, pairwise, product
from pathlib import Path

import pytest

from dsplan.render.plan_view import header
from dsplan.render.show import Text
from planner.cluster.cluster_file import read_cluster_file
from planner.cluster.groups import at_rates, level, name_group
from planner.cost.timing import stage_times
from planner.errors import BrokenFile, ContradictoryRequest
from planner.models.resolve import resolve_model
from planner.search.estimate import estimate, job_of
from planner.search.request import Degrees, Request, WorkOptions, make_request
from planner.search.scaling import over_lengths, over_micro_batches
from planner.search.search import Recommendation, recommend
from planner.search.uneven_parts import kinds_of
from planner.search.uneven_stages import balance, fastest_stages
from planner.types.cluster import Cluster
from planner.types.plan import Configuration
from planner.types.plan_io import load_plan, save_plan
from planner.types.shares import read_layers, read_rates, read_sizes, split_by_rate, write_sizes

SLOW_NODE = """
gpu: A100-SXM4-80GB
inter_link: ib-hdr
groups:
- nodes: 3
- nodes: 1
  speed: 0.5
"""
TWO_KINDS = """
inter_link: ib-hdr
groups:
- gpu: H100-SXM5-80GB
- gpu: A100-SXM4-80GB
  inter_link: ib-ndr
"""
UNLIKE_SIZES = """
gpu: A100-SXM4-80GB
inter_link: ib-hdr
groups:
- nodes: 1
- nodes: 1
  gpus_per_node: 4
  capacity_gb: 20
"""
HINDERED = """
inter_link: eth-25
groups:
- gpu: H100-SXM5-80GB
  gpus_per_node: 8
- gpu: RTX-4090
  gpus_per_node: 2
"""


def cluster_of(text: str, folder: Path) -> Cluster:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return read_cluster_file(str(path))


def question(cluster: Cluster, batch: int, **options: object) -> Request:
    ranking = {"strategies": ("ddp", "zero2"), "top": 3, **options}
    return make_request(resolve_model("opt-1.3b"), cluster, WorkOptions(global_batch=batch, seq_len=2048), **ranking)


@cache
def answered(text: str, batch: int, folder: Path) -> Recommendation:
    return recommend(question(cluster_of(text, folder), batch))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("clusters")


@pytest.mark.parametrize("samples", [4, 7, 13, 40])
@pytest.mark.parametrize("rates", [(1, 1, 1, 0.5), (3, 1, 0.2, 1), (1, 1, 0.01, 1)])
def test_no_split_is_ready_sooner(samples: int, rates: tuple[float, ...]) -> None:
    split = split_by_rate(samples, [(1, rate) for rate in rates])
    assert split is not None
    sizes = [size for ((_, size),) in split]
    assert sum(sizes) == samples
    others = (sizes for sizes in product(range(1, samples + 1), repeat=len(rates) - 1) if sum(sizes) < samples)
    ready = (
        max(size / rate for size, rate in zip((*rest, samples - sum(rest)), rates, strict=True)) for rest in others
    )
    assert max(size / rate for size, rate in zip(sizes, rates, strict=True)) == pytest.approx(min(ready))


def test_ranks_of_a_group_differ_by_one_sample_at_most() -> None:
    assert split_by_rate(7 * 4, [(3, 1.0), (1, 0.5)]) == (((3, 8),), ((1, 4),))
    assert split_by_rate(10, [(3, 1.0), (1, 0.9)]) == (((2, 3), (1, 2)), ((1, 2),))
    assert split_by_rate(3, [(3, 1.0), (1, 0.9)]) is None


@pytest.mark.parametrize(("text", "sizes"), [("3x8,1x4", ((3, 8), (1, 4))), ("8,4", ((1, 8), (1, 4)))])
def test_shares_are_read_and_written(text: str, sizes: tuple[tuple[int, int], ...]) -> None:
    assert read_sizes(text) == sizes
    assert read_sizes(write_sizes(sizes)) == sizes


@pytest.mark.parametrize("text", ["", "3x", "3x0", "1.5", "x4", "3x8;4", "-1", "3x8,"])
def test_what_names_no_shares_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ContradictoryRequest) as problem:
        read_sizes(text)
    assert "\n" not in str(problem.value)


def test_rates_are_above_nothing() -> None:
    assert read_rates("3x1,0.5") == ((3, 1.0), (1, 0.5))
    with pytest.raises(ContradictoryRequest, match="above 0"):
        read_rates("3x1,0")


def test_a_cluster_of_unlike_nodes_is_what_all_can_pass_for(folder: Path) -> None:
    cluster = cluster_of(TWO_KINDS, folder)
    assert (cluster.device.name, cluster.nodes, cluster.gpus) == ("A100-SXM4-80GB", 2, 16)
    assert cluster.inter_link is not None
    assert cluster.inter_link.name == "ib-hdr", "the slower of two links"
    assert [group.device.name for group in cluster.groups] == ["H100-SXM5-80GB", "A100-SXM4-80GB"]
    assert cluster.assumed.startswith("the nodes differ (one node of 8 x H100-SXM5-80GB, one node of 8 x A100")


def test_unlike_numbers_of_gpus_count_in_parts_of_nodes(folder: Path) -> None:
    cluster = cluster_of(UNLIKE_SIZES, folder)
    assert (cluster.nodes, cluster.gpus_per_node, cluster.gpus) == (3, 4, 12)
    assert cluster.capacity_bytes == 20_000_000_000
    assert cluster.nics_per_node * 2 == cluster.groups[0].nics_per_node


def test_alike_groups_are_one_cluster(folder: Path) -> None:
    alike = level([replace(group, speed=1.0) for group in cluster_of(SLOW_NODE, folder).groups])
    assert (alike.nodes, alike.gpus, alike.speed) == (4, 32, 1.0)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("groups: 3", "groups is 3"),
        ("groups: []", "groups is "),
        ("nodes: 2\ngroups:\n- nodes: 1", "has nodes beside groups"),
        ("gpu: A100-SXM4-80GB\ngroups:\n- repair_hours: 4", "group 1 has repair_hours"),
        ("gpu: A100-SXM4-80GB\ngroups:\n- speed: 0", "speed is 0"),
        ("gpu: A100-SXM4-80GB\ngroups:\n- pace: 1", "unknown key 'pace'"),
        ("groups:\n- nodes: 1", "names no GPU"),
    ],
)
def test_groups_that_cannot_be_used_are_one_line(text: str, problem: str, folder: Path) -> None:
    with pytest.raises(BrokenFile) as raised:
        cluster_of(text, folder)
    assert problem in str(raised.value)
    assert "\n" not in str(raised.value)


def test_shares_by_speed_are_near_the_ideal_and_go_first(folder: Path) -> None:
    answer = answered(SLOW_NODE, 448, folder)
    uneven, plan = answer.uneven, answer.plans[0]
    assert uneven is not None
    assert uneven.shared is not None
    assert uneven.even is not None
    assert uneven.is_first
    assert plan.configuration.is_uneven
    assert plan.configuration.global_batch_size == 448
    steps = [part.time.step_seconds for part in uneven.shared.parts]
    assert plan.time.step_seconds == max(steps)
    assert min(steps) > 0.9 * max(steps), "neither group waits long for the other"
    # Of 32 GPUs that compute like 28: an even split takes twice as long as on 32, shares 32 / 28.
    assert uneven.even.time.step_seconds / plan.time.step_seconds == pytest.approx(28 / 16, rel=0.1)
    assert "shares by their speed" in answer.choice


def test_all_rates_of_a_step_count_all_gpus(folder: Path) -> None:
    plan = answered(SLOW_NODE, 448, folder).plans[0]
    seconds, rates = plan.time.step_seconds, plan.throughput
    assert rates.samples_per_second == pytest.approx(448 / seconds)
    assert rates.tokens_per_second_per_gpu * 32 == pytest.approx(448 * 2048 / seconds)


def test_without_the_odd_nodes(folder: Path) -> None:
    uneven = answered(SLOW_NODE, 448, folder).uneven
    assert uneven is not None
    fast, slow = uneven.without()
    assert name_group(slow.group) == "one node of 8 x A100-SXM4-80GB at 50% of its speed"
    assert slow.plan is not None
    assert slow.plan.configuration.world_size == 24
    assert slow.gain is not None
    assert fast.gain is not None
    assert slow.gain == pytest.approx(28 / 24 - 1, abs=0.1)
    assert fast.gain > 5


def test_nodes_that_slow_the_others_are_advised_against(folder: Path) -> None:
    answer = answered(HINDERED, 112, folder)
    (advice,) = answer.advice()
    assert advice.change == "leave out one node of 2 x RTX-4090"
    assert answer.uneven is not None
    (gain,) = [each.gain for each in answer.uneven.without() if each.group.device.name == "RTX-4090"]
    assert gain is not None
    assert advice.speed == pytest.approx(1 / (1 + gain))
    assert advice.speed > 1.1
    assert f"{advice.speed:.1f}x as fast" in advice.gain
    assert answer.uneven.without() is answer.uneven.without(), "the search without them is done once"
    assert not answered(SLOW_NODE, 448, folder).advice()


def test_a_heading_names_each_kind_of_nodes(folder: Path) -> None:
    texts = [block.text for block in header(answered(HINDERED, 112, folder).plans[0]) if isinstance(block, Text)]
    assert "one node of 8 x H100-SXM5-80GB and one node of 2 x RTX-4090, 23.6 GiB usable on the smallest" in texts


def test_memory_is_checked_on_each_kind(folder: Path) -> None:
    cluster = cluster_of(UNLIKE_SIZES, folder)
    slowed = replace(cluster, groups=(replace(cluster.groups[0], speed=0.3), cluster.groups[1]))
    uneven = recommend(question(slowed, 96, strategies=("fsdp",))).uneven
    assert uneven is not None
    assert uneven.shared is not None
    for part in uneven.shared.parts:
        assert part.priced.memory.device_needed_bytes <= part.group.capacity_bytes
        assert part.priced.job.cluster.capacity_bytes == part.group.capacity_bytes
    assert "unlike numbers of GPUs" in " ".join(uneven.plan.notes if uneven.plan else ())


def test_deepspeed_stages_and_experts_are_left_out(folder: Path) -> None:
    request = question(cluster_of(SLOW_NODE, folder), 448, strategies=("zero2",))
    plan = recommend(request).plans[0]
    assert (plan.configuration.strategy, plan.configuration.backend) == ("zero2", "native")
    assert plan.runnable


def test_the_least_memory_asks_for_no_shares(folder: Path) -> None:
    answer = recommend(question(cluster_of(SLOW_NODE, folder), 448, objective="memory", strategies=("ddp",)))
    assert answer.uneven is not None
    assert answer.uneven.shared is None
    assert not answer.plans[0].configuration.is_uneven


def test_a_batch_that_splits_unevenly_alone_has_a_plan(folder: Path) -> None:
    alike = replace(cluster_of("gpu: A100-SXM4-80GB\nnodes: 1", folder), gpus_per_node=4)
    cluster = at_rates(alike, ((3, 1.0), (1, 0.5)))
    answer = recommend(question(cluster, 7))
    assert answer.plans[0].configuration.micro_batches == "3x2,1x1"
    assert answer.plans[0].configuration.global_batch_size == 7


def test_the_plan_comes_back_from_its_file(folder: Path) -> None:
    plan = answered(SLOW_NODE, 448, folder).plans[0]
    save_plan(plan, folder / "plan.yaml")
    assert load_plan(folder / "plan.yaml") == plan


def test_no_curves_are_drawn_over_unlike_shares(folder: Path) -> None:
    answer = answered(SLOW_NODE, 448, folder)
    uneven, even = answer.plans[0], answer.plans[1]
    assert over_micro_batches(answer.request, uneven) == over_lengths(answer.request, uneven) == ()
    assert len(over_micro_batches(answer.request, even)) > 1


# Stages of a pipeline by the rate of their nodes.


def in_stages(cluster: Cluster, batch: int = 128, **options: object) -> Request:
    """Return a question whose script has four stages."""
    return question(cluster, batch, **{"strategies": ("ddp", "zero1"), "degrees": Degrees(pp=4), **options})


def every_cut(blocks: int, stages: int) -> list[tuple[int, ...]]:
    return [
        tuple(end - first for first, end in pairwise((0, *ends, blocks)))
        for ends in combinations(range(1, blocks), stages - 1)
    ]


@pytest.mark.parametrize("blocks", [4, 11, 16])
@pytest.mark.parametrize("seconds", [(1.0, 1.0, 1.0, 2.0), (3.0, 0.5, 1.0, 1.5)])
@pytest.mark.parametrize("head", [0.0, 2.5])
def test_no_cut_has_less_work_on_its_busiest_stage(blocks: int, seconds: tuple[float, ...], head: float) -> None:
    most = [13, 13, 3, 13]

    def work(stage: int, count: int) -> float:
        return seconds[stage] * count + head * (stage == 3)

    cut = balance([partial(work, stage) for stage in range(4)], blocks, most)
    assert cut is not None
    busiest = [max(map(work, range(4), other)) for other in every_cut(blocks, 4) if other[2] <= 3]
    assert max(map(work, range(4), cut)) == pytest.approx(min(busiest))
    assert sum(cut) == blocks
    assert cut[2] <= 3


def test_there_is_no_cut_of_too_few_blocks_or_too_little_room() -> None:
    work = [float] * 3
    assert balance(work, 2, [2] * 3) is None
    assert balance(work, 9, [3, 3, 2]) is None
    assert balance(work, 3, [3, 3, 0]) is None


def test_a_slow_stage_has_fewer_blocks_and_no_other_cut_is_faster(folder: Path) -> None:
    request = in_stages(cluster_of(SLOW_NODE, folder))
    answer = recommend(request)
    uneven, plan = answer.uneven, answer.plans[0]
    assert uneven is not None
    assert uneven.even is not None
    assert uneven.shared is uneven.by_stages
    assert "blocks of pipeline stages" in answer.choice
    blocks = plan.configuration.stage_layers
    assert sum(blocks) == 24
    assert plan.runnable
    assert uneven.even.time.step_seconds > 1.6 * plan.time.step_seconds
    cuts = [cut for cut in every_cut(24, 4) if max(map(abs, map(int.__sub__, cut, blocks))) <= 2]
    others = [estimate_of(request, plan.configuration, cut) for cut in cuts]
    assert plan.time.step_seconds <= 1.0001 * min(others)


def estimate_of(request: Request, chosen: Configuration, blocks: tuple[int, ...]) -> float:
    """Return the seconds of a step whose stages, one on each node, have so many blocks."""
    named = replace(chosen, layers_per_stage=",".join(map(str, blocks)))
    fast, slow = (job_of(kind.request, named) for kind in kinds_of(request))
    jobs = [replace(slow if stage == 3 else fast, stage=stage) for stage in range(4)]
    return max(time.step_seconds for time in stage_times(jobs))


def test_a_stage_with_little_memory_has_the_blocks_that_fit(folder: Path) -> None:
    cluster = cluster_of(SLOW_NODE, folder)
    fast, slow = cluster.groups
    last = replace(slow, speed=1.0)
    cuts = []
    for room in (9_000_000_000, last.capacity_bytes):
        request = in_stages(replace(cluster, groups=(fast, replace(last, capacity_bytes=room))))
        cuts.append(fastest_stages(request, kinds_of(request)))
    shared, roomy = cuts
    assert shared is not None
    assert roomy is not None
    assert shared.configuration.stage_layers[3] < roomy.configuration.stage_layers[3]
    for part in shared.parts:
        assert part.priced.memory.device_needed_bytes <= part.group.capacity_bytes


def test_a_plan_of_unlike_stages_is_priced_as_it_was_chosen(folder: Path) -> None:
    """On alike nodes: an even cut by name is what an even cut without one is, and the head takes as long as blocks."""
    request = in_stages(cluster_of("gpu: A100-SXM4-80GB\nnodes: 4", folder))
    chosen = recommend(request).plans[0].configuration
    cuts = ("", "6,6,6,6", "12,4,4,4", "7,7,6,4")
    even, named, other, balanced = (estimate(request, replace(chosen, layers_per_stage=cut)) for cut in cuts)
    assert named.time.step_seconds == pytest.approx(even.time.step_seconds, rel=0.02)
    assert named.memory.peak_allocated_bytes == even.memory.peak_allocated_bytes
    assert other.time.step_seconds > 1.2 * even.time.step_seconds
    assert balanced.time.step_seconds < 0.95 * even.time.step_seconds
    assert other.memory.peak_allocated_bytes > even.memory.peak_allocated_bytes


@pytest.mark.parametrize(
    ("layers", "problem"),
    [
        ("6,6,6", "are of 3 stages, and pp 4 makes 4"),
        ("6,6,6,0", "every stage has a whole number of blocks"),
        ("6,6,6,5", "are 23 blocks, and facebook/opt-1.3b has 24"),
        ("5000x1", "more than 4,096 stages"),
        ("six", "does not say what each stage has"),
    ],
)
def test_layers_that_are_no_cut_are_one_line(layers: str, problem: str, folder: Path) -> None:
    request = in_stages(cluster_of(SLOW_NODE, folder))
    chosen = recommend(request).plans[-1].configuration
    with pytest.raises(ContradictoryRequest, match=problem) as raised:
        estimate(request, replace(chosen, layers_per_stage=layers))
    assert "\n" not in str(raised.value)


def test_the_blocks_of_stages_are_read() -> None:
    assert read_layers("2x8,1x7,1x1") == (8, 8, 7, 1)
    assert read_layers("3,1") == (3, 1)


def test_a_plan_of_unlike_stages_comes_back_from_its_file(folder: Path) -> None:
    plan = recommend(in_stages(cluster_of(SLOW_NODE, folder))).plans[0]
    save_plan(plan, folder / "stages.yaml")
    assert load_plan(folder / "stages.yaml") == plan
