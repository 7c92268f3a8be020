"""TrainingCase: one short training run that a benchmark makes. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from planner.models.factory import any_model
from planner.models.facts import ModelFacts
from planner.models.hf_config import facts_from_config
from planner.plan import Configuration
from planner.vocabulary import Task


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingCase:
    """`configuration` of `model`, trained for `task`.

    `config` is the transformers config of the model with its `model_type`; empty for a model that dsplan knows by name.
    """

    model: str
    task: Task
    configuration: Configuration
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.configuration.world_size

    @property
    def needs_deepspeed(self) -> bool:
        return self.configuration.backend == "deepspeed"

    @property
    def facts(self) -> ModelFacts:
        """The model as the planner knows it.

        Raises:
            DsplanError: nothing is known by its name.
        """
        return facts_from_config(self.config, self.model) if self.config else any_model(self.model)

    def __str__(self) -> str:
        chosen = self.configuration
        ours = " (native)" if chosen.backend == "native" else ""
        parts = [f"{self.model}: {chosen.strategy}{ours} on {self.ranks} {'rank' if self.ranks == 1 else 'ranks'}"]
        parts.append(f"micro-batch {chosen.micro_batch_size} x {chosen.sequence_length}, {chosen.precision}")
        parts += [f"offload {chosen.offload}"] if chosen.offload != "none" else []
        parts += ["checkpointing"] if chosen.activation_checkpointing != "none" else []
        return ", ".join(parts)
