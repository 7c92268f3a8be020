"""Post-training: samples that are a prompt and a completion, and how completions are generated, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from math import exp
from typing import Any

from hardware_db.records import dataclass
from planner import vocabulary as words
from planner.errors import ContradictoryRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class PostTraining:
    """One post-training job beyond its model, its optimizer and how it is spread.

    A *round* is one generation with the optimizer steps that train on it: `prompts_per_step` x `generations` samples,
    each of them trained on `num_iterations` times. Where nothing is generated a round is an optimizer step.

    Raises:
        ContradictoryRequest: a number is out of range, or a word is not in the vocabulary.
    """

    prompt_length: int
    """Tokens of a prompt."""
    completion_length: int
    """Tokens of a completion on average."""
    completion_max: int
    """Tokens at which a completion is cut."""
    generations: int = 1
    """Completions of one prompt."""
    prompts_per_step: int = 1
    """Prompts of a round."""
    num_iterations: int = 1
    """Times that a round trains on each of its samples."""
    beta: float = 0.0
    """Weight of the divergence from the reference model; at 0 there is no such model in reinforcement learning."""
    rollout: words.Rollout = "hf"
    """Where completions are generated."""
    rollout_gpus: int = 0
    """GPUs beside those that train; 0 where the same generate."""
    rollout_tp: int = 1
    """GPUs of one engine."""
    rollout_memory: float = 0.3
    """Share of a GPU's memory that an engine takes."""
    rollout_sleep: bool = False
    """An engine beside training gives its memory back while the model trains."""
    steps_off: int = 0
    """Rounds that generation may run ahead of training."""
    precompute_reference: bool = False
    """The reference model's log-probabilities are computed before training."""

    def __post_init__(self) -> None:
        for name in ("completion_length", "completion_max", *_COUNTS):
            if getattr(self, name) < 1:
                raise ContradictoryRequest(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.completion_length > self.completion_max:
            raise ContradictoryRequest(
                f"completions of {self.completion_length} tokens on average are longer than the longest,"
                f" {self.completion_max}"
            )
        if min(self.prompt_length, self.beta, self.rollout_gpus, self.steps_off) < 0:
            raise ContradictoryRequest("prompt_length, beta, rollout_gpus and steps_off are at least 0")
        if not 0 < self.rollout_memory <= 1:
            raise ContradictoryRequest(f"rollout_memory is {self.rollout_memory}; it is a share, above 0 and at most 1")
        if self.rollout not in words.ROLLOUTS:
            raise ContradictoryRequest(f"rollout {self.rollout!r} is not one of {', '.join(words.ROLLOUTS)}")
        if (self.rollout == "server") != (self.rollout_gpus > 0):
            raise ContradictoryRequest("rollout_gpus are for the rollout server, which has GPUs of its own")
        if self.rollout_gpus % self.rollout_tp:
            raise ContradictoryRequest(
                f"rollout_tp {self.rollout_tp} does not divide the {self.rollout_gpus} GPUs that generate"
            )

    @property
    def samples(self) -> int:
        """Completions of a round."""
        return self.prompts_per_step * self.generations

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        return self.prompt_length + self.completion_max

    @property
    def mean_tokens(self) -> int:
        """Tokens of a sample on average."""
        return self.prompt_length + self.completion_length

    @property
    def scored_share(self) -> float:
        """Share of the longest sample's tokens whose log-probability is taken: those of the completion."""
        return self.completion_max / self.longest

    def updates(self, global_batch: int) -> float:
        """Optimizer steps of a round that take `global_batch` samples each."""
        return max(self.samples * self.num_iterations / global_batch, 1.0)

    def surviving(self, tokens: float) -> float:
        """Share of completions that are longer than so many tokens.

        Lengths are spread from 0 to the longest as evenly as their mean allows: of all distributions with that mean and
        that bound it is the one of largest entropy, an exponential that is cut at the bound (Jaynes 1957).
        """
        share = min(max(tokens / self.completion_max, 0.0), 1.0)
        rate = _rate(self.completion_length / self.completion_max)
        if rate is None:
            return 1.0 if share < 1 else 0.0
        if abs(rate) < _FLAT:
            return 1 - share
        return (exp(rate) - exp(rate * share)) / (exp(rate) - 1)

    def longest_of(self, samples: int) -> float:
        """Return the tokens of the longest of so many completions, as expected.

        It is the integral of the probability that at least one is longer.
        """
        width = self.completion_max / _POINTS
        points = ((index + 0.5) * width for index in range(_POINTS))
        return sum(width * (1 - (1 - self.surviving(tokens)) ** samples) for tokens in points)


_COUNTS = ("generations", "prompts_per_step", "num_iterations", "rollout_tp")
_FLAT = 1e-6
_POINTS = 64
_STEEPEST = 200.0


@lru_cache(maxsize=64)
def _rate(mean: float) -> float | None:
    """Return the exponent of the density on [0, 1] with this mean, found by halving; None where all are as long."""
    if mean >= 1 - 1 / _STEEPEST:
        return None
    low, high = -_STEEPEST, _STEEPEST
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _mean(middle) < mean else (low, middle)
    return (low + high) / 2


def _mean(rate: float) -> float:
    """Return the mean of the density proportional to exp(rate * x) on [0, 1]."""
    if abs(rate) < _FLAT:
        return 0.5
    if rate > 0:
        return 1 / (1 - exp(-rate)) - 1 / rate
    return exp(rate) / (exp(rate) - 1) - 1 / rate


def post_training_section(post: PostTraining | None) -> dict[str, Any]:
    """Return the keys of a plan's workload that say the same; none where a job is no post-training."""
    return {} if post is None else {item.name: getattr(post, item.name) for item in fields(PostTraining)}


def post_training_of_section(section: Mapping[str, Any]) -> PostTraining | None:
    """Return what a plan's workload says of post-training; None where it says nothing.

    Raises:
        ContradictoryRequest: as `PostTraining`.
    """
    if section.get("completion_length") is None:
        return None
    values = {item.name: section[item.name] for item in fields(PostTraining) if section.get(item.name) is not None}
    return PostTraining(**values)
