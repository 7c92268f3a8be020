"""How code bases run a transformer block: fused and skipped operations, and the cost of the host."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class Implementation:
    """Counts that belong to code rather than to devices; docs/explanation/cost-model-time.md derives each one.

    Passes are elements read or written per element of the tensor, in the compute dtype, by one forward.
    `score_bytes` is the traffic of one attention score that is not fused away, `loss_bytes` of one logit from cast to
    gradient, `attention_share` the rate of its fused attention over that of the kernels that were measured.
    `skips_masked` says whether fused attention leaves out the masked half of a causal product, `hides_reductions`
    whether gradients are reduced behind the backward, `reduces_whole` whether ZeRO-1 and 2 all-reduce gradients rather
    than reduce-scatter them, `broadcasts_partitions` whether they send updated parameters rank by rank,
    `selective_products` which share of the weight products selective checkpointing runs again, `stops_early` whether
    recomputing a block stops at the last tensor that its backward needs (torch's non-reentrant checkpoint since 2.0).
    """

    layer_norm_passes: float = 2.0
    rms_norm_passes: float = 18.0
    residual_passes: float = 3.0
    dropout_passes: float = 2.5
    activation_passes: float = 2.0
    composite_activation_passes: float = 20.0
    gated_passes: float = 5.0
    rotary_passes: float = 10.0
    dispatch_passes: float = 7.0
    dispatch_kernels: int = 14
    score_bytes: float = 24.0
    loss_bytes: float = 30.0
    attention_share: float = 1.0
    skips_masked: bool = True
    hides_reductions: bool = True
    reduces_whole: bool = True
    broadcasts_partitions: bool = False
    selective_products: float = 0.0
    stops_early: bool = True
    block_host_seconds: float = 0.85e-3
    kernel_host_seconds: float = 10e-6


TRANSFORMERS = Implementation()
"""transformers' modules in eager torch, attention through SDPA or flash: what dsplan's own runs are."""

COMPILED = Implementation(
    rms_norm_passes=2.0, residual_passes=1.0, gated_passes=3.0, rotary_passes=3.0, composite_activation_passes=2.0
)
"""The same under torch.compile, which fuses a norm, a gate or a rotation into one kernel each."""

TORCHTITAN = replace(TRANSFORMERS, selective_products=0.5)
TORCHTITAN_COMPILED = replace(COMPILED, selective_products=0.5)
"""torchtitan's operator-wise checkpointing recomputes every second weight product (recalled, not rechecked)."""

LLM_FOUNDRY = Implementation(attention_share=0.55)
"""MPT in llm-foundry, whose benchmark script runs FlashAttention in Triton (`--attn_impl triton`): FlashAttention-2 is
1.3 to 2.5 times as fast (arXiv 2307.08691, recalled); the share is that of their geometric mean."""

MEGATRON = Implementation(
    composite_activation_passes=2.0, dropout_passes=0.5, score_bytes=14.0, hides_reductions=False, stops_early=False
)
"""Megatron-DeepSpeed: scale, mask and softmax fused in 16 bit, gradients reduced after the backward; bias and GELU are
one kernel (`fused_bias_gelu.py`), bias, dropout and residual another, where dropout adds only its mask
(`bias_dropout_fusion`); both are on by default. Counted, not fitted, but counted after its rows had been seen."""
