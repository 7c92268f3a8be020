"""Whose modules a published row ran, as an Implementation: by its code base's documentation, not by its error."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from planner.cost.code_bases import (
    COMPILED,
    LLM_FOUNDRY,
    MEGATRON,
    TORCHTITAN,
    TORCHTITAN_COMPILED,
    TRANSFORMERS,
    Implementation,
)

ALPA = replace(COMPILED, score_bytes=14.0)
"""Alpa compiles with XLA, which fuses scale, mask and softmax of a 16-bit score as Megatron's kernel does."""

NEMO = replace(MEGATRON, hides_reductions=True, residual_passes=1.0)
"""NeMo's launcher: Megatron's fused kernels and `bias_dropout_add_fusion`, with `overlap_grad_sync` (gpt3/5b.yaml)."""

INTERNEVO = replace(TRANSFORMERS, broadcasts_partitions=True)
"""InternEvo's HybridZeroOptimizer lets each rank broadcast the partition it has updated."""

LLM_FOUNDRY_2023 = replace(LLM_FOUNDRY, stops_early=False)
"""The same on torch 1.13.1 (the script's image then), whose checkpoint runs a block's whole forward again."""

# Runs that name transformers are of 2021.
NAMED: Mapping[str, Implementation] = {"transformers": replace(TRANSFORMERS, stops_early=False), "megatron": MEGATRON}
BY_SOURCE: Mapping[str, Implementation] = {
    "llmfoundry_2023": LLM_FOUNDRY_2023,
    "llmfoundry": LLM_FOUNDRY,
    "internevo": INTERNEVO,
    "bigscience": MEGATRON,
    "vtrain": MEGATRON,
    "alpa": ALPA,
    "nemo": NEMO,
    "dgxc": NEMO,
}


def code_of(row: Mapping[str, str]) -> Implementation:
    """The code base that a row names, or that its source is known for."""
    if row["code"]:
        return NAMED[row["code"]]
    known = next((code for name, code in BY_SOURCE.items() if row["source"].startswith(name)), None)
    if known is not None:
        return known
    compiled = row["compiled"] == "y"
    if row["source"].startswith("torch"):
        return TORCHTITAN_COMPILED if compiled else TORCHTITAN
    return COMPILED if compiled else TRANSFORMERS
