"""HF Trainer scripts: the plan becomes TrainingArguments, the steps become metrics.

TrainingArguments is a dataclass whose settings take effect in `__post_init__`. A plan file fills them in there, before
they do. Without one the model is first known in `Trainer.__init__`: the arguments then go back to what the script
wrote, the plan made from the model is filled in, and `__post_init__` runs once more.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainingArguments

from hardware_db.notices import notice
from planner import vocabulary as words
from planner.emit.common import EmitOptions, recomputing_whole_blocks
from planner.emit.huggingface import training_arguments
from planner.types.plan import Plan
from strategies.checkpoint.object_store import ObjectPath, location
from strategies.checkpoint.retention import KEPT
from strategies.distributed.consensus import on_rank_zero
from strategies.distributed.environment import join
from strategies.errors import CannotRun
from strategies.integrations.huggingface import OPTIMIZERS
from strategies.launch.hooks import capabilities
from strategies.launch.hooks.patch import patch
from strategies.launch.hooks.script_plan import (
    LiveJob,
    load_given_plan,
    plan_live,
    say,
    say_replaced,
    sequence_length,
    watch,
)
from strategies.launch.hooks.sharded import library_plan, save_from_all_ranks, shard_models
from strategies.launch.hooks.trl import trl_work
from strategies.run_directory import claim
from strategies.run_directory.attempt_options import AttemptOptions
from strategies.run_directory.files import LINEAGE_FILE, LOCK_FILE
from strategies.run_directory.heartbeat import PULSE
from strategies.supervision import lineage
from strategies.supervision.autosave_interval import Interval, SaveClock
from strategies.supervision.hang_detection import begin_watching
from strategies.supervision.not_finite import FiniteWatch
from strategies.supervision.process import describe_stop, leave
from strategies.supervision.resume import nothing_left
from strategies.supervision.stopping import Request, Stopping, open_board
from strategies.telemetry.monitor import RunMonitor
from strategies.tracing.example import example_batch
from strategies.variables import RUN_DIRECTORY

# HF Trainer under supervision: it resumes from the run's newest checkpoint, saves when it is time, and stops in time.


_STATE = "trainer_state.json"


def supervise(trainer: Any) -> Callable[[Any], object]:
    """Let a run's options rule a Trainer, and return what is to be called with every micro-batch's loss."""
    directory = Path(os.environ[RUN_DIRECTORY])
    attempt_options = AttemptOptions.load(directory)
    if attempt_options is None:
        return lambda loss: None
    supervised = _Supervised(attempt_options, directory)
    trainer.add_callback(supervised)
    original = trainer.train

    @functools.wraps(original)
    def train(resume_from_checkpoint: str | bool | None = None, *rest: Any, **named: Any) -> Any:
        output, asks = Path(trainer.args.output_dir).absolute(), bool(resume_from_checkpoint)
        newest = _newest(directory, output, attempt_options, script_asks=asks) if _is_first_train() else None
        path = resume_from_checkpoint if isinstance(resume_from_checkpoint, str) else ""
        if newest is not None and newest.step >= _step_of(path):
            resume_from_checkpoint = newest.path
            if os.environ["RANK"] == "0":
                notice(f"resumes at step {newest.step} from {newest.path}")
        return original(resume_from_checkpoint, *rest, **named)

    patch(trainer, "train", train)
    return supervised.loss_is


_trains_again = False


def _is_first_train() -> bool:
    """Return whether this process has not trained yet: what it trains later began in no earlier attempt."""
    global _trains_again
    is_first, _trains_again = not _trains_again, True
    return is_first


@dataclass(kw_only=True, slots=True)
class _Progress:
    """The part of an engine that the watch over finite losses reads."""

    global_steps: int = 0
    gradient_norm: float | None = None
    loss_scale: float = 1.0


class _Supervised(TrainerCallback):  # type: ignore[misc]
    """Does at the end of every step of a Trainer what `Supervision` does for an engine."""

    def __init__(self, attempt_options: AttemptOptions, directory: Path) -> None:
        self._options, self._directory = attempt_options, directory
        self._progress = _Progress()
        self._finite = FiniteWatch(self._progress, sees_gradients=False)
        self._saves_now = False
        self._save_begun: float | None = None
        self._save_seconds: float | None = None
        self._leaves: Request | None = None

    def loss_is(self, loss: Any) -> None:
        """Note a micro-batch's loss."""
        PULSE.call()
        self._finite.loss_is(loss)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._environment = environment = replace(join(), device=args.device)
        store = location(self._options.supervision.checkpoint_directory)
        if environment.is_main and isinstance(store, ObjectPath):
            notice(f"{store} is not used: a Trainer saves to its output_dir, {args.output_dir}")
        board = open_board(self._directory, environment)
        self._stopping = Stopping(board, environment.rank, environment.world_size)
        self._watch = begin_watching(self._directory, environment.rank, self._options.supervision.hang_seconds)
        self._watch.attach(board, self._stopping, environment.world_size)
        self._interval = on_rank_zero(lambda: Interval.of(self._options.supervision))
        self._clock = SaveClock(self._interval, step=state.global_step)
        PULSE.step = state.global_step

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        PULSE.call()

    def on_prediction_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        PULSE.beat()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        step = PULSE.step = self._progress.global_steps = state.global_step
        PULSE.call()
        self._finite.step_ended()
        if self._stopping.is_at(step):
            self._stop(step, control)
        elif self._interval.is_set and step >= self._clock.next_look and not control.should_save:
            now, save_seconds = on_rank_zero(lambda: (time.monotonic(), self._save_seconds))
            self._saves_now = control.should_save = self._clock.is_due(step, now, save_seconds)
            if (change := self._clock.change(save_seconds)) and self._environment.is_main:
                notice(change)
            # Trainer evaluates before it saves, which is no part of a save.
            self._save_begun = time.monotonic() if self._saves_now and not control.should_evaluate else None
        return control

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note a checkpoint that is written on this rank."""
        PULSE.beat()
        path = Path(args.output_dir, f"checkpoint-{state.global_step}").absolute()
        if self._environment.world_size > 1:
            dist.barrier()  # complete is what all ranks have written
        if self._environment.local_rank == 0:
            self._note(path, state.global_step)
        self._clock.saved()
        if self._save_begun is not None:
            self._save_seconds, self._save_begun = time.monotonic() - self._save_begun, None
        if self._leaves is not None:
            self._leave(self._leaves, f"stopped at step {state.global_step} and saved", path)
        if self._environment.is_main:
            listed, options = lineage.read(self._directory), self._options
            run, since, has_nodes = options.run_id, options.since, options.has_nodes
            for old in lineage.outdated(listed, KEPT, run=run, since=since, has_nodes=has_nodes):
                shutil.rmtree(old, ignore_errors=True)
        self._saves_now = False

    def _note(self, path: Path, step: int) -> None:
        """Remember a checkpoint; a full disk makes a later resume begin earlier and ends nothing."""
        attempt, automatic = self._options.attempt, self._saves_now
        checkpoint = lineage.RunCheckpoint(
            path=str(path),
            step=step,
            attempt=attempt,
            by="huggingface",
            is_automatic=automatic,
            run=self._options.run_id,
        )
        try:
            lineage.note(self._directory, checkpoint)
        except OSError as problem:
            notice(f"{self._directory}: the checkpoint of step {step} is not listed ({problem.strerror})")

    def _stop(self, step: int, control: Any) -> None:
        """Ask for a checkpoint, after which the rank leaves; leave at once where there is no time for one."""
        request = self._stopping.request
        assert request is not None
        if on_rank_zero(lambda: time.monotonic() > request.deadline):
            self._leave(request, f"stopped at step {step}, not saved: no time is left", None)
        self._leaves, self._saves_now = request, True
        control.should_save, control.should_evaluate = True, False

    def _leave(self, request: Request, message: str, saved: Path | None) -> None:
        if self._environment.is_main:
            notice(message)
        word = describe_stop(request.kind, message, self._directory, saved)
        leave(self._stopping, self._watch, self._directory, word)


def _newest(
    directory: Path, output: Path, attempt_options: AttemptOptions, *, script_asks: bool
) -> lineage.RunCheckpoint | None:
    """Return the newest complete checkpoint of this run in a Trainer's output directory, as rank 0 sees it.

    Raises:
        CannotRun: the run had got further and nothing of it is left, and the script does not say what to load.
    """

    def look() -> lineage.RunCheckpoint | None:
        lists = lineage.read_lineage(directory)
        own = [checkpoint for checkpoint in lists.all if attempt_options.counts(checkpoint.run, checkpoint.attempt)]
        candidates = [
            checkpoint
            for checkpoint in lineage.newest_first(own)
            if Path(checkpoint.path).parent == output and _is_whole(checkpoint)
        ]
        if attempt_options.reached and not attempt_options.since and (lists.damaged_lines or not candidates):
            candidates = [*_unlisted(directory, output, {checkpoint.path for checkpoint in lists.all}), *candidates]
            candidates.sort(key=lambda checkpoint: checkpoint.step, reverse=True)
        if not candidates and attempt_options.base:
            candidates = [
                lineage.RunCheckpoint(path=attempt_options.base, step=_step_of(attempt_options.base), by="huggingface")
            ]
        if candidates:
            gone = max((checkpoint.step for checkpoint in lists.journalled if checkpoint in own), default=0)
            if gone > candidates[0].step:
                again = f"the steps after {candidates[0].step} are made again"
                notice(f"the checkpoint of step {gone} is gone or not complete: {again}")
            return candidates[0]
        if script_asks or not attempt_options.reached:
            return None
        if not attempt_options.may_begin_anew:
            raise nothing_left(directory, attempt_options, [output])
        reached = attempt_options.reached
        notice(f"no checkpoint was complete when the run was at step {reached}: it begins at step 1 again")
        return None

    return on_rank_zero(look)


def _unlisted(directory: Path, output: Path, listed: set[str]) -> list[lineage.RunCheckpoint]:
    """Return the checkpoints in a Trainer's output directory that this run made and that are in no list of it."""
    try:
        began = (directory / LOCK_FILE).stat().st_mtime  # made when the run was, and never written to
    except OSError:
        began = 0.0
    unlisted = []
    for path in output.glob("checkpoint-*"):
        folder = lineage.RunCheckpoint(path=str(path), step=_step_of(str(path)), by="huggingface")
        if folder.path not in listed and folder.step > 0 and _is_whole(folder) and path.stat().st_mtime >= began:
            unlisted.append(folder)
    if unlisted:
        steps = ", ".join(str(step) for step in sorted(checkpoint.step for checkpoint in unlisted)[-4:])
        notice(f"{directory / LINEAGE_FILE} does not name checkpoints in {output} (step {steps}): they count")
    return unlisted


def _is_whole(checkpoint: lineage.RunCheckpoint) -> bool:
    """Return whether a Trainer's checkpoint has its state, which is written last, and of the step in its name."""
    try:
        state = json.loads(Path(checkpoint.path, _STATE).read_text())
    except (OSError, ValueError):
        return False
    return isinstance(state, dict) and state.get("global_step", checkpoint.step) == checkpoint.step


def _step_of(path: str) -> int:
    """Return the step in the name of a Trainer's checkpoint, -1 where there is none."""
    number = path.rstrip("/").rpartition("checkpoint-")[2]
    return int(number) if number.isdecimal() else -1


# The script's own: what it optimizes with, and how fast.
_LEFT_TO_SCRIPT = frozenset({"optim", "learning_rate", "weight_decay", "max_grad_norm"})
# Follows from the machine, not from the plan.
_MACHINE = frozenset({"use_cpu", "ddp_backend"})
_WRITTEN, _SETTLED = "_dsplan_written", "_dsplan_settled"


def settle(original: Callable[..., None], settings: Any) -> None:
    """Run `TrainingArguments.__post_init__`, or a subclass's, with the plan's settings where there is one already."""
    if hasattr(settings, _WRITTEN):  # a subclass's, which has come to its base's
        original(settings)
        return
    plan = load_given_plan("huggingface")
    if not torch.cuda.is_available():
        # As ACCELERATE_USE_CPU, which `dsplan run` sets. TRL asks for bf16 everywhere: without this that is refused.
        settings.use_cpu = True
    elif settings.ddp_backend is None:
        # The group is made here, and the plan may be made later and offload: then tensors on the CPU are reduced too.
        settings.ddp_backend = words.GROUP_BACKENDS
    setattr(settings, _WRITTEN, _written(settings))
    if plan is not None:
        _fill_in(settings, plan)
    original(settings)
    setattr(settings, _SETTLED, _written(settings))


def _resettle(settings: Any, plan: Plan) -> None:
    """Settle the arguments once more, with the plan's settings in what the script wrote.

    What was set since then stays: subclasses of Trainer edit their arguments before they come to Trainer itself. The
    class's own `__post_init__` runs, as those of subclasses work out some settings from others.
    """
    # Device and rank are cached on the arguments at their first use.
    vars(settings).pop("_setup_devices", None)
    settled = getattr(settings, _SETTLED)
    for name, value in getattr(settings, _WRITTEN).items():
        if getattr(settings, name) == settled[name]:
            setattr(settings, name, dict(value) if isinstance(value, dict) else value)
    _fill_in(settings, plan)
    with claim.own_work():  # the plan is filled in already
        type(settings).__post_init__(settings)


def init(original: Callable[..., None], trainer: Any, *positional: Any, **named: Any) -> None:
    """Run `Trainer.__init__` under the plan; subclasses come here with the data and the collator that they made."""
    plan = load_given_plan("huggingface")
    bound = inspect.signature(original).bind(trainer, *positional, **named)
    arguments = bound.arguments
    arguments["args"] = settings = arguments.get("args") or TrainingArguments(output_dir="tmp_trainer")
    own = _own_split(arguments.get("model"), settings)
    if plan is not None:
        require_same_micro_batch(trainer, settings, plan)
    plan_in_use = plan if own else plan or plan_live(_live_job(trainer, arguments, settings))
    if own:
        _require_own_split(own)
    if plan is None and plan_in_use is not None:
        _resettle(settings, plan_in_use)
    monitor = watch(plan_in_use, planned=plan is None, device=settings.device)
    arguments["callbacks"] = [*(arguments.get("callbacks") or ()), _StepEnd(monitor)]
    original(*bound.args, **bound.kwargs)
    if plan_in_use is not None:
        shard_models(trainer.accelerator, plan_in_use)
        save_from_all_ranks(trainer, plan_in_use)
    _watch_training_steps(trainer, monitor, supervise(trainer))


def require_same_micro_batch(trainer: Any, settings: Any, plan: Plan) -> None:
    """Refuse a given plan that cuts the batches of a trainer to which a micro-batch means something.

    Raises:
        CannotRun: it does.
    """
    work = trl_work(trainer, settings, (), None)
    if work is None or not work.keeps_micro_batch:
        return
    written, chosen = getattr(settings, _WRITTEN, {}), plan.configuration
    own = written.get("per_device_train_batch_size"), written.get("gradient_accumulation_steps")
    planned = chosen.micro_batch_size, chosen.gradient_accumulation_steps
    if None not in own and own != planned:
        raise CannotRun(
            f"the plan has micro-batch {planned[0]} x accumulation {planned[1]} where the script has"
            f" {own[0]} x {own[1]}, of which {type(trainer).__name__} makes its batches; use a plan that has those too"
        )


def _own_split(model: Any, settings: Any) -> str:
    """Return by what a script splits its model itself, `from_pretrained` or accelerate's meshes; empty: by nothing."""
    config = getattr(settings, "parallelism_config", None)
    sizes = {name: getattr(config, f"{name}_size", 1) or 1 for name in ("tp", "cp", "sp")}
    split = " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
    if split:
        return f"TrainingArguments.parallelism_config ({split})"
    degree = getattr(model, "tp_size", None) or 1
    return f"from_pretrained(tp_plan=...) (tp {degree})" if degree > 1 else ""


def _require_own_split(own: str) -> None:
    """Refuse a split of the script's own that cannot run here, or beside another plan."""
    remedy = 'leave it out, or call dsplan.initialize with parallel={"tp": ...}'
    if not torch.cuda.is_available():
        # accelerate 1.15, state.py: ParallelismConfig is refused for DistributedType.MULTI_CPU.
        raise CannotRun(f"the script splits its model by {own}, which accelerate runs on GPUs alone; {remedy}")
    if flags := capabilities.requested_flags():
        raise CannotRun(f"{flags} cannot be applied: the script splits its model by {own}; {remedy}")
    say(f"no plan: the script splits its model by {own}; it runs as it is, measured")


def _live_job(trainer: Any, arguments: Mapping[str, Any], settings: Any) -> LiveJob:
    model = arguments.get("model")
    if model is None and arguments.get("model_init") is not None:
        model = arguments["model_init"]()
    data = arguments.get("train_dataset")
    collate = arguments.get("data_collator")
    return LiveJob(
        module=cast("torch.nn.Module", model),
        kind="huggingface",
        micro_batch_size=settings.per_device_train_batch_size,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        sequence_length=sequence_length(data, collate),
        example=example_batch(data, collate),
        precision="bf16" if settings.bf16 else "fp16" if settings.fp16 else "fp32",
        optimizer=OPTIMIZERS.get(str(settings.optim.value), "adamw"),
        post_training=trl_work(trainer, settings, data, arguments.get("processing_class")),
    )


def _written(settings: Any) -> dict[str, Any]:
    """Return the settings as the script wrote them; dictionaries are copied, because `__post_init__` edits them."""
    written = {item.name: getattr(settings, item.name) for item in fields(settings) if item.init}
    return {name: dict(value) if isinstance(value, dict) else value for name, value in written.items()}


def _fill_in(settings: Any, plan: Plan) -> None:
    options = EmitOptions(
        gradient_clipping=settings.max_grad_norm,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        cpu=not torch.cuda.is_available(),
    )
    names = {item.name for item in fields(settings)}
    wanted: dict[str, Any] = {"deepspeed": None, "fsdp": None, "fsdp_config": None, "auto_find_batch_size": False}
    planned = training_arguments(recomputing_whole_blocks(library_plan(plan)), options)
    wanted |= {name: value for name, value in planned.items() if name not in _LEFT_TO_SCRIPT}
    keys = dict[str, str]()  # the script's own of settings with a newer name
    for old in ("gradient_checkpointing", "gradient_checkpointing_kwargs"):
        new = old.replace("gradient", "activation")
        if new in names and old in wanted:
            wanted[new] = wanted.pop(old)
            if getattr(settings, new) is None:
                setattr(settings, new, getattr(settings, old))
                keys[new] = old
            setattr(settings, old, None)
    chosen = {name: value for name, value in wanted.items() if name not in _MACHINE}
    say_replaced(
        {keys.get(name, name): getattr(settings, name) for name in chosen},
        {keys.get(name, name): value for name, value in chosen.items()},
    )
    for name, value in wanted.items():
        setattr(settings, name, value)


class _StepEnd(TrainerCallback):  # type: ignore[misc]
    """Notifies the monitor when an optimizer step is over and when training is."""

    def __init__(self, monitor: RunMonitor) -> None:
        self._monitor = monitor

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._monitor.step_ended(state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._monitor.close()


def _watch_training_steps(trainer: Any, monitor: RunMonitor, loss_is: Callable[[Any], object]) -> None:
    """Notify the monitor of every micro-batch and its loss."""
    original = trainer.training_step

    @functools.wraps(original)
    def training_step(model: Any, inputs: Any, *rest: Any, **named: Any) -> torch.Tensor:
        monitor.forward_starts(model, ((), inputs) if isinstance(inputs, Mapping) else ((inputs,), {}))
        loss: torch.Tensor = original(model, inputs, *rest, **named)
        # Trainer adds up a step's losses, each divided by the micro-batches or the tokens of that step, which is an
        # incomplete one at the end of an epoch; the monitor takes their mean.
        monitor.loss_is(loss * trainer.current_gradient_accumulation_steps)
        loss_is(loss)
        return loss

    patch(trainer, "training_step", training_step)
