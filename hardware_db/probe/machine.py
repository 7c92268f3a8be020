"""The findings of a probe as values. A field is None if the system would not say."""

from __future__ import annotations

from dataclasses import field

from hardware_db.records import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuProcess:
    """A process that holds memory on a GPU; `used_bytes` is None if the driver hides it (containers, WDDM)."""

    pid: int
    used_bytes: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MigDevice:
    """One MIG slice of a GPU; `multiprocessors` is the SMs it owns."""

    name: str
    uuid: str | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    multiprocessors: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One accelerator as its driver reports it now.

    Clocks are MHz, power is watts, temperature is degrees Celsius. `pcie_generation` and `pcie_width` are what the slot
    runs at now (an idle GPU drops its generation), the `_max` ones what card and slot can do together.
    `throttle_reasons` are words, empty when nothing holds the clocks back. `visible` is False where
    CUDA_VISIBLE_DEVICES hides the GPU. `nvlink_to_switch` tells NVSwitch from links that end at another GPU.
    """

    index: int
    name: str
    vendor: str = "nvidia"
    uuid: str | None = None
    visible: bool = True
    lost: bool = False
    compute_capability: str | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None
    used_bytes: int | None = None
    processes: tuple[GpuProcess, ...] | None = None
    mig_enabled: bool | None = None
    mig_devices: tuple[MigDevice, ...] = ()
    ecc_enabled: bool | None = None
    ecc_corrected_errors: int | None = None
    ecc_uncorrected_errors: int | None = None
    cuda_cores: int | None = None
    memory_bus_bits: int | None = None
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    memory_clock_mhz: int | None = None
    memory_clock_max_mhz: int | None = None
    throttle_reasons: tuple[str, ...] | None = None
    power_draw_watts: float | None = None
    power_limit_watts: float | None = None
    temperature_celsius: int | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    nvlink_links: int | None = None
    nvlink_to_switch: bool | None = None

    @property
    def usable(self) -> bool:
        """True if one rank can be placed on the whole GPU: visible, answering, not cut into MIG slices."""
        return self.visible and not self.lost and not self.mig_enabled and self.free_bytes is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuPair:
    """Path between two GPUs: their nearest common ancestor and whether peer-to-peer copies work.

    `ancestor` is one of internal, pcie-switch, pcie-switches, host-bridge, numa-node, system; `p2p` is the driver's
    word ("ok", or why not), or None if it does not say; `nvlink` says whether peer traffic can go over NVLink.
    """

    first: int
    second: int
    ancestor: str | None = None
    p2p: str | None = None
    nvlink: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Disk:
    """A mounted file system on a real disk; `kind` is nvme, ssd or hdd, or None if the kernel does not know."""

    mount: str
    device: str
    filesystem: str
    total_bytes: int
    free_bytes: int
    kind: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Nic:
    """A network adapter that is up; `kind` is infiniband, roce or ethernet, `gbit` its line rate in Gbit/s."""

    name: str
    kind: str
    gbit: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """The machine around the GPUs. `usable_cores` are the logical cores this process may run on (affinity and quota).

    `memory_limit_bytes` is the control group's limit, None without one; `memory_available_bytes` already respects it.
    """

    system: str
    cpu_model: str | None = None
    cpu_flags: frozenset[str] = frozenset()
    cpu_max_mhz: float | None = None
    physical_cores: int | None = None
    logical_cores: int | None = None
    usable_cores: int | None = None
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    memory_limit_bytes: int | None = None
    disks: tuple[Disk, ...] = ()
    nics: tuple[Nic, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """Versions that decide what a plan may use, read without importing any of the packages; None if not installed.

    `driver` is the GPU driver's version, `driver_cuda` the newest CUDA it serves, `torch_cuda` what torch was built for
    ("cpu" for a build without a GPU), `packages` every distribution asked for with its version.
    """

    python: str
    driver: str | None = None
    driver_cuda: str | None = None
    torch_cuda: str | None = None
    packages: tuple[tuple[str, str], ...] = ()

    def version(self, package: str) -> str | None:
        """Return the installed version of torch, nccl, deepspeed, transformers, accelerate or dsplan."""
        return dict(self.packages).get(package)


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Everything one probe found; `messages` are the sentences people should read about it."""

    host: Host
    software: Software
    gpus: tuple[Gpu, ...] = ()
    pairs: tuple[GpuPair, ...] = ()
    messages: tuple[str, ...] = field(default=())

    @property
    def usable_gpus(self) -> tuple[Gpu, ...]:
        """The GPUs that a rank can be placed on, in the driver's order."""
        return tuple(gpu for gpu in self.gpus if gpu.usable)
