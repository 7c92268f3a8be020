"""The host probe against small trees of /proc and /sys, and against this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hardware_db.probe import Disk, Host, Nic, probe
from hardware_db.probe.as_device import cpu_device
from hardware_db.probe.cgroup import Limits, cgroup_limits, usable_cores
from hardware_db.probe.host import macos_available, probe_disks, probe_host, probe_nics
from hardware_db.probe.other_gpus import probe_amd, probe_apple
from hardware_db.units import GIB, KIB

CPU = """processor : {n}
model name : Example CPU @ 2.60GHz
physical id : 0
core id : {core}
cpu MHz : {mhz}
flags : sse2 avx avx2 fma avx512f avx512_bf16
"""


def write(root: Path, files: dict[str, object]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text), encoding="utf-8")
    return root


def tree(root: Path, extra: dict[str, object] | None = None) -> Path:
    processors = "\n".join(CPU.format(n=n, core=n // 2, mhz=2600 + n) for n in range(8))
    memory = f"MemTotal: {64 * GIB // KIB} kB\nMemFree: 1000 kB\nMemAvailable: {60 * GIB // KIB} kB\n"
    return write(root, {"proc/cpuinfo": processors, "proc/meminfo": memory, **(extra or {})})


def test_processor_and_memory_of_a_linux_host(tmp_path: Path) -> None:
    host = probe_host(tree(tmp_path))
    assert (host.cpu_model, host.cpu_max_mhz) == ("Example CPU @ 2.60GHz", 2607.0)
    assert (host.physical_cores, host.logical_cores) == (4, 8)
    assert host.usable_cores == min(8, len(os.sched_getaffinity(0)))
    assert (host.memory_total_bytes, host.memory_available_bytes) == (64 * GIB, 60 * GIB)
    assert host.memory_limit_bytes is None


@pytest.mark.parametrize(
    "files",
    [
        {  # version 2: the limit of the parent counts
            "proc/self/cgroup": "0::/job/step\n",
            "sys/fs/cgroup/job/memory.max": 8 * GIB,
            "sys/fs/cgroup/job/memory.current": 3 * GIB,
            "sys/fs/cgroup/job/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            "sys/fs/cgroup/job/step/memory.max": "max",
            "sys/fs/cgroup/job/cpu.max": "150000 100000",
        },
        {  # version 1
            "proc/self/cgroup": "4:memory:/job\n1:cpu,cpuacct:/job\n",
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": 8 * GIB,
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": 3 * GIB,
            "sys/fs/cgroup/memory/job/memory.stat": f"total_inactive_file {GIB}\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": 9223372036854771712,
            "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us": 150000,
            "sys/fs/cgroup/cpu/job/cpu.cfs_period_us": 100000,
        },
        {  # a container: the path of the group is not mounted, its files are at the root
            "proc/self/cgroup": "0::/kubepods/pod1\n",
            "sys/fs/cgroup/memory.max": 8 * GIB,
            "sys/fs/cgroup/memory.current": 2 * GIB,
            "sys/fs/cgroup/cpu.max": "200000 100000",
        },
    ],
)
def test_the_control_group_limits_memory_and_cores(tmp_path: Path, files: dict[str, object]) -> None:
    root = tree(tmp_path, files)
    assert cgroup_limits(root) == Limits(memory_bytes=8 * GIB, memory_left_bytes=6 * GIB, cpus=2)
    host = probe_host(root)
    assert (host.memory_limit_bytes, host.memory_available_bytes) == (8 * GIB, 6 * GIB)
    assert host.usable_cores is not None
    assert host.usable_cores <= 2


@pytest.mark.parametrize(("allowed", "quota", "usable"), [(1, None, 1), (2, 8, 2), (8, 2, 2), (8, None, 8), (64, 1, 1)])
def test_cores_to_use_are_those_of_affinity_and_quota(
    monkeypatch: pytest.MonkeyPatch, allowed: int, quota: int | None, usable: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(allowed)))
    assert usable_cores(Limits(cpus=quota)) == usable


@pytest.mark.parametrize("cores", [1, 2, 8])
def test_a_machine_reports_other_cores_than_it_has(cores: int) -> None:
    """As `scripts/ci/hostile.sh` has it do."""
    program = (
        "import scripts.ci.other_machine, os, psutil, multiprocessing; from hardware_db.probe import probe_hardware;"
        "from hardware_db.probe.cgroup import usable_cores; host = probe_hardware().host;"
        "print({os.cpu_count(), len(os.sched_getaffinity(0)), psutil.cpu_count(), multiprocessing.cpu_count(),"
        " usable_cores(), host.physical_cores, host.logical_cores, host.usable_cores})"
    )
    environment = {**os.environ, "HOSTILE_CORES": str(cores)}
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    assert shown.stdout.strip() == str({cores})


def test_no_control_group_is_no_limit(tmp_path: Path) -> None:
    assert cgroup_limits(tmp_path) == Limits()


def test_disks_know_their_kind(tmp_path: Path) -> None:
    mounts = (
        "proc /proc proc rw 0 0\n"
        "overlay / overlay rw 0 0\n"
        "/dev/nvme0n1p1 /fast\\040disk ext4 rw 0 0\n"
        "/dev/nvme0n1p1 /again ext4 rw 0 0\n"
        "/dev/sda1 /slow ext4 rw 0 0\n"
        "/dev/vda /virtual ext4 rw 0 0\n"
        "/dev/loop0 /snap/x squashfs ro 0 0\n"
    )
    root = write(tmp_path, {"proc/self/mounts": mounts})
    for folder in ("fast disk", "slow", "virtual", "snap/x"):
        (root / folder).mkdir(parents=True)
    for disk, partition, rotational in (("nvme0n1", "nvme0n1p1", 0), ("sda", "sda1", 1)):
        write(
            root, {f"sys/devices/{disk}/queue/rotational": rotational, f"sys/devices/{disk}/{partition}/partition": 1}
        )
        (root / "sys/class/block").mkdir(parents=True, exist_ok=True)
        (root / "sys/class/block" / partition).symlink_to(root / "sys/devices" / disk / partition)
    by_mount = {disk.mount: disk for disk in probe_disks(root)}
    assert {mount: disk.kind for mount, disk in by_mount.items()} == {
        "/": None,
        "/fast disk": "nvme",
        "/slow": "hdd",
        "/virtual": None,
    }
    assert all(isinstance(disk, Disk) and disk.total_bytes >= disk.free_bytes > 0 for disk in by_mount.values())


def test_active_adapters_with_their_rates(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        {
            "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
            "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
            "sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand",
            "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN",
            "sys/class/infiniband/mlx5_2/ports/1/state": "4: ACTIVE",
            "sys/class/infiniband/mlx5_2/ports/1/rate": "100 Gb/sec (4X EDR)",
            "sys/class/infiniband/mlx5_2/ports/1/link_layer": "Ethernet",
            "sys/class/net/eth0/operstate": "up",
            "sys/class/net/eth0/speed": 25000,
            "sys/class/net/eth0/device/vendor": "0x15b3",
            "sys/class/net/lo/operstate": "unknown",
            "sys/class/net/veth1/operstate": "up",
        },
    )
    assert probe_nics(root) == (
        Nic(name="mlx5_0:1", kind="infiniband", gbit=400.0),
        Nic(name="mlx5_2:1", kind="roce", gbit=100.0),
        Nic(name="eth0", kind="ethernet", gbit=25.0),
    )


def test_amd_gpus_from_the_driver_s_files(tmp_path: Path) -> None:
    files: dict[str, object] = {}
    for card in (0, 1):
        folder = f"sys/class/drm/card{card}/device"
        files |= {
            f"{folder}/vendor": "0x1002",
            f"{folder}/mem_info_vram_total": 206141652992,
            f"{folder}/mem_info_vram_used": 300 << 20,
            f"{folder}/unique_id": f"0x12345{card}",
            f"{folder}/current_link_speed": "32.0 GT/s PCIe",
            f"{folder}/current_link_width": 16,
            f"{folder}/xgmi_hive_info/xgmi_hive_id": "0x77",
            f"{folder}/hwmon/hwmon3/power1_average": 141000000,
            f"{folder}/hwmon/hwmon3/temp1_input": 45000,
            f"sys/class/kfd/kfd/topology/nodes/{card + 1}/properties": "simd_count 1216\ngfx_target_version 90402\n",
        }
    files["sys/class/kfd/kfd/topology/nodes/0/properties"] = "cpu_cores_count 96\ngfx_target_version 0\n"
    files["sys/class/drm/card2/device/vendor"] = "0x1a03"
    gpus, pairs = probe_amd(write(tmp_path, files))
    assert [gpu.name for gpu in gpus] == ["MI300X", "MI300X"]
    assert (gpus[0].vendor, gpus[0].pcie_generation, gpus[0].power_draw_watts) == ("amd", 5, 141.0)
    assert gpus[0].free_bytes == 206141652992 - (300 << 20)
    assert pairs[0].nvlink


def test_an_apple_chip_shares_the_memory_of_its_host() -> None:
    host = Host(
        system="Darwin 24.1.0 arm64",
        cpu_model="Apple M3 Max",
        memory_total_bytes=64 * GIB,
        memory_available_bytes=40 * GIB,
    )
    (gpu,) = probe_apple(host)
    assert (gpu.name, gpu.vendor, gpu.free_bytes) == ("Apple M3 Max", "apple", 40 * GIB)
    assert probe_apple(Host(system="Linux 6.8 x86_64", cpu_model="Apple M1")) == ()


def test_free_pages_of_macos() -> None:
    printed = "Mach Virtual Memory Statistics: (page size of 16384 bytes)\nPages free: 100.\nPages active: 7.\n"
    assert macos_available(printed + "Pages inactive: 50.\nPages speculative: 10.\n") == 160 * 16384
    assert macos_available("no such command") is None


@pytest.mark.parametrize(
    ("flags", "fp32_per_cycle", "bf16_per_cycle"),
    [
        ({"sse2", "avx", "avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16"}, 64, 1024),
        ({"sse2", "avx", "avx2", "fma", "avx512f", "avx512_bf16"}, 64, 128),
        ({"sse2", "avx", "avx2", "fma"}, 32, 32),
        ({"asimd"}, 16, 16),
        (set(), 2, 2),
    ],
)
def test_the_peak_of_a_cpu_follows_its_widest_unit(flags: set[str], fp32_per_cycle: int, bf16_per_cycle: int) -> None:
    host = Host(
        system="Linux",
        cpu_flags=frozenset(flags),
        cpu_max_mhz=2000.0,
        physical_cores=16,
        usable_cores=8,
        memory_total_bytes=64 * GIB,
        memory_limit_bytes=32 * GIB,
    )
    device = cpu_device(host)
    assert device.is_cpu
    assert device.peak_flops("fp32") == pytest.approx(8 * 2e9 * fp32_per_cycle)
    assert device.peak_flops("bf16") == pytest.approx(8 * 2e9 * bf16_per_cycle)
    assert device.capacity_bytes == 32 * GIB
    assert device.memory_bandwidth_bytes_per_s is None


def test_this_machine_is_probed_with_its_versions() -> None:
    import torch

    machine = probe()
    assert machine.host.memory_total_bytes
    assert machine.host.usable_cores is not None
    assert 1 <= machine.host.usable_cores <= len(os.sched_getaffinity(0))
    assert machine.software.version("torch") == torch.__version__
    assert machine.software.torch_cuda == (torch.version.cuda or "cpu")
    assert machine.software.version("no-such-package") is None


def test_probing_imports_neither_torch_nor_numpy() -> None:
    program = "import sys, hardware_db.probe as p; p.probe(); print({'torch', 'numpy', 'psutil'} & set(sys.modules))"
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert finished.stdout.strip() == "set()"
