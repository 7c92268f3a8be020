"""A whole training step of a job on fake tensors: what is alive at the peak of each phase."""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hardware_db.device import Device
from planner.cost.memory.allocator import Event, Free, Mark, Peak, Request
from planner.cost.memory.overhead import library_workspace
from planner.cost.precision import keeps_adapters_wide
from planner.types.job import Job
from planner.vocabulary import FSDP_STRATEGIES, POST_TRAINING
from strategies.parallel.blocks import repeated_blocks
from strategies.parallel.empty import is_stand_in
from strategies.parallel.pipeline import order_of
from strategies.torch_compat.dispatch import FakeTensorMode, without_modes
from strategies.torch_compat.sharding import context_parallel_attention
from strategies.torch_compat.tensors import tree_leaves, tree_map
from strategies.tracing import is_traced_whole
from strategies.tracing.cuda.as_cuda import DEFAULT_CAPABILITY, as_cuda
from strategies.tracing.cuda.attention import unpadded, windows_without_masks
from strategies.tracing.cuda.kernels import cpu_outputs, scratch_sizes
from strategies.tracing.example import arguments_of
from strategies.tracing.step.build import Subject, subject_of, with_adapters
from strategies.tracing.step.checkpointing import checkpoint_activations
from strategies.tracing.step.images import follow_images, is_known
from strategies.tracing.step.methods import compile_block, compute_loss_as, host_states, make_optimizer
from strategies.tracing.step.parallel import (
    all_gather_dtype,
    autocast_dtype,
    count_sharding,
    expert_ranks,
    ranks,
    reduction_buckets,
    shard,
    synchronize,
    weight_dtype,
)
from strategies.tracing.step.post_training import TrlStep, following_trl, trl_step_of
from strategies.tracing.step.refusal import Following, TraceFailed
from strategies.tracing.step.reservation import Recorded
from strategies.tracing.step.split import (
    Chunk,
    chunks_of,
    enough_micro_batches,
    kinds_in,
    split_experts,
    split_tokens,
    split_weights,
)
from strategies.tracing.step.storages import Category, Storages
from strategies.tracing.step.zero import NativeZero


def fake_copy(
    module: nn.Module, blocks: Sequence[nn.Module], mode: FakeTensorMode, dtype: torch.dtype | None
) -> tuple[nn.Module, tuple[nn.Module, ...]]:
    """Return the module with fake CPU tensors for its weights and buffers, and the copies of `blocks`.

    Floating-point tensors become `dtype` where it is not None, as `module.to(dtype)` would make them. The original may
    be on any device, also `meta`, and is left as it is.
    """
    stand_ins: dict[int, object] = {}
    for weight in module.parameters():
        stand_ins[id(weight)] = nn.Parameter(fake_tensor(mode, weight, dtype), requires_grad=weight.requires_grad)
    for buffer in module.buffers():
        stand_ins[id(buffer)] = fake_tensor(mode, buffer, dtype)
    # A deep copy takes what it has already seen from its memo.
    copied = copy.deepcopy(module, stand_ins)
    copies = [stand_ins[id(block)] for block in blocks]
    return copied, tuple(block for block in copies if isinstance(block, nn.Module))


def fake_tensor(mode: FakeTensorMode, tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Return a stand-in on the CPU, whatever the device of the original."""
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    with mode:
        if is_stand_in(tensor):
            return torch.empty(tensor.shape, dtype=wanted, device="cpu")
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=wanted, device="cpu")


PHASES = ("reference", "logprob", "forward", "loss", "backward", "step")
"""The first two are there where a round of reinforcement learning runs forwards before its updates."""


class Traceable(Protocol):
    """A module, its blocks in the order they run, and batches of it (`strategies.tracing.step.build.Subject` is one).

    `batch_of` gives a mapping of keyword arguments, a sequence of arguments, or one tensor. The module returns a loss,
    an object with `.loss`, or tensors whose sum is taken as the loss.
    """

    @property
    def module(self) -> nn.Module:
        """The whole module."""

    @property
    def blocks(self) -> Sequence[nn.Module]:
        """Its repeated blocks."""

    def batch_of(self, samples: int, length: int, source_length: int | None = None) -> Any:
        """Return a batch of so many samples."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TracedStep:
    """Bytes alive on rank 0 by phase and category, at the largest moment of each phase in the steady state.

    Under DeepSpeed's ZeRO only activations and the 16-bit weights are traced: gradients are freed as they are made, no
    optimizer runs, and states and buckets are left to the closed forms.
    """

    phases: Mapping[str, Mapping[Category, int]]
    reserved: Mapping[str, Peak] = field(default_factory=dict)
    """The allocator's bytes by phase, with cuBLAS's workspace; none on a CPU or where the step is traced in part."""

    @property
    def totals(self) -> dict[str, int]:
        """Bytes of each phase."""
        return {phase: sum(parts.values()) for phase, parts in self.phases.items()}

    @property
    def peak_phase(self) -> str:
        """The phase with the largest peak."""
        return max(self.phases, key=lambda phase: self.totals[phase])

    @property
    def peak_bytes(self) -> int:
        """Bytes of the largest phase."""
        return self.totals[self.peak_phase]


def trace_step(job: Job, subject: Traceable | None = None) -> TracedStep:
    """Run a step of the job on fake tensors, on a CUDA device's terms unless the job's device is a CPU.

    Optimizer states exist before it, so that it is a step of the steady state. In a pipeline each phase is that of the
    rank on which it needs most.

    `subject` is the user's own module with its batches; by default the model that `job.facts` describe.

    Raises:
        TraceFailed: an operation cannot be followed, or the plan has something that is not traced.
        DsplanError: transformers has no class for the model.
    """
    steps = trace_stages(job, subject)
    largest = {name: max(steps, key=lambda step: step.totals.get(name, 0)) for name in PHASES}
    reserved = max(
        (step.reserved for step in steps), key=lambda peaks: max((p.reserved for p in peaks.values()), default=0)
    )
    phases = {name: step.phases[name] for name, step in largest.items() if name in step.phases}
    return TracedStep(phases=phases, reserved=reserved)


def trace_stages(job: Job, subject: Traceable | None = None) -> list[TracedStep]:
    """Return the step of every rank of a pipeline, the first one's first; of one rank where there is no pipeline.

    Raises:
        TraceFailed, DsplanError: as `trace_step`.
    """
    if job.configuration.offload != "none" and not is_traced_whole(job):
        raise TraceFailed("", "", "offload is not traced under DeepSpeed, to NVMe or of a model that ranks split")
    if job.workload.ema or (job.workload.loss == "tiled" and job.workload.task not in POST_TRAINING):
        raise TraceFailed("", "", "an average of the weights, and TRL's loss of other trainers, are not traced")
    if job.workload.compile and (job.configuration.pp > 1 or job.configuration.activation_checkpointing != "none"):
        raise TraceFailed("", "", "compiled blocks are traced without pipelines and checkpointing")
    trl = trl_step_of(job)
    chosen = _train_as(subject or _described(job), job)
    if trl is not None and not hasattr(chosen.module, "get_output_embeddings"):
        raise TraceFailed("", "", f"--task {job.workload.task} is traced for models of transformers")
    return [_traced(job, chosen, rank, trl) for rank in range(job.configuration.pp)]


def _traced(job: Job, chosen: Traceable, rank: int, trl: TrlStep | None) -> TracedStep:
    configuration = job.configuration
    with contextlib.ExitStack() as stack:
        degrees = configuration.tp * configuration.cp * configuration.ep
        is_split = configuration.strategy in FSDP_STRATEGIES or degrees > 1
        mesh = stack.enter_context(ranks(configuration)) if is_split else None
        experts = expert_ranks(configuration) if configuration.ep > 1 else None
        mode = stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        stack.enter_context(on_device(job.cluster.device))
        stack.enter_context(unpadded())
        stack.enter_context(follow_images(chosen.module))
        if trl is not None:
            stack.enter_context(following_trl(on_cpu=job.cluster.device.is_cpu))
        if configuration.attention == "flash":
            stack.enter_context(windows_without_masks())
        if configuration.cp > 1 and mesh is not None and job.facts.kind != "custom":
            # Keys and values are all-gathered, and the parts of a causal mask balanced, as torch does it by default.
            stack.enter_context(context_parallel_attention(mesh["cp"], length_dim=2))
        run = _PipelineRun if configuration.pp > 1 else _Run
        return run(job, chosen, mode, Meshes(ranks=mesh, experts=experts), rank, trl).steps()


def _described(job: Job) -> Subject:
    chosen = job.configuration
    subject = subject_of(job.facts, attention=chosen.attention, task=job.workload.task, length=chosen.sequence_length)
    return replace(subject, with_images=job.facts.kind == "vision-language")


def _train_as(chosen: Traceable, job: Job) -> Traceable:
    """Return the subject with what is trained of it, adapters or some of its weights, and loaded as it is asked."""
    work = job.workload
    if work.method != "full":
        if not isinstance(chosen, Subject):
            raise TraceFailed("", "", f"--method {work.method} is traced for models of transformers")
        return with_adapters(chosen, job)
    if work.load_dtype is not None:
        chosen.module.to(getattr(torch, _LOADED[work.load_dtype]))
    if work.train_only:
        for name, weight in chosen.module.named_parameters():
            weight.requires_grad_(re.search(work.train_only, name) is not None)
    return chosen


_LOADED = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def on_device(device: Device) -> AbstractContextManager[object]:
    """Use the kernels of a device, as far as they decide what is alive; to be entered inside a `FakeTensorMode`."""
    if device.is_cpu:
        return cpu_outputs()
    major, _, minor = (device.compute_capability or "").partition(".")
    return as_cuda((int(major), int(minor))) if minor else as_cuda(DEFAULT_CAPABILITY)


@dataclass(frozen=True, slots=True)
class Meshes:
    """The ranks of a split job by their degrees, and those that spread experts; None where nothing is split so."""

    ranks: DeviceMesh | None = None
    experts: DeviceMesh | None = None


class _Run:
    """A step of one rank, which has the whole depth of the model."""

    def __init__(
        self,
        job: Job,
        subject: Traceable,
        mode: FakeTensorMode,
        meshes: Meshes,
        rank: int,
        trl: TrlStep | None = None,
    ) -> None:
        self._job, self._configuration, self._rank, self._trl = job, job.configuration, rank, trl
        self._on_cpu = job.cluster.device.is_cpu
        self._storages = Storages(mode, None if self._on_cpu else scratch_sizes)
        dtype = None if keeps_adapters_wide(self._configuration, job.workload) else weight_dtype(self._configuration)
        self._batch = _cast_batch(self._batch_of(subject), dtype if trl is None else None)
        self._phases: dict[str, Mapping[Category, int]] = {}
        self._in_forward = False
        whole, blocks = self._part_of(subject)
        self._module, self._blocks = fake_copy(whole, blocks, mode, dtype)
        self._recorded = Recorded()
        self._zero: NativeZero | None = None
        self._buckets: list[torch.Tensor] = []
        self._order: dict[Any, None] = {}
        self._whole = {f"whole {number}": weight.nbytes for number, weight in enumerate(self._module.parameters())}
        names = dict(zip(self._module.parameters(), self._whole, strict=True))
        self._whole_of_units = [[names[weight] for weight in unit] for unit in self._units()]
        for part in self._parts():
            self._prepare(part, meshes)
        for block in self._blocks:  # after FSDP2's own hook, which frees the block's all-gathered weights
            block.register_forward_hook(self._block_done)
        if trl is not None:
            reference = self._reference_of(subject, mode, meshes) if trl.loads_reference else None
            trl.connect(self._module, reference, self._autocast)

    def _reference_of(self, subject: Traceable, mode: FakeTensorMode, meshes: Meshes) -> nn.Module:
        """Return a second model, as TRL loads it; of accelerate's FSDP2 it is one unit (`trl/models/utils.py`).

        On a CPU shards are dsplan's own work, beside which it is whole.
        """
        assert self._trl is not None
        chosen = self._configuration
        is_engine = chosen.zero_stage > 0 and chosen.backend == "deepspeed"
        dtype = weight_dtype(chosen) if is_engine or chosen.precision == "bf16-pure" else None
        reference, _ = fake_copy(subject.module, (), mode, dtype)
        self._trl.prepare_reference(reference.requires_grad_(True))
        if chosen.strategy in FSDP_STRATEGIES and meshes.ranks is not None and not self._on_cpu:
            shard(reference, (), meshes.ranks, chosen, root_stays=False)
        self._storages.label([*reference.parameters(), *reference.buffers()], "parameters")
        return reference

    def _part_of(self, subject: Traceable) -> tuple[nn.Module, Sequence[nn.Module]]:
        """Return what this rank has of the model, and its blocks."""
        return subject.module, subject.blocks

    def _parts(self) -> Iterable[nn.Module]:
        """Return the modules that are called one by one."""
        return (self._module,)

    def _prepare(self, part: nn.Module, meshes: Meshes) -> None:
        """Make a module what the job's code, method and strategy make of it."""
        chosen = self._configuration
        model = part.model if isinstance(part, Chunk) else part
        if self._trl is not None:
            self._trl.prepare(model)
        elif not isinstance(part, Chunk) or part.is_last:
            compute_loss_as(model, self._job.workload.loss)
        on_host = chosen.activations_on_host and not self._on_cpu
        checkpoint_activations(model, chosen.activation_checkpointing, on_host=on_host, every=chosen.checkpoint_every)
        if meshes.ranks is None:
            return
        if chosen.tp > 1:
            split_weights(model, chosen)
        if self._takes_whole_samples:
            split_tokens(model, chosen)
        if meshes.experts is not None:
            split_experts(model, meshes.experts)
        if chosen.strategy in FSDP_STRATEGIES:
            inside = {id(module) for module in part.modules()}
            shard(part, [block for block in self._blocks if id(block) in inside], meshes.ranks, chosen, meshes.experts)

    @property
    def _steps_on_host(self) -> bool:
        """True if FSDP2's shards, gradients and the step are in host memory."""
        return self._configuration.strategy in FSDP_STRATEGIES and self._configuration.offload != "none"

    @property
    def _takes_whole_samples(self) -> bool:
        """True if the model is given all tokens and splits them itself, at its first block."""
        return self._configuration.cp > 1 and self._job.facts.kind == "custom"

    @property
    def _length(self) -> int:
        """Tokens of a sample that the model is given."""
        parts = 1 if self._takes_whole_samples else self._configuration.cp
        return self._configuration.sequence_length // parts

    def steps(self) -> TracedStep:
        storages, module = self._storages, self._module
        self._label_weights()
        storages.label([leaf for leaf in tree_leaves(self._batch) if isinstance(leaf, torch.Tensor)], "activations")
        if self._configuration.strategy == "ddp":
            self._reduction_buckets()
        storages.take_casts_as_temporary(module.parameters())
        self._compile()
        self._watch_gradients(module.parameters())
        recorded, events = self._recorded, storages.events
        with count_sharding(storages, self._watch_gradients), storages, Following(module, storages):
            self._shard_states()
            optimizers = self._optimizers()
            self._phases, begun = {}, len(events)
            sums_of_first: list[Hashable] = []
            self._accumulate()
            if self._zero is not None and self._zero.has_learnt_order:
                recorded.first, sums_of_first = events[begun:], self._names_of_sums()
                self._zero.clear()
                self._phases, begun = {}, len(events)
                self._accumulate()
            recorded.passes, begun = events[begun:], len(events)
            recorded.between = list(self._rebuilt_buckets())
            sums = self._names_of_sums()
            recorded.sums = dict(zip(sums, sums_of_first, strict=False))
            self._update(optimizers)
            recorded.updates = events[begun:]
            phases = {name: self._phases[name] for name in PHASES if name in self._phases}
            del optimizers
            ranks = [recorded, *self._other_ranks(recorded, sums)]
        return TracedStep(phases=phases, reserved=self._reserved(ranks))

    def _reduction_buckets(self) -> None:
        """Count DDP's buckets, of which the allocator has those of the first step."""
        parameters, events = list(self._module.parameters())[::-1], self._storages.events
        begun = len(events)
        self._buckets = [torch.empty(size, dtype=torch.uint8) for size in reduction_buckets(parameters)]
        self._storages.label(self._buckets, "buffers")
        sizes = enumerate(reduction_buckets(parameters, first=True))
        events[begun:] = [Request(f"first bucket {number}", size) for number, size in sizes]

    def _rebuilt_buckets(self) -> Iterator[Event]:
        """Yield what DDP does behind its first step: it frees its buckets, and makes those that it keeps."""
        for event in self._recorded.makes:
            if isinstance(event, Request) and str(event.name).startswith("first bucket"):
                yield Free(event.name)
        for number, size in enumerate(reduction_buckets(self._order) if self._buckets else ()):
            yield Request(f"bucket {number}", size)

    def _names_of_sums(self) -> list[Hashable]:
        """Return the allocator's names of the gradients that wait for our own ZeRO's step."""
        gradients = () if self._zero is None else self._zero.gradients
        return [self._storages.name_of(gradient) for gradient in gradients if gradient is not None]

    def _other_ranks(self, recorded: Recorded, sums: Sequence[Hashable]) -> Iterator[Recorded]:
        """Yield what ranks record whose optimizers step other pieces; their passes are those of rank 0."""
        if self._zero is None:
            return
        events = self._storages.events
        for rank in self._zero.other_ranks():
            self._recorded = replace(recorded)
            self._zero.become(rank)
            optimizers = self._optimizers()
            self._zero.stand_in()
            renamed = dict(zip(self._names_of_sums(), sums, strict=True))
            begun = len(events)
            self._update(optimizers)
            del optimizers
            updates = events[begun:]
            self._recorded.updates = [
                Free(renamed.get(event.name, event.name)) if isinstance(event, Free) else event for event in updates
            ]
            yield self._recorded

    def _shard_states(self) -> None:
        """Lay our own ZeRO out, whose weights come from a model that is there in the dtype it was loaded in."""
        storages, chosen = self._storages, self._configuration
        if chosen.zero_stage and is_traced_whole(self._job):
            names = {weight: f"loaded {number}" for number, weight in enumerate(self._module.parameters())}
            width = 4 if chosen.precision in ("bf16", "fp16") else 0
            loaded = {name: weight.numel() * (width or weight.element_size()) for weight, name in names.items()}
            storages.events += [Request(name, size) for name, size in loaded.items()]

            def replaced(weights: Sequence[nn.Parameter]) -> None:
                storages.events += [Free(names[weight]) for weight in weights]

            with storages.making("parameters"):
                kinds = kinds_in(self._module, chosen)
                self._zero = NativeZero(self._job, self._module, self._blocks, storages, replaced, kinds)
            storages.label(self._zero.masters(), "optimizer")
        self._recorded.makes = storages.events[:]

    def _reserved(self, ranks: Iterable[Recorded]) -> Mapping[str, Peak]:
        """Return the allocator's peaks, each that of the rank which has most."""
        if not is_traced_whole(self._job) or self._job.workload.compile or self._on_cpu:
            return {}
        workspace = round(library_workspace(self._job))
        most: dict[str, Peak] = {}
        for recorded in ranks:
            for phase, peak in recorded.peaks(workspace).items():
                most[phase] = peak.beside(most.get(phase, Peak()))
        return most

    def _units(self) -> list[list[nn.Parameter]]:
        """Return the weights of each block, and those in none."""
        seen: set[int] = set()
        units: list[list[nn.Parameter]] = []
        for unit in (*self._blocks, self._module):
            units.append([weight for weight in unit.parameters() if id(weight) not in seen])
            seen.update(map(id, unit.parameters()))
        return units

    def _label_weights(self) -> None:
        """Count the weights; of what FSDP2 shards the allocator has had the whole, which goes unit after unit."""
        storages, module = self._storages, self._module
        storages.label(module.buffers(), "parameters")
        if self._configuration.zero_stage and is_traced_whole(self._job):
            return
        if self._configuration.strategy not in FSDP_STRATEGIES:
            storages.label(module.parameters(), "parameters")
            return
        storages.events += [Request(name, size) for name, size in self._whole.items()]
        for unit, whole in zip(self._units(), self._whole_of_units, strict=True):
            storages.label(unit, "host" if self._steps_on_host else "parameters")
            storages.events += map(Free, whole)

    def _compile(self) -> None:
        """Blocks that are compiled are traced by their first call, which is none of the step."""
        if not self._job.workload.compile:
            return
        for block in self._blocks:
            compile_block(block)
        positional, named = arguments_of(self._batch)
        with self._autocast():
            loss = loss_of(self._module(*positional, **named))
        torch.autograd.backward(loss)
        self._module.zero_grad(set_to_none=True)

    def _optimizers(self) -> list[torch.optim.Optimizer]:
        """Return optimizers with states: two where DTensors are beside plain tensors, none under ZeRO."""
        if self._zero is not None:
            begun = len(self._storages.events)
            self._zero.stand_in()
            return self._with_states([self._zero.optimizer], begun)
        if self._configuration.zero_stage:
            return []
        trained = [weight for weight in self._module.parameters() if weight.requires_grad]
        split = [weight for weight in trained if isinstance(weight, DTensor)]
        plain = [weight for weight in trained if not isinstance(weight, DTensor)]
        name, on_cpu = self._configuration.optimizer, self._on_cpu or self._steps_on_host
        optimizers = [make_optimizer(name, weights, on_cpu=on_cpu) for weights in (split, plain) if weights]
        begun = len(self._storages.events)
        with self._storages.making("host") if self._steps_on_host else contextlib.nullcontext():
            for weight in trained:
                weight.grad = torch.zeros_like(weight)
        return self._with_states(optimizers, begun)

    def _with_states(self, optimizers: list[torch.optim.Optimizer], begun: int) -> list[torch.optim.Optimizer]:
        """Return the optimizers with states, made from gradients that came from event number `begun` on."""
        self._recorded.stand_ins, begun = self._storages.events[begun:], len(self._storages.events)
        self._update(optimizers)
        self._recorded.states = self._storages.events[begun:]
        return optimizers

    def _accumulate(self) -> None:
        """Run two micro-batches, which stand for any larger number: from the second on, gradients are there.

        Three do where only the last one is reduced, so that one finds gradients and leaves them. What a round of
        post-training scores before its updates comes first.
        """
        for phase, score in self._trl.scores(self._batch) if self._trl is not None else ():
            self._begin()
            with torch.no_grad(), self._storages.answering_items():
                score()
            self._end(phase)
        enough = 2 if self._configuration.sync_each_micro_batch else 3
        micro_batches = min(self._configuration.gradient_accumulation_steps, enough)
        for index in range(micro_batches):
            synchronize(self._module, self._configuration, reduces=index == micro_batches - 1)
            loss = self._forward()
            if self._zero is not None:
                self._zero.begin(reduces=index == micro_batches - 1)
            torch.autograd.backward(loss / self._configuration.gradient_accumulation_steps)
            if self._zero is not None:
                self._zero.finish()
            del loss
            self._end("backward")

    def _begin(self) -> None:
        """Leave what came before out of the next phase."""
        self._storages.take_peak()
        self._storages.events.append(Mark())

    def _forward(self) -> torch.Tensor:
        self._begin()
        self._in_forward = True
        if self._trl is not None:
            with self._storages.answering_items():
                loss = self._trl.loss(self._batch)
        else:
            positional, named = arguments_of(self._batch)
            with self._autocast():
                loss = loss_of(self._module(*positional, **named))
        self._in_forward = False
        self._end("loss")
        return loss

    def _update(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        if not optimizers:
            return
        storages = self._storages
        with storages.answering_items(), storages.making("host" if self._steps_on_host else "temporaries"):
            for optimizer in optimizers if self._zero is None else (self._zero,):
                optimizer.step()
        self._end("step")
        for optimizer in optimizers:
            states = [value for state in optimizer.state.values() for value in state.values()]
            storages.label([value for value in states if isinstance(value, torch.Tensor)], "optimizer")
            if not self._on_cpu:
                storages.label(host_states(optimizer), "host")
        if self._zero is not None:
            self._zero.clear()
        self._module.zero_grad(set_to_none=True)

    def _block_done(self, *_arguments: object) -> None:
        # A block that runs again in backward belongs to backward, one of a forward without gradients to the loss.
        if self._in_forward and torch.is_grad_enabled():
            self._end("forward")

    def _end(self, phase: str) -> None:
        """Take what came since the last end for this phase; its largest moment counts."""
        peak = self._storages.take_peak()
        self._storages.events.append(Mark(phase))
        sizes: dict[Category, int] = {name: size for name, size in peak.items() if name != "host"}
        if sum(sizes.values()) >= sum(self._phases.get(phase, {}).values()):
            self._phases[phase] = sizes

    def _watch_gradients(self, parameters: Any) -> None:
        keep = self._configuration.zero_stage == 0

        def label_gradient(parameter: torch.Tensor) -> None:
            self._order[parameter] = None
            if self._zero is not None and isinstance(parameter, nn.Parameter):
                self._zero.take(parameter)
            elif keep:
                self._storages.label([parameter.grad], "gradients")
            else:
                parameter.grad = None

        for parameter in parameters:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(label_gradient)

    def _autocast(self) -> AbstractContextManager[object]:
        dtype = autocast_dtype(self._configuration)
        return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)

    def _batch_of(self, subject: Traceable) -> Any:
        configuration = self._configuration
        if self._trl is not None:
            return self._trl.batch_of(configuration.micro_batch_size, self._length)
        return subject.batch_of(configuration.micro_batch_size, self._length, self._job.workload.source_length or None)


class _PipelineRun(_Run):
    """A step of one rank of a pipeline: chunks of the model's blocks, in the order of the schedule.

    As in torch's pipelining, a rank keeps what a chunk was given and what it made until its backward.
    """

    def _part_of(self, subject: Traceable) -> tuple[nn.Module, Sequence[nn.Module]]:
        with without_modes():  # as they are, and not as the fake tensors they become
            chunks = nn.ModuleList(chunks_of(subject.module, self._configuration, self._rank))
        return chunks, [block for chunk in chunks for block in repeated_blocks(chunk)]

    def _parts(self) -> Iterable[nn.Module]:
        return self._module.children()

    def _accumulate(self) -> None:
        chosen = self._configuration
        chunks: list[Any] = list(self._parts())
        micro_batches = enough_micro_batches(chosen)
        kept: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        with without_modes():  # torch's schedules make tensors of their own
            schedule, stages = chosen.pp_schedule, len(chunks)
            order = order_of(schedule, ranks=chosen.pp, virtual_stages=stages, micro_batches=micro_batches)
        for kind, stage, index in order[self._rank]:
            number = stage // chosen.pp
            self._storages.take_peak()
            if kind == "forward":
                given = self._received(chunks[number])
                kept[number, index] = given, self._forward_of(chunks[number], given)
                continue
            given, output = kept.pop((number, index))
            synchronize(chunks[number], chosen, reduces=index == micro_batches - 1)
            gradient = None if chunks[number].is_last else torch.empty_like(output)
            torch.autograd.backward(output, gradient)
            del given, output, gradient
            self._end("backward")

    def _received(self, chunk: Chunk) -> torch.Tensor:
        """Token ids, or the states that the rank before has sent."""
        if chunk.is_first:
            ids: torch.Tensor = self._batch["input_ids"]
            return ids
        chosen = self._configuration
        dtype = weight_dtype(chosen) or all_gather_dtype(chosen) or torch.float32
        width = self._job.facts.hidden_size
        return torch.empty(chosen.micro_batch_size, self._length, width, dtype=dtype).requires_grad_()

    def _forward_of(self, chunk: Chunk, given: torch.Tensor) -> torch.Tensor:
        others = {name: value for name, value in self._batch.items() if name not in ("input_ids", "labels")}
        self._in_forward = True
        with self._autocast():
            output: torch.Tensor = chunk(given, self._batch["labels"], **others)
            if chunk.is_last:
                output = output / self._configuration.gradient_accumulation_steps
        self._in_forward = False
        self._end("loss" if chunk.is_last else "forward")
        return output


def _cast_batch(batch: Any, dtype: torch.dtype | None) -> Any:
    """Return the batch as fake tensors but for known values, images and audio in the dtype of the weights."""

    def narrowed(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or is_known(leaf):
            return leaf
        wanted = dtype if dtype is not None and leaf.is_floating_point() else leaf.dtype
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=wanted, device="cpu")

    return tree_map(narrowed, batch)


def loss_of(output: Any) -> torch.Tensor:
    """Return `output.loss`, the first single number (nanoGPT's), or the sum of all that depends on weights."""
    loss = getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    for tensor in tensors:
        if tensor.dim() == 0:
            return tensor
    return torch.stack([tensor.float().sum() for tensor in tensors]).sum()
