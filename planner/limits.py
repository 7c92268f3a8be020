"""Limits of the numbers that a person gives, as a flag, in a file or as a keyword, and defaults that help texts name.

They keep nonsense out, not what is large: an answer for a petabyte per GPU helps nobody, and one for 10^12 layers never
comes.
"""

from __future__ import annotations

from collections.abc import Mapping

from hardware_db.handed_in import quote
from hardware_db.records import dataclass
from planner.errors import ContradictoryRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """Numbers from `least` to `most`, whole ones unless `fraction`."""

    least: float
    most: float
    fraction: bool = False

    def __str__(self) -> str:
        kind = "a number" if self.fraction else "a whole number"
        if self.most < _READABLE:
            return f"{kind} from {self.least:,} to {self.most:,}"
        return f"{kind} from {self.least:,} {f'to {self.most:.0e}' if self.fraction else 'on that fits in 64 bits'}"

    def allows(self, value: object) -> bool:
        """Return whether a value is such a number; truth values, text, NaN and infinities are none."""
        kinds = (int, float) if self.fraction else (int,)
        return isinstance(value, kinds) and not isinstance(value, bool) and self.least <= value <= self.most

    def check(self, name: str, value: object) -> None:
        """Refuse a value, which may be None, in the words of dsplan's other errors.

        Raises:
            ContradictoryRequest: it is no number within the limit.
        """
        if value is not None and not self.allows(value):
            raise ContradictoryRequest(f"{name} is {quote(value)}; give {self}")


_READABLE = 10**15
"""Nobody counts the digits of larger limits."""

GPUS = Limit(least=1, most=1_000_000)
"""Also nodes, and the degrees of parallelism."""
TOKENS = Limit(least=1, most=100_000_000)
"""Of one sample."""
PIXELS = Limit(least=1, most=16_384)
"""Of an image's side."""
SAMPLES = Limit(least=1, most=1_000_000_000)
STEPS = Limit(least=1, most=1_000_000_000)
NODE_RANK = Limit(least=0, most=100_000)
PROCESSES = Limit(least=1, most=1024)
"""On one node."""
PLANS = Limit(least=1, most=1000)
GIGABYTES = Limit(least=0.001, most=1_000_000, fraction=True)
"""Of 1e9 bytes: from a megabyte to a petabyte."""
USD_PER_HOUR = Limit(least=0.0001, most=1_000_000, fraction=True)
WEIGHT = Limit(least=0, most=1000, fraction=True)
"""Of a term of a loss."""
ROUNDS = Limit(least=0, most=1000)
"""Of generation, ahead of training."""
FAILURES = Limit(least=0, most=1_000_000, fraction=True)
"""Of one node in 1,000 days."""
GIGABYTES_PER_SECOND = Limit(least=0.000001, most=1_000_000, fraction=True)
SECONDS = Limit(least=0, most=1_000_000, fraction=True)
HOURS = Limit(least=0, most=1_000_000, fraction=True)
MTTF_HOURS = Limit(least=0.001, most=10_000_000, fraction=True)
SPARES = Limit(least=0, most=1_000_000)
SHARE = Limit(least=0.0001, most=1, fraction=True)
SPEED = Limit(least=0.01, most=100, fraction=True)
"""Of a device over others of its kind."""
IMBALANCE = Limit(least=1, most=1000, fraction=True)
"""Of the busiest over the mean."""
TRAINING_TOKENS = Limit(least=1, most=10**18, fraction=True)
DAYS = Limit(least=0.0001, most=1_000_000, fraction=True)
MINUTES = Limit(least=0, most=100_000, fraction=True)
BENCH_MINUTES = Limit(least=0.001, most=100_000, fraction=True)
GRACE_SECONDS = Limit(least=1, most=86_400, fraction=True)
PORTS = Limit(least=1, most=65_535)
ANSWER_SECONDS = Limit(least=1, most=3600, fraction=True)
RETRIES = Limit(least=0, most=1_000_000)
HOST_CORES = Limit(least=1, most=1_000_000)
NICS = Limit(least=1, most=10_000)

BYTES = Limit(least=0, most=2**63 - 1)
"""Of a figure in a plan file."""
AMOUNT = Limit(least=0, most=10**30, fraction=True)
"""Seconds and rates in a plan file."""

_FIGURE = Limit(least=1, most=1_000_000_000)
_FROM_NONE = Limit(least=0, most=1_000_000_000)
_MODEL_FIGURES: Mapping[str, Limit] = {
    **dict.fromkeys(("num_layers", "encoder_layers", "decoder_layers"), Limit(least=1, most=1_000)),
    **dict.fromkeys(("num_heads", "num_kv_heads"), Limit(least=1, most=100_000)),
    **dict.fromkeys(
        ("hidden_size", "head_dim", "intermediate_size", "decoder_intermediate_size", "moe_intermediate_size"),
        Limit(least=1, most=10_000_000),
    ),
    **dict.fromkeys(
        ("num_experts", "experts_per_token", "expert_groups", "groups_per_token", "num_shared_experts"),
        Limit(least=0, most=100_000),
    ),
    **dict.fromkeys(("image_size", "patch_size", "num_channels"), Limit(least=1, most=1_000_000)),
    **dict.fromkeys(
        ("type_vocab_size", "sliding_window", "rotary_dim", "num_ln_in_parallel_attn"),
        _FROM_NONE,
    ),
    **dict.fromkeys(("first_k_dense", "num_nextn_predict_layers"), Limit(least=0, most=1_000)),
    "shared_expert_intermediate_size": Limit(least=0, most=10_000_000),
    "vocab_size": Limit(least=1, most=100_000_000),
    "position_buckets": Limit(least=-1, most=1_000_000_000),
}


def model_figure(name: str) -> Limit:
    """Return the limit of a whole figure of `ModelFacts`."""
    return _MODEL_FIGURES.get(name, _FIGURE)
