"""The body of a training run on a rank: the engine and the metrics of `dsplan run`, a real model, random weights."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dsplan.diagnostics.bench.cases import Trainee
from dsplan.exact.factory import any_model
from planner.types.plan_io import plan_from_dict
from planner.vocabulary import Attention, Task
from strategies.distributed.environment import join
from strategies.engine.base import Engine
from strategies.engine.initialize import initialize
from strategies.telemetry.step_rows import TRACKED_STEP
from strategies.tracing.to_hf import hf_config
from strategies.variables import RUN_DIRECTORY

_LEAST_STEPS = 6
_MOST_STEPS = 40
_LONG_STEP_SECONDS = 2.0
_STEPS_OF_A_LONG_RUN = 3

_CLASSES: Mapping[Task, str] = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq-cls": "AutoModelForSequenceClassification",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "image-cls": "AutoModelForImageClassification",
}


def build_model(config: Mapping[str, Any], task: Task, attention: Attention, device: torch.device) -> nn.Module:
    """Build transformers' model of `config` (with its `model_type`): fp32, in training, no cache, one seed."""
    transformers = import_module("transformers")
    arguments = dict(config)
    settings = transformers.AutoConfig.for_model(arguments.pop("model_type"), **arguments)
    if hasattr(settings, "use_cache"):
        settings.use_cache = False
    torch.manual_seed(0)
    with device:
        model: nn.Module = getattr(transformers, _CLASSES[task]).from_config(
            settings, attn_implementation="eager" if attention == "eager" else "sdpa"
        )
    return model.train()


def batch_for(model: nn.Module, task: Task, samples: int, length: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Draw a micro-batch of `samples` x `length` words (or images), labels beside them."""
    settings: Any = model.config
    if task == "image-cls":
        pixels = torch.rand(samples, settings.num_channels, settings.image_size, settings.image_size, device=device)
        return {"pixel_values": pixels, "labels": torch.randint(2, (samples,), device=device)}
    words = torch.randint(settings.vocab_size, (samples, length), device=device)
    labels = torch.randint(2, (samples,), device=device) if task == "seq-cls" else words.clone()
    return {"input_ids": words, "labels": labels}


def train(trainee: Trainee) -> None:
    """Train past the warm-up and for a few seconds more; called on every rank of the group."""
    torch.set_num_threads(trainee.threads)
    device = join().device
    _forget_earlier_runs(device)
    plan = plan_from_dict(trainee.plan)
    chosen = plan.configuration
    config = trainee.config or hf_config(any_model(trainee.model)).to_dict()
    model = build_model(config, trainee.task, chosen.attention, device)
    batch = batch_for(model, trainee.task, chosen.micro_batch_size, chosen.sequence_length, device)
    os.environ[RUN_DIRECTORY] = trainee.run_directory
    try:
        engine, *_ = initialize(model=model, plan=plan)
    finally:
        del os.environ[RUN_DIRECTORY]
    try:
        # The step in which a CPU's memory is counted is slow, so the one after it says how long a step is.
        _time_steps(engine, batch, TRACKED_STEP + 1)
        seconds = _slowest(_time_steps(engine, batch, 1), device)
        least = _LEAST_STEPS if seconds < _LONG_STEP_SECONDS else _STEPS_OF_A_LONG_RUN
        _time_steps(engine, batch, min(max(least, round(trainee.seconds / seconds)), _MOST_STEPS))
    finally:
        engine.close()
        del engine, model


def _forget_earlier_runs(device: torch.device) -> None:
    """Empty the allocator's cache, as ranks are used for one run after the other."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _time_steps(engine: Engine, batch: Mapping[str, torch.Tensor], steps: int) -> float:
    """Return the seconds that so many optimizer steps take."""
    start = time.perf_counter()
    for _ in range(steps * engine.configuration.gradient_accumulation_steps):
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
    return time.perf_counter() - start


def _slowest(seconds: float, device: torch.device) -> float:
    """Return the slowest rank's, so that all take as many steps."""
    together = torch.tensor([seconds], dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(together, op=dist.ReduceOp.MAX)
    return max(float(together.item()), 1e-4)
