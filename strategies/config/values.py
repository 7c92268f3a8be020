"""What a script's config says, as values: the same for every strategy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from planner.cost.precision import INT8_BLOCK
from planner.vocabulary import Checkpointing, Method, Offload, Precision
from strategies.errors import CannotRun

# Settings of the monitor.


@dataclass(frozen=True, kw_only=True, slots=True)
class Threshold:
    """Limits of one figure; a side without a limit is None."""

    above: float | None = None
    below: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorSettings:
    """`enabled` None: under `dsplan run` only. A detector whose number is 0 is off; None leaves it at its own default.

    The machine is looked at every `sample_seconds`. `loss_spike`, `slowdown`, `memory_growth`, and what they are
    without a word here: `strategies/telemetry/detectors.py`, as are the limits that `thresholds` adds to, by figure.
    """

    enabled: bool | None = None
    output_path: str = "logs"
    sample_seconds: float | None = None
    loss_spike: float | None = None
    slowdown: float | None = None
    memory_growth: float | None = None
    gpu: bool = True
    cpu: bool = True
    network: bool = True
    thresholds: Mapping[str, Threshold] = field(default_factory=dict)


Compression = Literal["none", "fp16", "bf16", "int8"]
CommunicationDtype = Literal["fp32", "bf16", "fp16"]


Partition = Literal["uniform", "parameters", "seconds"]
"""What pipeline stages have as equally as can be: blocks, parameters, or the time that their products take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSection:
    """How a model is cut into pipeline stages."""

    stages: int | None = None
    """The pipeline's degree, where a plan is made now."""
    partition: Partition = "uniform"
    """What the stages have as equally as can be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedParts:
    """An optimizer or scheduler by name, with the arguments that the script gives it."""

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp16Section:
    """Loss scaling; `loss_scale` 0 is a scale that adapts, starting at 2 ** `initial_scale_power`."""

    loss_scale: float = 0.0
    initial_scale_power: int = 16
    loss_scale_window: int = 1000
    hysteresis: int = 2
    min_loss_scale: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroSection:
    """ZeRO's settings; None leaves one to the plan. Bucket and threshold are elements.

    `offload_ratio` is the part of the optimizer state that leaves the GPU. `buffer_count` host buffers wait for NVMe.
    """

    stage: int | None = None
    reduce_bucket_size: int | None = None
    param_persistence_threshold: int | None = None
    offload: Offload | None = None
    offload_ratio: float = 1.0
    nvme_path: str | None = None
    pin_memory: bool = True
    buffer_count: int = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class CommunicationSection:
    """How gradients travel: the dtype of the reduction (None: as they are made), and what compresses them.

    `block_size` elements share one scale under `int8`; `error_feedback` adds what rounding lost to the next step's
    gradients. `bucket_mib` of gradients are reduced at a time (2**20 bytes each, as DDP counts; None: the backend's
    own size).
    """

    data_type: CommunicationDtype | None = None
    compression: Compression = "none"
    error_feedback: bool = True
    block_size: int = INT8_BLOCK
    bucket_mib: float | None = None

    def bucket_elements(self, bytes_per_element: int) -> int | None:
        """`bucket_mib` in gradients of a size, at least one; None where it is not set."""
        return None if self.bucket_mib is None else max(1, int(self.bucket_mib * 2**20) // bytes_per_element)


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationSection:
    """Activation checkpointing; `policy` None leaves it to the plan, `cpu_checkpointing` keeps it on the host."""

    policy: Checkpointing | None = None
    cpu_checkpointing: bool = False

    @property
    def asked(self) -> Checkpointing | None:
        """The policy that is asked for. What moves to the host are checkpoints: who says only that, has some."""
        return "full" if self.cpu_checkpointing and self.policy is None else self.policy


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSection:
    """A file of metrics, below `output_path`/`job_name`."""

    enabled: bool = False
    output_path: str = "runs"
    job_name: str = "dsplan"


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorboardSection(LogSection):
    """Event files of TensorBoard."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CsvSection(LogSection):
    """CSV files."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProfilerSection:
    """A trace of `active` steps, after `wait` steps that are not watched and `warmup` that are watched and dropped."""

    enabled: bool = False
    wait: int = 1
    warmup: int = 1
    active: int = 3
    output_path: str = "traces"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSection:
    """Adapters that are put beside frozen weights; docs/reference/config.md has the words of `targets`."""

    method: Method = "lora"
    """`lora`, `dora`, or `qlora`, beside weights that are stored in 4 bits."""
    rank: int = 8
    """Of the adapters."""
    alpha: float | None = None
    """An adapter's output counts alpha / rank times; None: alpha is twice the rank."""
    targets: str = "all-linear"
    """What adapters are put beside."""
    dropout: float = 0.0
    """Share of an adapter's inputs that is dropped in training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSection:
    """How checkpoints are kept; None keeps all, and saves only where the script calls for it. `trainable_only` leaves
    out frozen weights."""

    directory: str | None = None
    keep_last: int | None = None
    asynchronous: bool = False
    every_steps: int | None = None
    trainable_only: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSection:
    """How `training_data` is read: by `num_workers` processes, into pinned memory (None: where there is a GPU), in an
    order that `seed` decides (None: torch's seed); a rank leaves out up to `bad_samples` that cannot be read."""

    num_workers: int = 0
    pin_memory: bool | None = None
    bad_samples: int = 0
    seed: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptConfig:
    """The settings of the config; None if absent (or `auto`). `values` is the part that DeepSpeed gets."""

    train_batch_size: int | None = None
    micro_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    gradient_clipping: float = 0.0
    precision: Precision | None = None
    optimizer: NamedParts | None = None
    scheduler: NamedParts | None = None
    fp16: Fp16Section = field(default_factory=Fp16Section)
    zero: ZeroSection = field(default_factory=ZeroSection)
    communication: CommunicationSection = field(default_factory=CommunicationSection)
    accumulate_dtype: CommunicationDtype | None = None
    activations: ActivationSection = field(default_factory=ActivationSection)
    tensorboard: TensorboardSection = field(default_factory=TensorboardSection)
    csv_monitor: CsvSection = field(default_factory=CsvSection)
    profiler: ProfilerSection = field(default_factory=ProfilerSection)
    monitor: MonitorSettings = field(default_factory=MonitorSettings)
    checkpoint: CheckpointSection = field(default_factory=CheckpointSection)
    data: DataSection = field(default_factory=DataSection)
    lora: LoraSection | None = None
    train_only: str = ""
    kernels: Mapping[str, str] = field(default_factory=dict)
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    steps_per_print: int | None = None
    pipeline: PipelineSection = field(default_factory=PipelineSection)
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def zero_stage(self) -> int | None:
        """The stage that the config asks for."""
        return self.zero.stage

    def global_batch_size(self, data_parallel: int) -> int | None:
        """Samples per optimizer step, from `train_batch_size` or the product of the other two.

        Raises:
            CannotRun: the three numbers contradict each other.
        """
        micro, accumulation = self.micro_batch_size, self.gradient_accumulation_steps
        product = None if micro is None else micro * (accumulation or 1) * data_parallel
        if self.train_batch_size is None or micro is None or accumulation is None:
            return self.train_batch_size or product
        if product != self.train_batch_size:
            raise CannotRun(
                f"config: train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps {accumulation} x"
                f" {data_parallel} ranks = {product} is not train_batch_size {self.train_batch_size}; leave one out"
            )
        return product
