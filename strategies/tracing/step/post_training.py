"""Steps of post-training: TRL's own trainers compute the loss of a traced step.

A trainer of TRL 1.16 is made without its constructor, which would load models and data, and is given what its
`compute_loss` reads: the defaults of its config, a model that runs as accelerate prepares it, and the reference. So the
head in tiles (`trl/trainer/utils.py`, add_fused_lm_head), the reference's forward without gradients and what a trainer
keeps of either are TRL's code. Whole numbers of a batch (tokens, masks, labels) are real, since trainers read them;
what is read of other values has no bearing on memory, and is 1.

On a GPU TRL folds tiles with Triton kernels, which write into tensors that are there, and adds products up in fp32 with
`torch.addmm(out_dtype=...)`, which makes none either: both are left out. On a CPU its torch form runs.
"""

from __future__ import annotations

import contextlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import MISSING, fields
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from planner.cost.generation import scores_again
from planner.errors import DsplanError
from planner.types.job import Job
from planner.types.post_training import PostTraining
from planner.vocabulary import CLASSIFYING, GENERATING, PAIRED, POST_TRAINING, Task
from strategies.torch_compat.dispatch import without_modes
from strategies.tracing.step.build import switch_adapters
from strategies.tracing.step.images import KnownValues
from strategies.tracing.step.refusal import TraceFailed

_OUTPUTS: dict[Task, tuple[str, ...]] = {
    "sft": ("log_probs", "entropy", "is_top1"),
    "dpo": ("log_probs", "entropy", "mean_logits", "is_top1"),
    "kto": ("log_probs", "entropy", "mean_logits"),
    "grpo": ("log_probs", "entropy"),
}
"""Figures of a token that each trainer asks the head for (the arguments of its `add_fused_lm_head`)."""
TRACED: tuple[Task, ...] = (*_OUTPUTS, "reward")
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
_Autocast = Callable[[], AbstractContextManager[object]]


def trl_step_of(job: Job) -> TrlStep | None:
    """Return what TRL's trainer makes of a job's step; None where its task has none, or the loss is a language model's.

    Raises:
        TraceFailed: the job is post-training that no trainer of TRL's own, or no trace, runs.
        DsplanError: TRL is not installed, or is too old.
    """
    work, chosen = job.workload, job.configuration
    if work.task not in POST_TRAINING or (work.task == "sft" and work.loss != "tiled"):
        return None
    if work.task not in TRACED:
        raise TraceFailed("", "", f"TRL has no trainer of {work.task} among its stable ones, which are what is traced")
    if work.loss != ("plain" if work.task in CLASSIFYING else "tiled"):
        raise TraceFailed("", "", f"--task {work.task} is traced with its trainer's loss, not with --loss {work.loss}")
    if chosen.splits_model or work.compile:
        raise TraceFailed("", "", "trainers of post-training are traced over data parallelism alone, and not compiled")
    return TrlStep(job)


class Prepared(nn.Module):
    """A module as accelerate prepares it for a trainer: its forward runs under autocast."""

    is_gradient_checkpointing = False
    """What trainers would switch off for a forward without gradients, which keeps nothing as it is."""

    def __init__(self, module: nn.Module, autocast: _Autocast) -> None:
        super().__init__()
        self.wrapped, self._autocast = module, autocast

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        with self._autocast():
            return self.wrapped(*args, **kwargs)


class _WithoutAdapters(Prepared):
    """The trained model as its own reference: with its adapters switched off, as PEFT does it."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module with its adapters off."""
        switch_adapters(self.wrapped, on=False)
        try:
            return super().forward(*args, **kwargs)
        finally:
            switch_adapters(self.wrapped, on=True)


class TrlStep:
    """One job's trainer, its batches and its loss."""

    def __init__(self, job: Job) -> None:
        self._job, self._task = job, job.workload.task
        total = job.configuration.sequence_length
        self._post = job.workload.post or PostTraining(prompt_length=0, completion_length=total, completion_max=total)
        self._trainer = self._make_trainer()

    @property
    def loads_reference(self) -> bool:
        """True if the reference is a model of its own; adapters are switched off for it instead."""
        return self._job.has_reference and self._job.workload.method == "full"

    def batch_of(self, samples: int, length: int) -> dict[str, Any]:
        """Return a micro-batch as TRL's collators make it, all of whose samples are of the same length."""
        rows = samples * (2 if self._task in PAIRED else 1)
        prompt = min(self._post.prompt_length, length - 1)
        with without_modes():
            tokens, mask = torch.zeros(rows, length, dtype=torch.long), torch.ones(rows, length, dtype=torch.long)
            of_completion = mask.clone()
            of_completion[:, :prompt] = 0
            inputs = {"input_ids": tokens, "attention_mask": mask}
            label = torch.arange(rows) % 2 == 0
        if self._task == "sft":
            return {**inputs, "labels": tokens.masked_fill(of_completion == 0, -100)}
        if self._task == "reward":
            return inputs
        if self._task == "grpo":
            return self._completions(tokens, mask, prompt)
        batch = {**inputs, "completion_mask": of_completion}
        if self._task == "kto":
            batch = {**batch, **{f"KL_{name}": value.clone() for name, value in batch.items()}, "label": label}
        return batch if self._job.has_reference else {**batch, **self._precomputed(rows)}

    def _completions(self, tokens: torch.Tensor, mask: torch.Tensor, prompt: int) -> dict[str, Any]:
        rows, length = tokens.shape
        figures = [name for name, is_there in self._kept_scores().items() if is_there]
        return {
            "prompt_ids": tokens[:, :prompt],
            "prompt_mask": mask[:, :prompt],
            "completion_ids": tokens[:, prompt:],
            "completion_mask": mask[:, prompt:],
            "advantages": torch.zeros(rows),
            "num_items_in_batch": mask.sum(),
            **{name: torch.zeros(rows, length - prompt) for name in figures},
        }

    def _kept_scores(self) -> dict[str, bool]:
        """Return which log-probabilities of a round wait for its updates."""
        return {"old_per_token_logps": scores_again(self._job), "ref_per_token_logps": self._job.has_reference}

    def _precomputed(self, rows: int) -> dict[str, torch.Tensor]:
        """Return the log-probabilities of a reference that was run before training."""
        if self._task == "kto":
            return {name: torch.zeros(rows) for name in ("ref_logps", "ref_KL_logps")}
        return {name: torch.zeros(rows // 2) for name in ("ref_chosen_logps", "ref_rejected_logps")}

    def prepare(self, model: Any) -> None:
        """Give the model TRL's head, and what TRL's trainers set beside it."""
        model.config.get_text_config().pad_token_id = 0
        if self._task in _OUTPUTS:
            import_module("trl.trainer.utils").add_fused_lm_head(model, outputs=_OUTPUTS[self._task])
        if self._job.workload.method != "full" and self._job.configuration.activation_checkpointing != "none":
            model.enable_input_require_grads()

    def prepare_reference(self, model: Any) -> None:
        """Give a reference model the head that trainers run it with."""
        import_module("trl.trainer.utils").add_fused_lm_head(model)

    def connect(self, model: nn.Module, reference: nn.Module | None, autocast: _Autocast) -> None:
        """Hand the trainer its models; without a reference of its own it takes the model without adapters.

        A reference beside our own ZeRO stays as it was loaded, under accelerate's autocast.
        """
        trainer, chosen = self._trainer, self._job.configuration
        trainer.model = Prepared(model, autocast)
        trainer.accelerator.autocast = autocast
        if reference is not None:
            is_cast = chosen.zero_stage > 0 and chosen.backend == "native" and chosen.precision in _AUTOCAST
            own = partial(torch.autocast, "cpu", _AUTOCAST[chosen.precision]) if is_cast else autocast
            trainer.ref_model = Prepared(reference, own)
        elif self._job.has_reference:
            trainer.ref_model = _WithoutAdapters(model, autocast)

    def loss(self, batch: dict[str, Any]) -> torch.Tensor:
        """Return what the trainer's `compute_loss` returns of a batch."""
        trainer, inputs = self._trainer, dict(batch)
        tokens = inputs.get("labels", inputs.get("input_ids"))
        counted = None if tokens is None else (tokens != -100).sum()
        loss: torch.Tensor = trainer.compute_loss(trainer.model, inputs, num_items_in_batch=counted)
        return loss

    def scores(self, batch: dict[str, Any]) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yield the phases of a round that come before its updates and what each runs, micro-batch by micro-batch."""
        if self._task not in GENERATING:
            return
        trainer = self._trainer
        models = {"reference": getattr(trainer, "ref_model", None) if self._job.has_reference else None}
        models["logprob"] = trainer.model if scores_again(self._job) else None
        ids, mask = (torch.cat([batch[f"prompt_{kind}"], batch[f"completion_{kind}"]], 1) for kind in ("ids", "mask"))
        length = batch["completion_ids"].size(1)
        for phase, model in models.items():
            if model is not None:
                yield phase, partial(trainer._get_per_token_logps_and_entropies, model, ids, mask, length)

    def _make_trainer(self) -> Any:
        stem = self._task.capitalize() if self._task == "reward" else self._task.upper()
        try:
            trainers = import_module(f"trl.trainer.{self._task}_trainer")
            import_module("trl.trainer.utils").add_fused_lm_head  # noqa: B018
        except (ImportError, AttributeError) as problem:
            raise DsplanError(
                f"--task {self._task} is traced with TRL's own trainer, which is not there ({problem});"
                " pip install 'trl>=1.16'"
            ) from None
        settings = _defaults(getattr(trainers, f"{stem}Config"))
        chosen, kind = self._job.configuration, getattr(trainers, f"{stem}Trainer")
        settings |= {"beta": self._post.beta} if self._task == "grpo" else {}
        trainer = kind.__new__(kind)
        trainer.__dict__.update(
            settings,
            args=SimpleNamespace(**settings | {"steps_per_generation": 1}),
            accelerator=_accelerator(chosen.world_size),
            ref_model=None,
            aux_loss_enabled=False,
            compute_loss_func=None,
            label_smoother=None,
            precompute_ref_logps=not self._job.has_reference,
            calculate_KL=True,
            is_deepspeed_enabled=False,
            _tp_size=1,
            _total_train_tokens=0,
            _metrics=defaultdict(lambda: defaultdict(list)),
            loss_types=settings.get("loss_type"),
            loss_weights=[1.0],
            epsilon_low=settings.get("epsilon"),
            epsilon_high=settings.get("epsilon"),
            _entropy_bonus_enabled=False,
            current_gradient_accumulation_steps=chosen.gradient_accumulation_steps,
        )
        return trainer


def _defaults(config: Any) -> dict[str, Any]:
    """Return the defaults of a config, whose constructor asks for a device."""
    plain = {item.name: item.default for item in fields(config) if item.default is not MISSING}
    lists: dict[str, Any] = {item.name: item.default_factory for item in fields(config)}
    return plain | {name: make() for name, make in lists.items() if make is not MISSING}


def _accelerator(ranks: int) -> Any:
    """Return what trainers ask of accelerate; gathered metrics are a few numbers, and are left as they are."""

    def unchanged(value: Any, *_rest: object, **_named: object) -> Any:
        return value

    return SimpleNamespace(
        **dict.fromkeys(("gather", "gather_for_metrics", "reduce", "unwrap_model"), unchanged),
        device=torch.device("cpu"),
        num_processes=ranks,
        sync_gradients=True,
        is_main_process=False,
        parallelism_config=None,
    )


# TRL's kernels on a GPU.


class _Launches:
    """A Triton kernel that is launched on fake tensors: it writes into tensors that are there."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return _adds_nothing


def _adds_nothing(*_arguments: object, **_named: object) -> None:
    """Allocate nothing."""


def _on_triton(_device: torch.device) -> bool:
    return True


@contextlib.contextmanager
def following_trl(*, on_cpu: bool) -> Iterator[None]:
    """Compute what TRL's trainers read of whole numbers, and have its tiles folded as on the job's device."""
    with contextlib.ExitStack() as restored:
        if not on_cpu:
            launched = {"_forward_kernel": _Launches(), "_backward_kernel": _Launches(), "_addmm_fp32": _adds_nothing}
            launched |= {"triton": SimpleNamespace(cdiv=lambda size, step: -(-size // step))}
            _replace("trl.kernels.chunked_logprob", {**launched, "_use_triton": _on_triton}, restored)
            _replace("trl.trainer.utils", {"_use_triton": _on_triton}, restored)
        restored.enter_context(KnownValues())
        yield


_ABSENT = object()


def _replace(home: str, names: dict[str, Any], restored: contextlib.ExitStack) -> None:
    module = sys.modules[home]
    for name, value in names.items():
        before = getattr(module, name, _ABSENT)
        setattr(module, name, value)
        if before is _ABSENT:
            restored.callback(delattr, module, name)
        else:
            restored.callback(setattr, module, name, before)
