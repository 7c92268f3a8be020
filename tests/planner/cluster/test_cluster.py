"""From hardware flags, cluster files and probed machines to clusters."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hardware_db.datasheets import devices, find_link
from hardware_db.probe import Gpu, GpuPair, Host, Machine, MigDevice, Nic, Software, probe_hardware
from hardware_db.units import GB, GIB, MIB
from planner.cluster.nodes import usual_gpus_per_node
from planner.cluster.resolve import HardwareRequest, probed_cluster, resolve_cluster
from planner.errors import BrokenFile, ContradictoryRequest, DsplanError, UnknownName
from planner.types.cluster import Cluster
from tests.hardware_db.probe.nvml_player import playing

HOST = Host(
    system="Linux",
    cpu_flags=frozenset({"avx2", "fma"}),
    cpu_max_mhz=3000.0,
    physical_cores=16,
    usable_cores=16,
    memory_total_bytes=128 * GIB,
    memory_available_bytes=120 * GIB,
)
NOTHING = Machine(host=HOST, software=Software(python="3.12"))


def resolve(machine: Machine = NOTHING, **flags: object) -> Cluster:
    return resolve_cluster(HardwareRequest(**flags), machine)  # type: ignore[arg-type]


def with_h100s(count: int, **changes: object) -> Machine:
    """`count` idle H100s on NVSwitch; `changes` are fields of the last one."""
    card = Gpu(
        index=0,
        name="NVIDIA H100 80GB HBM3",
        total_bytes=81559 * MIB,
        free_bytes=81008 * MIB,
        nvlink_links=18,
        nvlink_to_switch=True,
        mig_enabled=False,
    )
    cards = [replace(card, index=index) for index in range(count)]
    cards[-1] = replace(cards[-1], **changes)  # type: ignore[arg-type]
    every = ((first, second) for second in range(count) for first in range(second))
    pairs = tuple(GpuPair(first=first, second=second, p2p="ok", nvlink=True) for first, second in every)
    return replace(NOTHING, gpus=tuple(cards), pairs=pairs)


def shape(cluster: Cluster) -> tuple[int, int, str]:
    return cluster.nodes, cluster.gpus_per_node, cluster.device.name


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"gpu": "a100", "gpus": 8}, (1, 8, "A100-SXM4-80GB")),
        ({"gpu": "a100-40", "gpus": 64}, (8, 8, "A100-SXM4-40GB")),
        ({"gpu": "h100", "gpus": 1024}, (128, 8, "H100-SXM5-80GB")),
        ({"gpu": "h100", "gpus": 12}, (2, 6, "H100-SXM5-80GB")),
        ({"gpu": "h100", "gpus": 16, "nodes": 4}, (4, 4, "H100-SXM5-80GB")),
        ({"gpu": "h100", "nodes": 2}, (2, 8, "H100-SXM5-80GB")),
        ({"gpu": "h100"}, (1, 1, "H100-SXM5-80GB")),
        ({"gpu": "gb200", "gpus": 72}, (18, 4, "GB200-186GB")),
        ({"gpu": "V100-SXM3-32GB", "gpus": 16}, (1, 16, "V100-SXM3-32GB")),
        ({"gpu": "gh200", "gpus": 4}, (4, 1, "GH200-96GB")),
        ({"gpu": "3090", "gpus": 8}, (1, 8, "RTX-3090")),
        ({"node_type": "dgx-h100"}, (1, 8, "H100-SXM5-80GB")),
        ({"node_type": "p4d", "nodes": 2}, (2, 8, "A100-SXM4-40GB")),
        ({"node_type": "p4d", "gpus": 24}, (3, 8, "A100-SXM4-40GB")),
        ({"node_type": "p4d", "gpus": 4, "gpu": "a100-40"}, (1, 4, "A100-SXM4-40GB")),
    ],
)
def test_named_hardware(flags: dict[str, object], expected: tuple[int, int, str]) -> None:
    cluster = resolve(**flags)
    assert shape(cluster) == expected
    assert not cluster.probed
    assert cluster.capacity_bytes == cluster.device.capacity_bytes


def test_a_node_type_gives_links_host_memory_cores_and_disks() -> None:
    cluster = resolve(node_type="dgx-h100", nodes=2)
    assert cluster.intra_link == find_link("nvlink4-h100")
    assert (cluster.inter_link, cluster.nics_per_node) == (find_link("ib-ndr"), 8)
    assert cluster.host_memory_bytes_per_node == 2048 * GIB
    assert cluster.host_cores_per_node == 112
    assert cluster.nvme_bytes_per_node == 30720 * GB
    assert (cluster.node_type, cluster.assumed) == ("dgx-h100", "")


def test_a_part_of_a_node_gets_its_share_of_the_host() -> None:
    whole, part = resolve(gpu="a100", gpus=8), resolve(gpu="a100", gpus=2)
    assert part.node_type == whole.node_type == "dgx-a100-80gb"
    assert part.host_memory_bytes_per_node * 4 == whole.host_memory_bytes_per_node
    assert part.host_cores_per_node * 4 == whole.host_cores_per_node
    assert part.assumed == "host and links are taken from dgx-a100-80gb (nvlink3-a100 of 300 GB/s)"


def test_machines_one_owns_come_before_clouds() -> None:
    preferred = {"a100": "dgx-a100-80gb", "mi300x": "mi300x-8", "4090": "server-8x4090", "v100": "aws-p3.16xlarge"}
    assert {name: resolve(gpu=name, gpus=8).node_type for name in preferred} == preferred


def test_a_vcpu_is_half_a_core() -> None:
    assert resolve(node_type="gcp-a3-highgpu-8g").host_cores_per_node == 104


def test_a_network_sold_below_its_line_rate_is_scaled() -> None:
    link = resolve(node_type="gcp-a3-highgpu-2g", nodes=2).inter_link
    full = find_link("eth-100")
    assert link is not None
    assert link.theoretical_gbs_per_direction == pytest.approx((full.theoretical_gbs_per_direction or 0) / 2)
    assert link.busbw_gbs["all_reduce"] == pytest.approx((full.busbw_gbs["all_reduce"] or 0) / 2)


def test_a_link_counted_per_node_counts_once() -> None:
    assert resolve(node_type="p5", nodes=2).nics_per_node == 1


def test_inside_one_nvl72_rack_nodes_talk_over_nvlink() -> None:
    rack, two_racks = resolve(gpu="gb200", gpus=72), resolve(gpu="gb200", gpus=144)
    assert rack.inter_link == rack.intra_link == find_link("nvlink5-gb200-nvl72")
    assert two_racks.inter_link == find_link("ib-ndr")


def test_a_node_of_several_trays_has_the_adapters_of_each() -> None:
    """A tray of 4 GPUs has 4; two racks' 144 GPUs in two nodes have as many for each GPU."""
    trays, racks = (resolve(gpu="gb200", gpus=144, nodes=nodes) for nodes in (36, 2))
    assert trays.inter_link == racks.inter_link == find_link("ib-ndr")
    assert (trays.nics_per_node, racks.nics_per_node) == (4, 72)


def test_cards_bridged_in_pairs_do_not_make_four() -> None:
    assert resolve(gpu="h100-nvl", gpus=2).intra_link == find_link("nvlink4-bridge-h100")
    assert resolve(gpu="h100-nvl", gpus=4).intra_link == find_link("pcie5-x16")


def test_every_device_resolves_alone_and_by_eight() -> None:
    for device in devices():
        for gpus in (1, 8):
            cluster = resolve(gpu=device.name, gpus=gpus, memory_gb=64.0)
            assert cluster.gpus == gpus
            assert cluster.capacity_bytes > GIB
            assert cluster.host_memory_bytes_per_node > GIB
            assert cluster.host_cores_per_node >= 1
            assert device.form == "SoC" or gpus == 1 or cluster.intra_link or cluster.gpus_per_node == 1


def test_a_device_without_any_node_type_says_what_was_assumed() -> None:
    cluster = resolve(gpu="p40", gpus=4)
    assert cluster.assumed == (
        "no node type carries P40: assumed 6 cores, host memory of 1.5 times the device's per GPU"
    )
    assert cluster.host_memory_bytes_per_node == round(cluster.capacity_bytes * 4 * 1.5)


def test_unified_memory_must_be_given() -> None:
    with pytest.raises(
        ContradictoryRequest, match=r"Apple-M1-Max is not in its datasheet; give it with --max-memory-gb"
    ):
        resolve(gpu="m1 max")
    cluster = resolve(gpu="m1 max", memory_gb=48.0)
    assert cluster.capacity_bytes == cluster.host_memory_bytes_per_node == 48 * GB
    assert "memory shared with the host" in cluster.assumed


def test_a_null_total_falls_back_to_the_nominal_size() -> None:
    assert resolve(gpu="GH200-144GB").capacity_bytes == round(144 * GB * 0.98)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"gpus": 0}, r"--gpus is 0; give a whole number from 1 to 1,000,000"),
        ({"gpus": -8}, r"--gpus is -8"),
        ({"gpus": 10**12}, r"--gpus is 1000000000000"),
        ({"nodes": 0, "gpu": "h100"}, r"--nodes is 0"),
        ({"node_type": "dgx-h100", "nodes": 1_000_000}, r"8,000,000 GPUs are more than 1,000,000"),
        ({"gpu": "h100", "gpus": 9}, r"9 GPUs do not divide evenly over 2 nodes; ask for 8 or 10 GPUs, or --nodes 3"),
        ({"gpu": "h100", "gpus": 8, "nodes": 3}, r"8 GPUs do not divide evenly over 3 nodes; ask for 6 or 9 GPUs"),
        ({"gpu": "h100", "gpus": 4, "nodes": 8}, r"4 GPUs cannot be spread over 8 nodes"),
        ({"node_type": "p4d", "gpus": 12}, r"--gpus 12 contradicts 1 x aws-p4d.24xlarge.* = 8 GPUs"),
        ({"node_type": "p4d", "gpus": 8, "nodes": 2}, r"--gpus 8 contradicts 2 x aws-p4d.24xlarge.* = 16 GPUs"),
        ({"node_type": "p4d", "gpu": "h100"}, r"has A100-SXM4-40GB, not h100"),
        ({"gpu": "cpu", "gpus": 3, "nodes": 2}, r"3 ranks do not divide over --nodes 2"),
        ({"gpu": "h1000"}, r"unknown GPU 'h1000'; nearest: H100"),
        ({"node_type": "dgx-h1000"}, r"unknown node type 'dgx-h1000'; nearest: dgx-h100"),
    ],
)
def test_what_cannot_be_is_one_line_with_the_numbers(flags: dict[str, object], message: str) -> None:
    with pytest.raises(DsplanError, match=message) as raised:
        resolve(**flags)
    assert isinstance(raised.value, ContradictoryRequest | UnknownName)
    assert "\n" not in str(raised.value)


def test_no_gpu_here_and_none_named_assumes_a100s_and_says_so() -> None:
    cluster = resolve()
    assert shape(cluster) == (1, 8, "A100-SXM4-80GB")
    assert cluster.assumed.startswith("no GPU found here; assumed 8 x A100-SXM4-80GB (name yours with --gpu)")
    assert shape(resolve(gpus=16)) == (2, 8, "A100-SXM4-80GB")
    assert shape(resolve(nodes=2)) == (2, 8, "A100-SXM4-80GB")


def test_a_cpu_is_shared_by_its_ranks() -> None:
    one, two = resolve(gpu="cpu", gpus=1), resolve(gpu="CPU")
    assert (one.gpus, two.gpus) == (1, 2)
    assert two.device.is_cpu
    assert two.capacity_bytes == 60 * GIB
    assert (two.device.peak_flops("fp32") or 0) * 2 == pytest.approx(one.device.peak_flops("fp32"))
    assert (two.intra_link, two.host_memory_bytes_per_node) == (None, 120 * GIB)


def test_a_cpu_whose_clock_is_hidden_says_that_times_are_a_guess() -> None:
    cluster = resolve(replace(NOTHING, host=replace(HOST, cpu_max_mhz=None)), gpu="cpu")
    assert cluster.device.peak_flops("fp32") is None
    assert cluster.assumed == "the processor's clock is hidden: times are a guess"


def test_the_probed_machine_is_planned_with_the_memory_free_now() -> None:
    cluster = resolve(with_h100s(8))
    assert shape(cluster) == (1, 8, "H100-SXM5-80GB")
    assert cluster.probed
    assert cluster.capacity_bytes == min(81008 * MIB, cluster.device.capacity_bytes or 0)
    assert cluster.intra_link == find_link("nvlink4-h100")
    assert (cluster.host_memory_bytes_per_node, cluster.host_cores_per_node) == (120 * GIB, 16)
    assert cluster.assumed == ""


def test_fewer_gpus_than_here_are_the_first_ones() -> None:
    assert resolve(with_h100s(8, free_bytes=10 * GIB), gpus=4).capacity_bytes > 70 * GIB


def test_a_half_used_gpu_bounds_every_rank() -> None:
    cluster = resolve(with_h100s(4, free_bytes=38 * GIB))
    assert cluster.capacity_bytes == 38 * GIB
    assert cluster.assumed == "GPU 3 has only 38.0 GiB free: every rank is planned for that"


def test_unequal_gpus_are_planned_as_the_least() -> None:
    mixed = with_h100s(2, name="NVIDIA A100-SXM4-40GB", total_bytes=40960 * MIB, free_bytes=40000 * MIB)
    cluster = resolve(mixed)
    assert cluster.device.name == "A100-SXM4-40GB"
    assert cluster.capacity_bytes == 40000 * MIB
    assert cluster.assumed.startswith("the GPUs differ (1 x NVIDIA H100 80GB HBM3, 1 x NVIDIA A100-SXM4-40GB)")


def test_a_gpu_without_datasheet_says_that_its_peaks_are_derived() -> None:
    machine = with_h100s(1, name="NVIDIA Example 1", cuda_cores=1000, sm_clock_max_mhz=1000, compute_capability="9.0")
    cluster = resolve(machine)
    assert cluster.device.peak_flops("bf16") == 2e12
    assert "is not in the catalogue: its peaks are derived" in cluster.assumed


def test_more_gpus_than_here_are_more_such_nodes() -> None:
    many = resolve(with_h100s(8), gpus=32)
    assert shape(many) == (4, 8, "H100-SXM5-80GB")
    assert many.probed
    assert many.inter_link is not None
    assert many.assumed == "the network between nodes is taken from dgx-h100"


def test_more_gpus_than_here_that_one_fuller_node_holds() -> None:
    cluster = resolve(with_h100s(1), gpus=8)
    assert shape(cluster) == (1, 8, "H100-SXM5-80GB")
    assert cluster.assumed.startswith("1 x H100-SXM5-80GB found here, planned for 8 of them")


def test_the_adapters_that_were_probed_join_the_nodes() -> None:
    nics = tuple(Nic(name=f"mlx5_{port}:1", kind="infiniband", gbit=200.0) for port in range(4))
    cluster = resolve(replace(with_h100s(8), host=replace(HOST, nics=nics)), nodes=2)
    assert (cluster.inter_link, cluster.nics_per_node) == (find_link("ib-hdr"), 4)


def test_the_recorded_node_in_trouble_plans_for_what_is_left() -> None:
    with playing("8xh100_troubled"):
        cluster = resolve(probe_hardware())
    assert shape(cluster) == (1, 6, "H100-SXM5-80GB")
    assert cluster.capacity_bytes == (81559 - 551 - 40 * 1024) * MIB
    assert cluster.assumed.split("; ") == [
        "GPU 2 has only 39.1 GiB free (process 41234 holds 40.0 GiB, process 41235 holds an unknown amount): "
        "every rank is planned for that",
        "GPU 3 is cut into MIG slices and is left out",
        "GPU 6 does not answer and is left out",
        "GPU 5 is throttled (hardware slowdown, hardware thermal slowdown) and will hold the others back",
    ]


def test_recorded_geforce_cards_stage_through_host_memory_unless_bridged() -> None:
    for recording, expected in (("2x4090", "pcie-host-staged"), ("2x3090_bridged", "nvlink3-bridge-ampere")):
        with playing(recording):
            assert resolve(probe_hardware()).intra_link == find_link(expected)


def test_only_mig_slices_here_is_one_slice() -> None:
    part = MigDevice(name="MIG 3g.40gb", total_bytes=40448 * MIB, free_bytes=40400 * MIB, multiprocessors=60)
    machine = with_h100s(1, mig_enabled=True, mig_devices=(part,))
    for cluster in (resolve(machine), probed_cluster(machine)):
        assert shape(cluster) == (1, 1, "MIG 3g.40gb")
        assert cluster.capacity_bytes == 40400 * MIB


def test_the_cluster_of_a_started_process() -> None:
    assert probed_cluster(NOTHING).gpus == 2
    assert probed_cluster(NOTHING, ranks=4).capacity_bytes == 30 * GIB
    assert shape(probed_cluster(with_h100s(8))) == (1, 8, "H100-SXM5-80GB")
    assert shape(probed_cluster(with_h100s(8), ranks=2)) == (1, 2, "H100-SXM5-80GB")
    assert shape(probed_cluster(with_h100s(8), ranks=16)) == (2, 8, "H100-SXM5-80GB")
    with pytest.raises(ContradictoryRequest, match="9 ranks do not divide over nodes of 8 GPUs"):
        probed_cluster(with_h100s(8), ranks=9)


def test_usual_sizes() -> None:
    sizes = {device.name: usual_gpus_per_node(device) for device in devices()}
    assert sizes["A100-SXM4-40GB"] == sizes["RTX-3090"] == sizes["MI300X"] == 8
    assert (sizes["GB300-288GB"], sizes["GH200-96GB"], sizes["Apple-M1-Max"]) == (4, 1, 1)


def cluster_file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_a_cluster_file_overrides_the_catalogue(tmp_path: Path) -> None:
    text = (
        "gpu: a100-80gb\nnodes: 4\ngpus_per_node: 4\nintra_link: pcie4\ninter_link: roce-100\nnics_per_node: 2\n"
        "capacity_gb: 70\nhost_memory_gb: 500\nhost_cores: 48\nnvme_gb: 1000\n"
    )
    cluster = resolve(cluster_file=cluster_file(tmp_path, text))
    assert shape(cluster) == (4, 4, "A100-SXM4-80GB")
    assert (cluster.intra_link, cluster.inter_link) == (find_link("pcie4-x16"), find_link("roce-100"))
    assert (cluster.capacity_bytes, cluster.host_memory_bytes_per_node) == (70 * GB, 500 * GB)
    assert (cluster.nics_per_node, cluster.host_cores_per_node, cluster.nvme_bytes_per_node) == (2, 48, 1000 * GB)


def test_a_cluster_file_may_build_on_a_node_type(tmp_path: Path) -> None:
    path = cluster_file(tmp_path, "node_type: dgx-h100\nnodes: 2\n")
    assert resolve(cluster_file=path) == resolve(node_type="dgx-h100", nodes=2)
    assert resolve(cluster_file=path, gpus=16) == resolve(cluster_file=path)
    with pytest.raises(ContradictoryRequest, match=r"--gpus 8 contradicts .*cluster.yaml, which describes 2 x 8"):
        resolve(cluster_file=path, gpus=8)


def test_a_number_is_a_name_too(tmp_path: Path) -> None:
    assert resolve(cluster_file=cluster_file(tmp_path, "gpu: 4090\n")).device.name == "RTX-4090"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu: h100\nnodse: 2\n", r"unknown key 'nodse'; keys are gpu, device"),
        ("gpu: h100\nnodes: two\n", r"nodes is 'two'; write a whole number from 1 to 1,000,000"),
        ("gpu: h100\nnodes: 0\n", r"nodes is 0; write a whole number"),
        ("gpu: h100\ncapacity_gb: -1\n", r"capacity_gb is -1; write a number from 0.001 to 1,000,000 gigabytes"),
        ("gpu: [h100]\n", r"gpu is \['h100'\]; write a name"),
        ("gpu: h1000\n", r"unknown GPU 'h1000'; nearest"),
        ("gpu: h100\nintra_link: nvlink99\n", r"unknown link 'nvlink99'"),
        ("gpu: h100\ndevice: h100\n", r"names both gpu and device"),
        ("nodes: 2\n", r"names no GPU; add `gpu: NAME`"),
        ("node_type: dgx-h100\ngpu: a100\n", r"node_type dgx-h100 has H100-SXM5-80GB, not A100-SXM4-80GB"),
        ("gpu: m1max\n", r"memory of Apple-M1-Max is not in its datasheet"),
        ("just words\n", r"holds no keys"),
        ("gpu: [\n", r"is not YAML"),
    ],
)
def test_a_broken_cluster_file_is_one_line_with_the_remedy(tmp_path: Path, text: str, message: str) -> None:
    path = cluster_file(tmp_path, text)
    with pytest.raises(BrokenFile, match=message) as raised:
        resolve(cluster_file=path)
    assert str(raised.value).startswith(f"{path}: ")
    assert "\n" not in str(raised.value)


def test_a_missing_cluster_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(BrokenFile, match="cannot be read \\(No such file or directory\\); give a YAML file"):
        resolve(cluster_file=str(tmp_path / "nowhere.yaml"))


def test_an_nvl72_is_a_rack_of_trays() -> None:
    rack = resolve(node_type="gb200-nvl72")
    assert (rack.nodes, rack.gpus_per_node) == (18, 4)
    assert resolve(node_type="gb200-nvl72", gpus=8).nodes == 2
    assert resolve(node_type="gb200-nvl72-tray").gpus == 4


def test_interconnect_names_the_link_between_nodes() -> None:
    usual = resolve(gpu="H100", gpus=16)
    slower = resolve(gpu="H100", gpus=16, interconnect="ib-hdr")
    assert (usual.inter_link, usual.nics_per_node) == (find_link("ib-ndr"), 8)
    assert (slower.inter_link, slower.nics_per_node) == (find_link("ib-hdr"), 8)
    assert "8 x ib-hdr in each node" in slower.assumed
    four = resolve(gpu="H100", gpus=16, interconnect="4xib-hdr")
    assert (four.nics_per_node, "ib-hdr" in four.assumed) == (4, False)
    assert resolve(gpu="H100", gpus=16, interconnect="eth-100").nics_per_node == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"gpus": 16, "interconnect": "ib-hdrr"}, r"unknown link 'ib-hdrr'; nearest: ib-hdr"),
        ({"gpus": 16, "interconnect": "nvlink4-h100"}, r"is a link inside a node; between nodes are .*ib-ndr"),
        ({"gpus": 16, "interconnect": "0xib-hdr"}, r"a node has no 0 x ib-hdr"),
        ({"gpus": 8, "interconnect": "ib-hdr"}, r"are one node here; leave it out or give --nodes"),
    ],
)
def test_an_interconnect_that_cannot_be_is_one_line(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(DsplanError, match=message):
        resolve(gpu="H100", **flags)


def test_an_interconnect_beside_a_cluster_file_may_only_repeat_it(tmp_path: Path) -> None:
    path = cluster_file(tmp_path, "node_type: dgx-h100\nnodes: 2\n")
    assert resolve(cluster_file=path, interconnect="ib-ndr").inter_link == find_link("ib-ndr")
    with pytest.raises(ContradictoryRequest, match=r"contradicts .*cluster.yaml; write inter_link: ib-hdr there"):
        resolve(cluster_file=path, interconnect="ib-hdr")
