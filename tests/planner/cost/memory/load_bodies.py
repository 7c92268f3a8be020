"""A model made and placed by the engine on real ranks, and the most that lived meanwhile."""

from __future__ import annotations

import gc

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from strategies.engine.initialize import initialize
from strategies.tracing.storage_tracker import StorageTracker

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 3000,
    "tie_word_embeddings": False,
}


def _model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**CONFIG))


def peak_of_storages(plan: str) -> int:
    """Peak bytes of live storages while `initialize` runs, the model's among them."""
    model = _model()
    with StorageTracker([*model.parameters(), *model.buffers()]) as tracker:
        initialize(model=model, plan=plan)
        return tracker.peak_bytes


def peak_of_allocations(plan: str) -> int:
    """The same from the allocator's events, which show what C++ allocates too: DDP's buckets."""
    gc.collect()  # an earlier model that dies while this one is placed would count as a fall
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        model = _model()
        with torch.profiler.record_function("placing"):
            engine, *_ = initialize(model=model, plan=plan)
    assert engine is not None
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    start = next(event.start_ns() for event in events if event.name() == "placing")
    live = peak = 0
    for event in events:
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live) if event.start_ns() > start else live
    return peak
