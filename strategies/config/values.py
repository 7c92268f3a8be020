"""A script's config as values: the same for every strategy.

A field without a value here, None, is left to the plan or to the module that uses it, where its default stands.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from planner.cost.precision import INT8_BLOCK
from planner.question_defaults import LORA_TARGETS
from planner.vocabulary import Checkpointing, Offload, Precision
from strategies.errors import CannotRun

AT_LEAST_1 = {"least": 1}
"""Metadata of a field whose value is refused below 1; `Fields.into` reads `least`, `most` and other `spellings`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Threshold:
    """Limits of one figure; a side without a limit is None."""

    above: float | None = None
    below: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MonitorSettings:
    """Monitoring, with the numbers of `strategies/telemetry/detectors.py`, of which 0 switches one off."""

    enabled: bool | None = None
    """None: under `dsplan run` only."""
    output_path: str = "logs"
    sample_seconds: float | None = None
    """How often the machine is looked at."""
    loss_spike: float | None = None
    slowdown: float | None = None
    memory_growth: float | None = None
    gpu: bool = True
    cpu: bool = True
    network: bool = True
    thresholds: Mapping[str, Threshold] = field(default_factory=dict)
    """Limits by figure, beside the detectors' own."""


Compression = Literal["none", "fp16", "bf16", "int8"]
CommunicationDtype = Literal["fp32", "bf16", "fp16"]
AdapterKind = Literal["lora", "dora", "qlora"]
Partition = Literal["uniform", "parameters", "seconds"]
"""What pipeline stages have as equally as can be: blocks, parameters, or the time that their products take."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineSection:
    """Pipeline stages of a model."""

    stages: int | None = field(default=None, metadata=AT_LEAST_1)
    """The pipeline's degree, where a plan is made now."""
    partition: Partition = field(default="uniform", metadata={"spellings": {"best": "seconds", "profile": "seconds"}})
    """What the stages have as equally as can be."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedParts:
    """An optimizer or scheduler by name, with the arguments that the script gives it."""

    name: str
    params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp16Section:
    """Loss scaling; `strategies/modules/precision.py` has its defaults."""

    loss_scale: float = 0.0
    """0: a scale that adapts, from 2 ** `initial_scale_power` on."""
    initial_scale_power: int | None = None
    loss_scale_window: int | None = field(default=None, metadata=AT_LEAST_1)
    hysteresis: int | None = field(default=None, metadata=AT_LEAST_1)
    min_loss_scale: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroSection:
    """ZeRO's settings; `strategies/backends/zero/settings.py` has its defaults."""

    stage: int | None = None
    reduce_bucket_size: int | None = None
    """In elements."""
    param_persistence_threshold: int | None = None
    """In elements."""
    offload: Offload | None = None
    offload_ratio: float = 1.0
    """The part of the optimizer state that leaves the GPU, at most."""
    nvme_path: str | None = None
    pin_memory: bool | None = None
    buffer_count: int | None = None
    """Host buffers that wait for NVMe."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CommunicationSection:
    """Communication of gradients."""

    data_type: CommunicationDtype | None = None
    """Of the reduction; None: as gradients are made."""
    compression: Compression = "none"
    error_feedback: bool = True
    """Whether what rounding lost is added to the next step's gradients."""
    block_size: int = field(default=INT8_BLOCK, metadata=AT_LEAST_1)
    """Elements that share one scale under `int8`."""
    bucket_mib: float | None = None
    """Gradients that are reduced at a time, in 2**20 bytes, as DDP counts; None: the backend's own size."""

    def bucket_elements(self, bytes_per_element: int) -> int | None:
        """Return `bucket_mib` in gradients of a size, at least one; None where it is not set."""
        return None if self.bucket_mib is None else max(1, int(self.bucket_mib * 2**20) // bytes_per_element)


@dataclass(frozen=True, kw_only=True, slots=True)
class ActivationSection:
    """Activation checkpointing; `policy` None leaves it to the plan, `cpu_checkpointing` keeps it on the host."""

    policy: Checkpointing | None = None
    cpu_checkpointing: bool = False

    @property
    def effective_policy(self) -> Checkpointing | None:
        """The policy that is meant: `full` where only `cpu_checkpointing` is said, which moves checkpoints."""
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
    active: int = field(default=3, metadata=AT_LEAST_1)
    output_path: str = "traces"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoraSection:
    """Adapters that are put beside frozen weights; docs/reference/config.md has the words of `targets`."""

    method: AdapterKind = "lora"
    """`lora`, `dora`, or `qlora`, beside weights that are stored in 4 bits."""
    rank: int | None = field(default=None, metadata=AT_LEAST_1)
    """Of the adapters; None: `planner/models/counting/adapters.py` has it."""
    alpha: float | None = None
    """An adapter's output counts alpha / rank times; None: alpha is twice the rank."""
    targets: str = LORA_TARGETS
    """What adapters are put beside."""
    dropout: float = field(default=0.0, metadata={"most": 1.0})
    """Share of an adapter's inputs that is dropped in training."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointSection:
    """Retention of checkpoints; None keeps all, and saves only where the script calls for it."""

    directory: str | None = None
    keep_last: int | None = field(default=None, metadata=AT_LEAST_1)
    asynchronous: bool = False
    every_steps: int | None = field(default=None, metadata=AT_LEAST_1)
    trainable_only: bool = False
    """Whether frozen weights are left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSection:
    """Reading of `training_data`."""

    num_workers: int = 0
    """Processes that read."""
    pin_memory: bool | None = None
    """None: where there is a GPU."""
    bad_samples: int = 0
    """How many a rank leaves out that cannot be read."""
    seed: int | None = None
    """Of the samples' order; None: torch's seed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScriptConfig:
    """The settings of the config; None if absent (or `auto`)."""

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
    weights: str = ""
    """Directory or file that the model's weights are read from; empty where it has its own."""
    kernels: Mapping[str, str] = field(default_factory=dict)
    wall_clock_breakdown: bool = False
    memory_breakdown: bool = False
    steps_per_print: int | None = None
    pipeline: PipelineSection = field(default_factory=PipelineSection)
    values: Mapping[str, Any] = field(default_factory=dict)
    """The part that DeepSpeed gets."""

    @property
    def zero_stage(self) -> int | None:
        """The stage of the config."""
        return self.zero.stage

    def global_batch_size(self, data_parallel: int) -> int | None:
        """Return the samples per optimizer step, from `train_batch_size` or the product of the other two.

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
