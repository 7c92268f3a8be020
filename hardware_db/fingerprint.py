"""The fingerprint of the machine and the versions that a measurement belongs to.

Only what stays the same between two runs on one machine goes in. Free memory, clocks and temperatures stay out, or no
measurement would ever be found again.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from hardware_db.files import digest
from hardware_db.records import dataclass

if TYPE_CHECKING:
    from hardware_db.probe.machine import Gpu, Machine

_KEY_LENGTH = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineIdentity:
    """The hardware of one node.

    `device` is the accelerator's name, empty on a machine without one, `device_memory_bytes` the total of one device,
    `link` what joins the devices of the node, empty where unknown.
    """

    device: str = ""
    device_count: int = 0
    device_memory_bytes: int = 0
    driver: str = ""
    cpu: str = ""
    cores: int = 0
    link: str = ""

    @property
    def key(self) -> str:
        """Twelve hexadecimal digits that change with any field."""
        return digest(asdict(self), _KEY_LENGTH)


@dataclass(frozen=True, kw_only=True, slots=True)
class Versions:
    """Versions of the software that decides speed and memory; empty where not installed."""

    python: str = ""
    torch: str = ""
    cuda: str = ""
    nccl: str = ""
    deepspeed: str = ""
    transformers: str = ""
    accelerate: str = ""
    dsplan: str = ""

    @property
    def key(self) -> str:
        """Twelve hexadecimal digits that change with any field."""
        return digest(asdict(self), _KEY_LENGTH)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fingerprint:
    """A machine and its versions; the key of the machine alone finds measurements of any versions."""

    machine: MachineIdentity
    versions: Versions

    @property
    def key(self) -> str:
        """`<machine key>-<versions key>`."""
        return f"{self.machine.key}-{self.versions.key}"


def fingerprint(machine: Machine) -> Fingerprint:
    """Return the fingerprint of a probed machine.

    All its GPUs count, those that CUDA_VISIBLE_DEVICES hides too: hiding one does not make it another machine. A GPU
    that is cut into MIG slices counts as its slices.
    """
    devices = [device for gpu in machine.gpus for device in _devices(gpu)]
    software = machine.software
    packages = ("torch", "nccl", "deepspeed", "transformers", "accelerate", "dsplan")
    return Fingerprint(
        machine=MachineIdentity(
            device=" + ".join(sorted({name for name, _ in devices})),
            device_count=len(devices),
            device_memory_bytes=min((total for _, total in devices if total), default=0),
            driver=software.driver or "",
            cpu=machine.host.cpu_model or "",
            cores=machine.host.physical_cores or machine.host.logical_cores or 0,
            link=_link(machine.gpus),
        ),
        versions=Versions(
            python=software.python,
            cuda=software.torch_cuda or "",
            **{package: software.version(package) or "" for package in packages},
        ),
    )


def _devices(gpu: Gpu) -> list[tuple[str, int | None]]:
    """Name and total bytes of every device that one GPU is."""
    if gpu.mig_enabled and gpu.mig_devices:
        return [(part.name, part.total_bytes) for part in gpu.mig_devices]
    return [(gpu.name, gpu.total_bytes)]


def _link(gpus: tuple[Gpu, ...]) -> str:
    """Return what joins the GPUs of the node, by the first of them: `nvswitch x18`, `nvlink x4`, `pcie4 x16`."""
    first = gpus[0] if len(gpus) > 1 else None
    if first is None:
        return ""
    if first.nvlink_links:
        return f"{'nvswitch' if first.nvlink_to_switch else 'nvlink'} x{first.nvlink_links}"
    # The slot's best, not its present generation: an idle GPU lowers that.
    if first.pcie_generation_max is None:
        return ""
    return f"pcie{first.pcie_generation_max} x{first.pcie_width_max or '?'}"
