"""Job: everything the cost model looks at when it prices one configuration."""

from __future__ import annotations

from dataclasses import dataclass

from planner.cluster import Cluster
from planner.models.facts import ModelFacts
from planner.models.parameter_counts import ParameterCounts
from planner.plan import Configuration
from planner.workload import Workload


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One configuration of one model, workload and cluster; `counts` are the model's parameters by component."""

    facts: ModelFacts
    counts: ParameterCounts
    workload: Workload
    cluster: Cluster
    configuration: Configuration

    @property
    def tokens_per_micro_batch(self) -> int:
        """Tokens one rank sees in one forward pass (decoder side of encoder-decoders)."""
        return self.configuration.micro_batch_size * self.configuration.sequence_length

    @property
    def eager_attention(self) -> bool:
        """Whether attention runs unfused: asked for, or all that the model has."""
        return self.configuration.attention == "eager" or self.facts.eager_only

    @property
    def source_length(self) -> int:
        """Encoder positions per sample: a speech model's fixed window, the workload's, or the decoder's length."""
        return self.facts.max_source_positions or self.workload.source_length or self.configuration.sequence_length
