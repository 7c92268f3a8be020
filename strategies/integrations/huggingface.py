"""`dsplan.integrations.TrainerCallback`: predicted beside measured in a HF Trainer that nobody started with dsplan.

What the first optimizer step shows (micro-batch, tokens, how accelerate spreads the model) is what the prediction is
made for, so the callback needs no settings. Under `dsplan run` the command does all this, and the callback keeps out of
its way.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

from hardware_db.errors import DsplanError
from hardware_db.fingerprint import fingerprint
from hardware_db.measurement import measure_run
from hardware_db.notices import notice
from hardware_db.store import add_or_keep
from hardware_db.units import format_bytes, format_seconds
from planner import vocabulary as words
from planner.cluster.probed import probed_cluster
from planner.models.facts import ModelFacts
from planner.search.estimate import estimate
from planner.search.request import WorkOptions, make_request
from planner.types.plan import Configuration, Plan
from planner.types.plan_io import plan_to_dict
from strategies.autoplan.live import machine_rates, with_measured_rates
from strategies.distributed.consensus import on_rank_zero
from strategies.distributed.environment import join
from strategies.distributed.gathers import ModelHook
from strategies.errors import CannotRun
from strategies.run_directory.machine import own_machine
from strategies.telemetry.alerts import Alert
from strategies.telemetry.metrics import MeasuredRun, measured_of, read_metrics, summarise
from strategies.telemetry.monitor import RunMonitor
from strategies.tracing.live import facts_from_module
from strategies.tracing.module_trace import traced_request
from strategies.variables import RUN_DIRECTORY

OPTIMIZERS: Mapping[str, words.Optimizer] = {
    "adamw_torch": "adamw",
    "adamw_torch_fused": "adamw-fused",
    "adamw_bnb_8bit": "adamw-8bit",
    "adamw_8bit": "adamw-8bit",
    "sgd": "sgd",
    "adafactor": "adafactor",
    "lion_32bit": "lion",
}
"""The optimizers of TrainingArguments, by the planner's names."""
METRICS = "dsplan"
"""The folder in a Trainer's output directory with every rank's metrics."""


class TrainerCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Measures a Trainer's steps, predicts them, reports alerts, and at the end prints both figures and stores them.

        trainer = Trainer(..., callbacks=[dsplan.integrations.TrainerCallback()])

    `plan` is the prediction once the first step is over, `measured` the figures once training is, `alerts` what this
    rank's detectors found, and `stored` the sentence that says where the database has the run. Metrics go to `dsplan/`
    in the Trainer's output directory, which ranks of several nodes have to share for figures of all of them. With
    `store=False` the database stays as it is.
    """

    def __init__(self, *, store: bool = True) -> None:
        self.plan: Plan | None = None
        self.measured: MeasuredRun | None = None
        self.alerts: list[Alert] = []
        self.stored = "not stored"
        self._stores = store
        self._facts: ModelFacts | None = None
        self._monitor: RunMonitor | None = None
        self._handles: list[Any] = []
        self._micro_batches = self._micro_batch = self._tokens = 0
        self._loss_factor = 1.0
        self._example: Any = None

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the facts of the model, which is whole: no library has sharded it yet."""
        if kwargs.get("model") is not None:
            self._facts = facts_from_module(kwargs["model"])

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin to measure, unless `dsplan run` does."""
        if os.environ.get(RUN_DIRECTORY):
            return
        model = kwargs["model"]
        if self._facts is None and not any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
            self._facts = facts_from_module(model)
        self.plan = self.measured = None
        self.alerts.clear()
        self._environment = join()
        self._directory = on_rank_zero(lambda: Path(args.output_dir, METRICS).absolute())
        rank, device = self._environment.rank, args.device
        self._monitor = RunMonitor(self._directory, rank=rank, device=device, sequence_length=0, on_alert=self._alert)
        self._monitor.training_starts()
        self._handles = [
            model.register_forward_pre_hook(self._forward_starts, with_kwargs=True),
            model.register_forward_hook(ModelHook(self._forward_ended)),
        ]

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count micro-batches anew."""
        self._micro_batches = 0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Note the step's micro-batches: fewer at the end of an epoch."""
        accumulation = args.gradient_accumulation_steps
        loader = kwargs.get("train_dataloader")
        if loader is not None and hasattr(loader, "__len__"):
            accumulation = min(accumulation, max(1, len(loader) - self._micro_batches))
        # A model that is given num_items_in_batch divides by the tokens of the whole step, and of all ranks if asked.
        self._loss_factor = accumulation * (args.world_size if args.average_tokens_across_devices else 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the step's row; after the first step, predict."""
        if self._monitor is None:
            return
        self._monitor.step_ended(state.global_step)
        if self.plan is None and self._facts is not None:
            facts, self._facts = self._facts, None
            try:
                self.plan = self._predict(facts, args, kwargs["model"])
            except DsplanError as problem:
                self._print(f"no prediction for this training: {problem}")
            self._example = ()  # seen, and not kept
            self._monitor.training_starts()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Print what was predicted and measured, and store it."""
        if self._monitor is None:
            return
        for handle in self._handles:
            handle.remove()
        self._monitor.close()
        self._monitor = None
        if dist.is_initialized():
            dist.barrier()  # every rank has written its last row
        self.measured, self.stored = on_rank_zero(self._finish)
        self._print(self._comparison())
        self._print(self.stored)

    def _forward_starts(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._monitor is None or not (module.training and torch.is_grad_enabled()):
            return
        self._micro_batches += 1
        ids = kwargs.get("input_ids")
        if isinstance(ids, torch.Tensor) and ids.dim() == 2:
            self._tokens = max(self._tokens, ids.shape[1])
        if self._example is None:
            self._example = (args, kwargs)
        self._monitor.forward_starts(module, (args, kwargs))
        if kwargs.get("num_items_in_batch") is None:
            self._loss_factor = 1.0

    def _forward_ended(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._monitor is None or not (module.training and torch.is_grad_enabled()):
            return
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._monitor.loss_is(loss.detach().reshape(()) * self._loss_factor)

    def _predict(self, facts: ModelFacts, settings: Any, model: torch.nn.Module) -> Plan:
        """Predict what the first step has shown; every rank calls this together."""
        measured = machine_rates(settings.device)

        def predict() -> Plan:
            configuration = configuration_of(settings, model, tokens=self._tokens or 1)
            work = WorkOptions(
                seq_len=configuration.sequence_length,
                global_batch=configuration.global_batch_size,
                precision=configuration.precision,
                optimizer=configuration.optimizer,
            )
            cluster = probed_cluster(own_machine(), ranks=configuration.world_size)
            degrees = (configuration.tp, configuration.cp, configuration.ep, configuration.sequence_parallel)
            request = traced_request(make_request(facts, cluster, work), model, self._example, degrees)
            return estimate(with_measured_rates(request, measured), configuration)

        return on_rank_zero(predict)

    def _finish(self) -> tuple[MeasuredRun, str]:
        measured = summarise(read_metrics(self._directory, self._environment.world_size))
        if self.plan is None or not self._stores:
            return measured, "not stored: " + ("there is no prediction" if self._stores else "store=False")
        try:
            figures = measured_of(measured)
            here = fingerprint(own_machine())
            row = measure_run(plan_to_dict(self.plan), here, outcome="completed", measured=figures)
            where = add_or_keep(row)
        except DsplanError as problem:
            return measured, f"not stored in the database: {problem}"
        return measured, f"stored as {row.id[:8]} (completed) in {where}"

    def _comparison(self) -> str:
        measured, plan = self.measured, self.plan
        assert measured is not None
        peak, step = (plan.memory.peak_allocated_bytes, plan.time.step_seconds) if plan else (None, None)
        memory = _beside(peak, measured.peak_allocated_bytes, format_bytes)
        seconds = _beside(step, measured.step_seconds, format_seconds)
        alerts = f"; {len(self.alerts)} alerts" if self.alerts else ""
        return f"predicted and measured: peak memory of a rank {memory}; step time {seconds}{alerts}"

    def _alert(self, alert: Alert) -> None:
        self.alerts.append(alert)
        notice(f"rank {self._environment.rank}: {alert.message}", stream="stdout")

    def _print(self, sentence: str) -> None:
        if self._environment.is_main:
            notice(sentence, stream="stdout")


def _beside(predicted: float | None, measured: float | None, spell: Callable[[Any], str]) -> str:
    words_of = ["-" if figure is None else spell(figure) for figure in (predicted, measured)]
    ratio = f" ({measured / predicted:.2f})" if predicted and measured else ""
    return f"{words_of[0]} and {words_of[1]}{ratio}"


def configuration_of(settings: Any, model: torch.nn.Module, *, tokens: int) -> Configuration:
    """Return how a Trainer that has begun to train spreads its model, as the planner says it.

    Raises:
        CannotRun: the planner has no words for it.
    """
    strategy, offload = _spread(settings)
    replicas = settings.world_size if strategy in ("single", "ddp") else 1
    micro_batch, accumulation = settings.per_device_train_batch_size, settings.gradient_accumulation_steps
    optimizer = str(getattr(settings.optim, "value", settings.optim))
    return Configuration(
        strategy=strategy,
        backend=words.default_backend(strategy),
        dp_replicate=replicas,
        dp_shard=settings.world_size // replicas,
        micro_batch_size=micro_batch,
        gradient_accumulation_steps=accumulation,
        global_batch_size=micro_batch * accumulation * settings.world_size,
        sequence_length=tokens,
        precision="bf16" if settings.bf16 else "fp16" if settings.fp16 else "fp32",
        optimizer=OPTIMIZERS.get(optimizer, "adamw"),
        activation_checkpointing="full" if _recomputes(model) else "none",
        offload=offload,
        sync_each_micro_batch=False,
    )


def _recomputes(model: torch.nn.Module) -> bool:
    new = getattr(model, "is_activation_checkpointing", None)  # transformers 5.23; it warns of the old name
    return bool(getattr(model, "is_gradient_checkpointing", False) if new is None else new)


def _spread(settings: Any) -> tuple[words.Strategy, words.Offload]:
    if settings.n_gpu > 1:
        raise CannotRun(f"one process drives {settings.n_gpu} GPUs by DataParallel; start a rank for each")
    state = AcceleratorState()
    if state.distributed_type == DistributedType.DEEPSPEED:
        plugin = state.deepspeed_plugin
        section = plugin.deepspeed_config.get("zero_optimization", {})
        moved = [section.get(f"offload_{name}", {}).get("device", "none") for name in ("optimizer", "param")]
        offload: words.Offload = "nvme" if "nvme" in moved else "all" if moved[1] == "cpu" else "none"
        by_stage: dict[int, words.Strategy] = {1: "zero1", 2: "zero2", 3: "zero3"}
        return by_stage.get(plugin.zero_stage, "ddp"), "optimizer" if moved == ["cpu", "none"] else offload
    if state.distributed_type == DistributedType.FSDP:
        plugin = state.fsdp_plugin
        reshards = plugin.reshard_after_forward not in (False, "SHARD_GRAD_OP")
        return "fsdp" if reshards else "fsdp-grad-op", "all" if plugin.cpu_offload else "none"
    return "ddp" if settings.world_size > 1 else "single", "none"
