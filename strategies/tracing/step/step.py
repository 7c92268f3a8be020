"""A whole training step of a job on fake tensors: what is alive on rank 0 at the peak of each phase."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from hardware_db.device import Device
from planner.types.job import Job
from planner.vocabulary import FSDP_STRATEGIES, PAIRED
from strategies.tracing.cuda.as_cuda import DEFAULT_CAPABILITY, as_cuda
from strategies.tracing.cuda.kernels import cpu_outputs, scratch_bytes
from strategies.tracing.cuda.masks import unpadded, windows_without_masks
from strategies.tracing.example import arguments_of
from strategies.tracing.step.build import Subject, subject_of, with_adapters
from strategies.tracing.step.checkpointing import checkpoint_activations
from strategies.tracing.step.images import images_followed, is_known
from strategies.tracing.step.optimizers import host_states, make_optimizer
from strategies.tracing.step.parallel import (
    autocast_dtype,
    ranks,
    reduction_buckets,
    shard,
    sharding_counted,
    synchronize,
    weight_dtype,
)
from strategies.tracing.step.refusal import Following, TraceFailed
from strategies.tracing.step.storages import Category, Storages

# A copy of a module whose weights are fake.


def fake_copy(
    module: nn.Module, blocks: Sequence[nn.Module], mode: FakeTensorMode, dtype: torch.dtype | None
) -> tuple[nn.Module, tuple[nn.Module, ...]]:
    """The module with fake CPU tensors for its weights and buffers, and the copies of `blocks`; shared weights stay
    shared.

    Floating-point tensors become `dtype` where it is not None, as `module.to(dtype)` would make them. The original may
    be on any device, also `meta`, and is left as it is.
    """
    stand_ins: dict[int, object] = {}
    for weight in module.parameters():
        stand_ins[id(weight)] = nn.Parameter(_fake(mode, weight, dtype), requires_grad=weight.requires_grad)
    for buffer in module.buffers():
        stand_ins[id(buffer)] = _fake(mode, buffer, dtype)
    # A deep copy takes what it has already seen from its memo.
    made = copy.deepcopy(module, stand_ins)
    copies = [stand_ins[id(block)] for block in blocks]
    return made, tuple(block for block in copies if isinstance(block, nn.Module))


def _fake(mode: FakeTensorMode, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=wanted, device="cpu")


PHASES = ("forward", "loss", "backward", "step")


class Traceable(Protocol):
    """A module, its repeated blocks in the order they run, and batches of it (`strategies.tracing.step.build.Subject`
    is one).

    `batch_of` gives a mapping of keyword arguments, a sequence of arguments, or one tensor. The module returns a loss,
    an object with `.loss`, or tensors whose sum is taken as the loss.
    """

    @property
    def module(self) -> nn.Module: ...

    @property
    def blocks(self) -> Sequence[nn.Module]: ...

    def batch_of(self, samples: int, length: int, source_length: int | None = None) -> Any: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedStep:
    """Bytes alive on rank 0 by phase and category, at the largest moment of each phase in the steady state.

    Under ZeRO only activations and the 16-bit weights are traced: gradients are freed as they are made, no optimizer
    runs, and states and buckets are left to the closed forms.
    """

    phases: Mapping[str, Mapping[Category, int]]

    @property
    def totals(self) -> dict[str, int]:
        return {phase: sum(parts.values()) for phase, parts in self.phases.items()}

    @property
    def peak_phase(self) -> str:
        return max(self.phases, key=lambda phase: self.totals[phase])

    @property
    def peak_bytes(self) -> int:
        return self.totals[self.peak_phase]


def trace_step(job: Job, subject: Traceable | None = None) -> TracedStep:
    """Run a step of the job on fake tensors, on a CUDA device's terms unless the job's device is a CPU.

    Optimizer states exist before it, so that it is a step of the steady state.

    `subject` is the user's own module with its batches; by default the model that `job.facts` describe.

    Raises:
        TraceFailed: an operation cannot be followed, or the plan has something that is not traced.
        DsplanError: transformers has no class for the model.
    """
    configuration = job.configuration
    if configuration.tp * configuration.pp > 1:
        raise TraceFailed("", "", "tensor and pipeline parallelism are not traced")
    if configuration.offload != "none":
        raise TraceFailed("", "", "offload is not traced")
    if job.workload.ema or job.workload.task in PAIRED:
        raise TraceFailed("", "", "an average of the weights, a reference model and pairs of samples are not traced")
    chosen = subject or _described(job)
    with contextlib.ExitStack() as stack:
        mesh = stack.enter_context(ranks(configuration)) if configuration.strategy in FSDP_STRATEGIES else None
        mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(on_device(job.cluster.device))
        stack.enter_context(unpadded())
        stack.enter_context(images_followed(chosen.module))
        if configuration.attention == "flash":
            stack.enter_context(windows_without_masks())
        return _Run(job, chosen, mode, mesh).steps()


def _described(job: Job) -> Subject:
    subject = subject_of(job.facts, attention=job.configuration.attention, task=job.workload.task)
    if job.workload.method != "full":
        subject = with_adapters(subject, job.counts, job.workload)
    elif job.workload.load_dtype is not None:
        subject.module.to(getattr(torch, _LOADED[job.workload.load_dtype]))
    if job.workload.train_only:
        for name, weight in subject.module.named_parameters():
            weight.requires_grad_(re.search(job.workload.train_only, name) is not None)
    return replace(subject, with_images=job.facts.kind == "vision-language")


_LOADED = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def on_device(device: Device) -> AbstractContextManager[object]:
    """The kernels of a device, as far as they decide what is alive; to be entered inside a `FakeTensorMode`."""
    if device.is_cpu:
        return cpu_outputs()
    major, _, minor = (device.compute_capability or "").partition(".")
    return as_cuda((int(major), int(minor))) if minor else as_cuda(DEFAULT_CAPABILITY)


class _Run:
    def __init__(self, job: Job, subject: Traceable, mode: FakeTensorMode, mesh: Any) -> None:
        self._job, self._configuration = job, job.configuration
        self._on_cpu = job.cluster.device.is_cpu
        self._storages = Storages(mode, None if self._on_cpu else scratch_bytes)
        dtype = weight_dtype(self._configuration)
        self._batch = _narrowed(self._batch_of(subject), dtype)
        self._module, self._blocks = fake_copy(subject.module, subject.blocks, mode, dtype)
        self._phases: dict[str, Mapping[Category, int]] = {}
        self._in_forward = False
        checkpoint_activations(
            self._module,
            self._configuration.activation_checkpointing,
            on_host=self._configuration.activations_on_host and not self._on_cpu,
        )
        if mesh is not None:
            shard(self._module, self._blocks, mesh, self._configuration)
        for block in self._blocks:  # after FSDP2's own hook, which frees the block's all-gathered weights
            block.register_forward_hook(self._block_done)

    def steps(self) -> TracedStep:
        storages, module = self._storages, self._module
        storages.label([*module.parameters(), *module.buffers()], "parameters")
        storages.label([leaf for leaf in tree_leaves(self._batch) if isinstance(leaf, torch.Tensor)], "activations")
        buckets = reduction_buckets(list(module.parameters())) if self._configuration.strategy == "ddp" else []
        storages.label(buckets, "buffers")
        storages.cast_is_temporary(module.parameters())
        self._watch_gradients(module.parameters())
        with sharding_counted(storages, self._watch_gradients), storages, Following(module, storages):
            optimizer = self._optimizer()
            self._phases = {}
            self._accumulate()
            self._update(optimizer)
        return TracedStep(phases={name: self._phases[name] for name in PHASES if name in self._phases})

    def _optimizer(self) -> torch.optim.Optimizer | None:
        """With its states, as after a first step."""
        if self._configuration.zero_stage:
            return None
        trained = [weight for weight in self._module.parameters() if weight.requires_grad]
        optimizer = make_optimizer(self._configuration.optimizer, trained, on_cpu=self._on_cpu)
        for weight in trained:
            weight.grad = torch.zeros_like(weight)
        self._update(optimizer)
        return optimizer

    def _accumulate(self) -> None:
        """Two micro-batches stand for any larger number: from the second on, gradients are there. Three do where
        only the last one is reduced, so that one finds gradients and leaves them."""
        enough = 2 if self._configuration.sync_each_micro_batch else 3
        micro_batches = min(self._configuration.gradient_accumulation_steps, enough)
        for index in range(micro_batches):
            synchronize(self._module, self._configuration, reduces=index == micro_batches - 1)
            loss = self._forward()
            torch.autograd.backward(loss / self._configuration.gradient_accumulation_steps)
            del loss
            self._end("backward")

    def _forward(self) -> torch.Tensor:
        self._storages.take_peak()
        self._in_forward = True
        positional, named = arguments_of(self._batch)
        with self._autocast():
            loss = loss_of(self._module(*positional, **named))
        self._in_forward = False
        self._end("loss")
        return loss

    def _update(self, optimizer: torch.optim.Optimizer | None) -> None:
        if optimizer is None:
            return
        storages = self._storages
        storages.answers_items = True
        with storages.making("temporaries"):
            optimizer.step()
        storages.answers_items = False
        self._end("step")
        states = [value for state in optimizer.state.values() for value in state.values()]
        storages.label([value for value in states if isinstance(value, torch.Tensor)], "optimizer")
        if not self._on_cpu:
            storages.label(host_states(optimizer), "host")
        self._module.zero_grad(set_to_none=True)

    def _block_done(self, *_arguments: object) -> None:
        # A block that runs again in backward belongs to backward.
        if self._in_forward:
            self._end("forward")

    def _end(self, phase: str) -> None:
        """What came since the last end was this phase; its largest moment counts."""
        peak = self._storages.take_peak()
        found: dict[Category, int] = {name: size for name, size in peak.items() if name != "host"}
        if sum(found.values()) >= sum(self._phases.get(phase, {}).values()):
            self._phases[phase] = found

    def _watch_gradients(self, parameters: Any) -> None:
        keep = self._configuration.zero_stage == 0

        def made(parameter: torch.Tensor) -> None:
            if keep:
                self._storages.label([parameter.grad], "gradients")
            else:
                parameter.grad = None

        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(made)

    def _autocast(self) -> AbstractContextManager[object]:
        dtype = autocast_dtype(self._configuration)
        return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)

    def _batch_of(self, subject: Traceable) -> Any:
        configuration = self._configuration
        return subject.batch_of(
            configuration.micro_batch_size, configuration.sequence_length, self._job.workload.source_length or None
        )


def _narrowed(batch: Any, dtype: torch.dtype | None) -> Any:
    """The batch as fake tensors but for values that are known, images and audio in the dtype of the weights."""

    def narrowed(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or is_known(leaf):
            return leaf
        wanted = dtype if dtype is not None and leaf.is_floating_point() else leaf.dtype
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=wanted, device="cpu")

    return tree_map(narrowed, batch)


def loss_of(output: Any) -> torch.Tensor:
    """`output.loss`, the first single number (nanoGPT returns logits and a loss), or the sum of all that depends on
    weights."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    for tensor in tensors:
        if tensor.dim() == 0:
            return tensor
    return torch.stack([tensor.float().sum() for tensor in tensors]).sum()
