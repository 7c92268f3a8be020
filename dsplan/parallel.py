"""Layers whose weights ranks share, for blocks of one's own, and the loss over a split vocabulary."""

from strategies.parallel.layers import (
    ColumnParallelLinear,
    LayerSplit,
    ParallelAttention,
    ParallelMLP,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from strategies.parallel.loss import vocab_parallel_cross_entropy
from strategies.parallel.ranks import (
    TensorRanks,
    copy_to_ranks,
    gather_from_ranks,
    scatter_sum,
    split_between_ranks,
    sum_over_ranks,
)

__all__ = [
    "ColumnParallelLinear",
    "LayerSplit",
    "ParallelAttention",
    "ParallelMLP",
    "RowParallelLinear",
    "TensorRanks",
    "VocabParallelEmbedding",
    "copy_to_ranks",
    "gather_from_ranks",
    "scatter_sum",
    "split_between_ranks",
    "sum_over_ranks",
    "vocab_parallel_cross_entropy",
]
