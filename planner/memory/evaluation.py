"""Evaluation: a forward pass without gradients, and the logits that its loop keeps on the device.

The loop is HF Trainer's (transformers 5.23, `Trainer.evaluation_loop`): without `compute_metrics` only losses are kept;
with it the logits of every step, raised to fp32 by accelerate and gathered from all data-parallel ranks, stay on the
device until `eval_accumulation_steps` of them are moved away, and each step concatenates them anew.
"""

from __future__ import annotations

from dataclasses import replace

from planner.job import Job
from planner.memory.ledger import Ledger
from planner.memory.recipe import Recipe

KEPT_BYTES = 4
"""Per logit that is kept: accelerate's `convert_outputs_to_fp32`."""


def evaluation_ledger(job: Job, recipe: Recipe, forward: Ledger) -> Ledger:
    """The largest moment of an evaluation; `forward` is a training step's forward phase, whose weights, optimizer
    states and gathered parameters it has too."""
    working = max(_block(job, recipe), _logits_and_loss(job, recipe))
    step, kept = _step_logits(job), job.workload.evaluation_steps_kept
    if kept:
        everyones = KEPT_BYTES * step * job.configuration.dims.data_parallel
        working = max((kept - 1) * everyones + working, (2 * kept if kept > 1 else 1) * everyones + KEPT_BYTES * step)
    return replace(forward, gradients=0, activations=working)


def _tokens(job: Job) -> int:
    return job.workload.evaluation_batch_size * job.configuration.sequence_length


def _block(job: Job, recipe: Recipe) -> float:
    """What one block's forward works with when nothing is saved: its input and norm, and the attention's tensors or
    the MLP's."""
    facts, tokens = job.facts, _tokens(job)
    if facts.kind == "custom":
        return _unknown_block(job, recipe)
    attention = 2 * facts.head_dim * (facts.num_heads + facts.num_kv_heads)
    scores = facts.num_heads * job.configuration.sequence_length * (4 + recipe.compute) if job.eager_attention else 0
    width = facts.moe_intermediate_size or facts.intermediate_size
    copies = (5 if facts.composite_activation else 2) + facts.gated_mlp
    mlp = copies * width * max(facts.experts_per_token, 1)
    stream = facts.hidden_size * (2 * recipe.residual + 4)
    return tokens * (stream + max(recipe.compute * attention + scores, recipe.compute * mlp)) / job.configuration.tp


def _unknown_block(job: Job, recipe: Recipe) -> float:
    """A custom module: what a trace says that one block keeps, or its matrices' inputs and outputs."""
    if job.facts.traced:
        return job.workload.evaluation_batch_size * max(traced.block for traced in job.facts.traced.values())
    return _tokens(job) * 2 * recipe.compute * job.counts.largest_block / max(job.facts.hidden_size, 1)


def _step_logits(job: Job) -> float:
    """Logits of one step on one device: for each token and word, or for each sample and label."""
    facts, workload = job.facts, job.workload
    if workload.task in ("seq-cls", "image-cls") or not facts.vocab_size:
        return workload.evaluation_batch_size * max(facts.num_labels, 1)
    return _tokens(job) * facts.vocab_size / job.configuration.tp


def _logits_and_loss(job: Job, recipe: Recipe) -> float:
    """Logits, their fp32 copy where they are 16-bit, and the log-softmax of the loss."""
    return _step_logits(job) * (recipe.compute + (4 if recipe.compute < 4 else 0) + 4)
