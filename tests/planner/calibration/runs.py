"""Runs of an imagined user: real plans, whose step times are those of hardware with factors that nobody knows."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hardware_db.fingerprint import Fingerprint, MachineIdentity, Versions, fingerprint
from hardware_db.measurement import Measured, Measurement, Outcome, measure_run
from hardware_db.probe.machine import Host, Machine, Software
from planner.calibration.learn import with_factors
from planner.cluster.resolve import HardwareRequest, resolve_cluster
from planner.cost.timing import step_time
from planner.models.facts import ModelFacts
from planner.models.resolve import resolve_model
from planner.search.estimate import job_of, plan_of, price
from planner.search.request import Request, WorkOptions, make_request
from planner.types.cluster import Factors
from planner.types.plan import Configuration
from planner.types.plan_io import plan_to_dict

HERE = Machine(
    host=Host(
        system="Linux",
        cpu_model="Testing CPU",
        cpu_flags=frozenset({"avx2", "fma"}),
        cpu_max_mhz=3000.0,
        physical_cores=8,
        logical_cores=16,
        usable_cores=8,
        memory_total_bytes=64 << 30,
        memory_available_bytes=60 << 30,
    ),
    software=Software(python="3.11.7"),
)
"""A machine without GPUs."""
A100S = Fingerprint(
    machine=MachineIdentity(device="NVIDIA A100-SXM4-80GB", device_count=8), versions=Versions(torch="2.9.0")
)
SLOW = Factors(compute=0.7, memory=0.8, intra_link=0.6)


@dataclass(frozen=True, kw_only=True, slots=True)
class User:
    """A user of `model` on some hardware whose true factors are `truth`; every run is `noise` (logarithmic) off."""

    model: str | ModelFacts = "facebook/opt-1.3b"
    hardware: HardwareRequest = field(default_factory=lambda: HardwareRequest(gpus=8, gpu="A100-SXM4-80GB"))
    machine: Fingerprint = A100S
    truth: Factors = SLOW
    noise: float = 0.02

    def request(self, **options: Any) -> Request:
        facts = self.model if isinstance(self.model, ModelFacts) else resolve_model(self.model)
        values: dict[str, Any] = {"seq_len": 1024, "global_batch": 64, "precision": "bf16", **options}
        return make_request(facts, resolve_cluster(self.hardware, HERE), WorkOptions(**values))

    def run(self, configuration: Configuration, chance: random.Random, outcome: Outcome = "completed") -> Measurement:
        """The measurement of one run, which lasts what it lasts on the user's hardware."""
        request = self.request(global_batch=configuration.global_batch_size)
        priced = price(request, configuration)
        plan = plan_to_dict(plan_of(priced, step_time(priced.job)))
        seconds = step_time(with_factors(priced.job, self.truth)).step_seconds * math.exp(chance.gauss(0, self.noise))
        measured = Measured(step_seconds=seconds, steps=20)
        return measure_run(plan, self.machine, outcome=outcome, measured=measured)

    def runs(self, count: int, seed: int = 1) -> list[Measurement]:
        """Runs of different configurations, in random order."""
        chance = random.Random(seed)
        configurations = list(self.configurations())
        chance.shuffle(configurations)
        return [self.run(configuration, chance) for configuration in configurations[:count]]

    def configurations(self) -> Sequence[Configuration]:
        """Strategies by micro-batch by checkpointing."""
        gpus = self.request().cluster.gpus
        runs = []
        for strategy, backend in (("ddp", "torch"), ("fsdp", "torch"), ("zero1", "deepspeed"), ("zero3", "deepspeed")):
            for micro in (1, 2, 4, 8):
                for checkpointing in ("none", "full"):
                    replicas = gpus if strategy in ("ddp", "zero1") else 1
                    runs.append(
                        Configuration(
                            strategy=strategy,  # type: ignore[arg-type]
                            backend=backend,  # type: ignore[arg-type]
                            dp_replicate=replicas if strategy == "ddp" else 1,
                            dp_shard=1 if strategy == "ddp" else gpus,
                            micro_batch_size=micro,
                            gradient_accumulation_steps=64 // gpus // micro,
                            global_batch_size=64,
                            sequence_length=1024,
                            precision="bf16",
                            optimizer="adamw",
                            activation_checkpointing=checkpointing,  # type: ignore[arg-type]
                        )
                    )
        return runs


def predicted(request: Request, configuration: Configuration) -> float:
    """Return what the request's cluster, with the factors it has, makes of a configuration, seconds."""
    return step_time(job_of(request, configuration)).step_seconds


def on_this_machine(**changes: Any) -> User:
    """A user of the processor of HERE."""
    values: dict[str, Any] = {
        "model": "openai-community/gpt2",
        "hardware": HardwareRequest(gpus=2, gpu="cpu"),
        "machine": replace(fingerprint(HERE), versions=Versions(torch="2.9.0")),
    }
    return User(**{**values, **changes})
