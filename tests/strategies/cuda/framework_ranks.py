"""Ranks that train a tiny OPT under other frameworks with what dsplan emits: `framework_ranks.py ANSWER CASES`.

CASES is JSON, `{name: [framework, strategy, {field of the configuration: value}]}`; ANSWER gets the losses of every
case, and those of plain torch on the CPU with the same samples.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from transformers import OPTConfig, OPTForCausalLM, Trainer, TrainingArguments

from planner.emit.common import EmitOptions
from planner.emit.deepspeed import deepspeed_config
from planner.emit.huggingface import training_arguments
from planner.types.plan import Plan
from strategies.launch.hooks.accelerate import launch_environment
from tests.planner.emit.plans import TINY, make_plan

OPTIONS = EmitOptions(learning_rate=1e-2, weight_decay=0.0, gradient_clipping=1.0)
STEPS, SAVED_AFTER, MICRO, ACCUMULATION = 4, 2, 2, 2
WORLD, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
Losses = dict[str, list[float]]


def _model() -> Any:
    torch.manual_seed(0)
    size = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "num_hidden_layers": 2}
    config = OPTConfig(vocab_size=64, max_position_embeddings=32, dropout=0.0, num_attention_heads=2, **size)
    return OPTForCausalLM(config)


def _samples() -> list[dict[str, torch.Tensor]]:
    count = STEPS * ACCUMULATION * MICRO * WORLD
    ids = torch.randint(4, 20, (count, 16), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in ids]


def _batches(step: int, ranks: range) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the micro-batches of a step that these ranks have."""
    samples = _samples()
    for micro in range(step * ACCUMULATION, (step + 1) * ACCUMULATION):
        for rank in ranks:
            first = (micro * WORLD + rank) * MICRO
            rows = samples[first : first + MICRO]
            yield {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def plain() -> Losses:
    """Losses of plain torch in one process on the CPU."""
    model, losses = _model(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIONS.learning_rate, weight_decay=0.0)
    for step in range(STEPS):
        micro_losses = [model(**batch).loss for batch in _batches(step, range(WORLD))]
        loss = torch.stack(micro_losses).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return {"losses": losses}


class Recomputing(TrainingArguments):  # type: ignore[misc]
    """Arguments that recompute unless they are told not to, as TRL's do."""

    def __init__(self, **given: Any) -> None:
        super().__init__(**{"gradient_checkpointing": True, **given})


def trainer(plan: Plan, folder: Path) -> Losses:
    """Losses of HF Trainer, and of the one that goes on from its save."""

    def make(**more: Any) -> Any:
        arguments = Recomputing(
            **training_arguments(plan, OPTIONS), output_dir=str(folder), max_steps=STEPS, logging_steps=1,
            report_to="none", lr_scheduler_type="constant", disable_tqdm=True, save_steps=SAVED_AFTER,
            train_sampling_strategy="sequential", logging_first_step=True, **more,
        )  # fmt: skip
        assert arguments.device.type == "cuda"
        return Trainer(model=_model(), args=arguments, train_dataset=_samples())

    def losses(trained: Any) -> list[float]:
        return [row["loss"] for row in trained.state.log_history if "loss" in row]

    first = make()
    first.train()
    _forget()
    second = make(save_strategy="no")
    second.train(resume_from_checkpoint=str(folder / f"checkpoint-{SAVED_AFTER}"))
    return {"losses": losses(first), "resumed": losses(second)}


def accelerate(plan: Plan, folder: Path) -> Losses:
    """Losses of an accelerate loop under what `accelerate launch` sets, and of the one that loads its state."""

    def train(*, resumes: bool) -> list[float]:
        accelerator = Accelerator(gradient_accumulation_steps=ACCUMULATION)
        assert accelerator.device.type == "cuda"
        model = _model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=OPTIONS.learning_rate, weight_decay=0.0)
        loader = torch.utils.data.DataLoader(cast("Any", _samples()), batch_size=MICRO)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        losses: list[float] = []
        if resumes:
            accelerator.load_state(str(folder / "state"))
            loader = accelerator.skip_first_batches(loader, SAVED_AFTER * ACCUMULATION)
        micro_losses: list[torch.Tensor] = []
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                micro_losses.append(accelerator.gather(loss.detach().reshape(1)).mean())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                losses.append(torch.stack(micro_losses).mean().item())
                micro_losses.clear()
                if len(losses) == SAVED_AFTER and not resumes:
                    accelerator.save_state(str(folder / "state"))
        return losses

    os.environ.update(launch_environment(plan, folder / f"launch-{RANK}"))
    losses = train(resumes=False)
    _forget()
    return {"losses": losses, "resumed": losses[:SAVED_AFTER] + train(resumes=True)}


def deepspeed(plan: Plan, folder: Path) -> Losses:
    """Losses of a DeepSpeed script, and of the one that loads its checkpoint."""
    import deepspeed as library

    def train(*, resumes: bool) -> list[float]:
        model = _model()
        config = deepspeed_config(plan, OPTIONS)
        engine, *_ = library.initialize(model=model, model_parameters=model.parameters(), config=config)
        assert engine.device.type == "cuda"
        losses = []
        if resumes:
            engine.load_checkpoint(str(folder))
        for step in range(SAVED_AFTER if resumes else 0, STEPS):
            micro_losses = []
            for batch in _batches(step, range(RANK, RANK + 1)):
                loss = engine(**{name: tensor.to(engine.device) for name, tensor in batch.items()}).loss
                engine.backward(loss)
                engine.step()
                micro_losses.append(loss.detach().float())
            mean = torch.stack(micro_losses).mean()
            dist.all_reduce(mean)
            losses.append(mean.item() / WORLD)
            if step + 1 == SAVED_AFTER and not resumes:
                engine.save_checkpoint(str(folder))
        engine.destroy()
        return losses

    losses = train(resumes=False)
    return {"losses": losses, "resumed": losses[:SAVED_AFTER] + train(resumes=True)}


FRAMEWORKS: Mapping[str, Callable[[Plan, Path], Losses]] = {
    "trainer": trainer,
    "accelerate": accelerate,
    "deepspeed": deepspeed,
}


def _forget() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@contextmanager
def _own_environment() -> Iterator[None]:
    before = dict(os.environ)
    _forget()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def main(answer: Path, cases: Mapping[str, tuple[str, str, dict[str, Any]]]) -> None:
    """Train every case, and write what rank 0 saw."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    make = partial(make_plan, gpus=WORLD, model=TINY, micro_batch_size=MICRO, gradient_accumulation_steps=ACCUMULATION)
    results = {"plain": plain()}
    shared = answer.parent / "saves"
    for name, (framework, strategy, changes) in cases.items():
        with _own_environment():
            plan = make(strategy, **{"precision": "fp32", **changes})
            results[name] = FRAMEWORKS[framework](plan, shared / name.replace(" ", "-"))
    if RANK == 0:
        answer.write_text(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # threads of gloo can abort a process that tears Python down; the answer is written
