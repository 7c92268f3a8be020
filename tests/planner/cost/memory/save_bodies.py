"""A full state dict gathered from FSDP2's shards on real ranks, and the most that lived meanwhile."""

from __future__ import annotations

import gc

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from tests.planner.cost.memory import load_bodies


def gather_full() -> tuple[int, int]:
    """Bytes that the state dict holds on this rank, and the peak of what was allocated for it."""
    model = LlamaForCausalLM(LlamaConfig(**load_bodies.CONFIG))
    for block in model.model.layers:
        fully_shard(block)
    fully_shard(model)
    gc.collect()  # an earlier model that dies meanwhile would count as a fall
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    live = peak = 0
    for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    held = [value for value in state.values() if isinstance(value, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in held), peak
