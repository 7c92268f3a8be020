"""Runs to measure: a real model with random weights, trained by dsplan's engine on random words or on real text."""

from __future__ import annotations

import gc
import os
import re
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import nn

from planner.types.plan_io import plan_from_dict
from planner.vocabulary import Attention, Task
from strategies.bench.measure_memory import StepMemory, measure_step
from strategies.bench.measure_times import TimedStep, measure_times
from strategies.distributed.environment import join
from strategies.engine.initialize import initialize
from strategies.telemetry.memory_report import reachable_tensors

# Real text that every machine has: the sources of Python's standard library, as numbers of words.


_MODULES = ("argparse", "datetime", "inspect", "ipaddress", "pickle", "tarfile", "turtle", "typing")
_WORD = re.compile(rb"\w+|[^\w\s]")


@cache
def _words() -> tuple[int, ...]:
    folder = Path(os.__file__).parent
    sources = [(folder / f"{name}.py") for name in _MODULES]
    found = [word for source in sources if source.exists() for word in _WORD.findall(source.read_bytes())]
    return tuple(crc32(word) for word in found)


def text_batches(
    vocabulary: int, samples: int, length: int, *, seed: int, device: torch.device
) -> Iterator[Mapping[str, torch.Tensor]]:
    """Endless micro-batches of `samples` x `length` words with themselves as labels; `seed` says where they begin.

    A word's number is its checksum modulo `vocabulary`: frequent words stay frequent, as in a real vocabulary.
    """
    words = torch.tensor(_words()) % vocabulary
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(words) - length, (samples, 1), generator=generator)
        batch = words[starts + torch.arange(length)].to(device)
        yield {"input_ids": batch, "labels": batch.clone()}


_CLASSES: Mapping[Task, str] = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "seq-cls": "AutoModelForSequenceClassification",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "image-cls": "AutoModelForImageClassification",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A run to measure.

    `config` is a transformers config with its `model_type`, `plan` the object of the JSON contract; a process takes at
    most `memory_fraction` of its GPU.
    """

    config: Mapping[str, Any]
    task: Task
    plan: Mapping[str, Any]
    memory_fraction: float = 1.0


def measure_subject(subject: Subject) -> StepMemory:
    """Train the subject and measure a step in its steady state; called on every rank of the subject's group."""
    gc.collect()
    before = {weakref.ref(tensor.untyped_storage()) for tensor in reachable_tensors() if _has_storage(tensor)}
    device = join().device
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(subject.memory_fraction, device)
    plan = plan_from_dict(subject.plan)
    chosen = plan.configuration
    model = build_model(subject.config, subject.task, chosen.attention, device)
    batch = batch_for(model, subject.task, chosen.micro_batch_size, chosen.sequence_length, device)
    engine, *_ = initialize(model=model, plan=plan)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # of what building the model on the device left, which training does not need
    return measure_step(
        engine, batch, others=lambda tensor: _has_storage(tensor) and weakref.ref(tensor.untyped_storage()) in before
    )


def time_subject(subject: Subject, steps: int, threads: int = 1) -> tuple[TimedStep, ...]:
    """Train the subject on text and time `steps` steps in its steady state; called on every rank of its group."""
    gc.collect()
    torch.set_num_threads(threads)
    environment = join()
    if environment.device.type == "cuda":
        torch.cuda.empty_cache()
    plan = plan_from_dict(subject.plan)
    chosen = plan.configuration
    model = build_model(subject.config, subject.task, chosen.attention, environment.device)
    vocabulary: int = model.config.vocab_size  # type: ignore[union-attr, assignment]
    size = chosen.micro_batch_size, chosen.sequence_length
    batches = text_batches(vocabulary, *size, seed=environment.rank, device=environment.device)
    engine, *_ = initialize(model=model, plan=plan)
    return measure_times(engine, batches, steps)


def device_used_bytes() -> int:
    """What all processes use of this rank's GPU once this one is there, before its first tensor of a model."""
    device = join().device
    torch.zeros(1, device=device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _has_storage(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided


def build_model(config: Mapping[str, Any], task: Task, attention: Attention, device: torch.device) -> nn.Module:
    """The model that transformers builds from `config` (with its `model_type`), fp32, in training, no cache.

    The same on every rank: weights are drawn from one seed.
    """
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
    """A micro-batch of `samples` x `length` words (or images), labels beside them."""
    settings: Any = model.config
    if task == "image-cls":
        pixels = torch.rand(samples, settings.num_channels, settings.image_size, settings.image_size, device=device)
        return {"pixel_values": pixels, "labels": torch.randint(2, (samples,), device=device)}
    words = torch.randint(settings.vocab_size, (samples, length), device=device)
    labels = torch.randint(2, (samples,), device=device) if task == "seq-cls" else words.clone()
    return {"input_ids": words, "labels": labels}
