"""A whole step in one call, under every strategy: `train_batch` and `eval_batch`, and the passes of a stage."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd.graph import GradientEdge

from strategies.errors import CannotRun
from strategies.parallel.model import Arguments
from strategies.parallel.pipeline import Pipeline
from strategies.run_directory.heartbeat import beat
from strategies.torch_compat.tensors import tree_leaves, tree_map_only, tree_to

if TYPE_CHECKING:
    from strategies.engine.base import AccumulatingEngine, Engine

Loss = Callable[[Any, Any], torch.Tensor]


def train_batch(engine: Engine, batch: Any, loss: Loss | None = None) -> torch.Tensor:
    """Do `Engine.train_batch`; `loss(engine, micro_batch)` gives the loss instead of the model."""
    steps = engine.configuration.gradient_accumulation_steps
    micro_batches = _micro_batches(engine, batch, steps)
    if engine.mesh.size("pp") > 1:
        return _train_stages(engine, micro_batches, loss)
    losses = []
    for micro_batch in micro_batches:
        value = call_for_loss(engine, micro_batch) if loss is None else loss(engine, micro_batch)
        losses.append(value.detach())
        engine.backward(value)
        engine.step()
    return _mean_over_ranks(engine, losses)


def eval_batch(engine: Engine, batch: Any, loss: Loss | None = None) -> torch.Tensor:
    """Do `Engine.eval_batch`, with a loss as in `train_batch`."""
    micro_batches = _micro_batches(engine, batch, None)
    with _evaluating(engine), torch.no_grad():
        if engine.mesh.size("pp") > 1:
            with engine.meeting("eval_batch"):
                losses = _pipeline_of(engine, loss).run(_arguments(micro_batches), _Passes(engine), trains=False)
        else:
            losses = [
                (call_for_loss(engine, member) if loss is None else loss(engine, member)).detach()
                for member in micro_batches
            ]
        return _mean_over_ranks(engine, losses, weights=[_count_rows(member) for member in micro_batches])


def call_for_loss(engine: Engine, batch: Any) -> torch.Tensor:
    """Return the loss that the model itself computes of a micro-batch.

    Raises:
        CannotRun: it returns none.
    """
    positional, named = arguments_of(batch)
    return extract_loss(engine(*positional, **named), engine)


def extract_loss(output: Any, engine: Engine) -> torch.Tensor:
    """Return the loss in what a model returned: itself, or something with it.

    Raises:
        CannotRun: there is none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"a tensor {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(output).__name__
        raise CannotRun(
            f"train: {type(engine.module).__name__} returns {what} and no loss; have it return the loss, or give"
            " loss=lambda engine, batch: ..."
        )
    return loss


def arguments_of(batch: Any) -> Arguments:
    """Return the arguments that a batch is to the model: a dictionary by name, a tuple or list by position."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, (tuple, list)) else ((batch,), {})


def _micro_batches(engine: Engine, batch: Any, number: int | None) -> list[Any]:
    """Return a step's micro-batches, or those of any batch, on the engine's device.

    Raises:
        CannotRun: the batch is not what the plan's step has.
    """
    if isinstance(batch, Iterator):
        members = list(itertools.islice(batch, number or 1))
        if not members:
            raise StopIteration
        if len(members) < (number or 1):
            raise CannotRun(
                f"train_batch: the iterator ended after {len(members)} micro-batches, and a step of the plan has"
                f" {number}; drop what is left over, or repeat the data"
            )
    else:
        members = _cut_rows(engine, batch, number)
    return [tree_to(engine.device, member) for member in members]


def _cut_rows(engine: Engine, batch: Any, number: int | None) -> list[Any]:
    size, rows = engine.micro_batch_size, _count_rows(batch)
    if number is not None and rows != number * size:
        raise CannotRun(
            f"train_batch: the batch has {rows} samples, and this rank's share of a step is {number} micro-batches of"
            f" {size}; give it {number * size} (engine.micro_batch_size of each), or an iterator of micro-batches"
        )

    def part(first: int) -> Any:
        return tree_map_only(
            torch.Tensor,
            lambda tensor: tensor[first : first + size] if tensor.dim() and tensor.shape[0] == rows else tensor,
            batch,
        )

    return [part(first) for first in range(0, rows, size)]


def _count_rows(batch: Any) -> int:
    """Count the samples of a batch.

    Raises:
        CannotRun: it has no tensor with a row for each.
    """
    rows = next((leaf.shape[0] for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor) and leaf.dim()), None)
    if rows is None:
        raise CannotRun(
            f"train_batch: the batch is a {type(batch).__name__} without a tensor; give a mapping of tensors, or an"
            " iterator of micro-batches (iter(dataloader))"
        )
    return int(rows)


def _arguments(micro_batches: list[Any]) -> list[Arguments]:
    return [arguments_of(member) for member in micro_batches]


def _mean_over_ranks(
    engine: Engine, losses: list[torch.Tensor], weights: Sequence[float] | None = None
) -> torch.Tensor:
    """Return the mean of all ranks' losses, those of a pipeline from its last stage; the same on every rank.

    Without `weights` each counts by the samples of its rank's micro-batches.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=engine.device)
    if losses:
        each = torch.stack([loss.detach().double().reshape(()) for loss in losses])
        counts: Sequence[float] = weights or [engine.sample_weight] * len(losses)
        shares = torch.tensor(counts, dtype=torch.float64, device=engine.device)
        sums = torch.stack((torch.dot(each, shares), shares.sum()))
    if dist.is_initialized() and engine.environment.world_size > 1:
        dist.all_reduce(sums)
    return (sums[0] / sums[1]).float()


@contextmanager
def _evaluating(engine: Engine) -> Iterator[None]:
    was_training = engine.wrapped.training
    engine.eval()
    try:
        yield
    finally:
        engine.train(was_training)


def _pipeline_of(engine: Engine, loss: Loss | None) -> Pipeline:
    if loss is not None:
        raise CannotRun("a loss= function needs the whole model, which a pipeline cuts; have the model return the loss")
    if "_pipeline" not in vars(engine):
        vars(engine)["_pipeline"] = Pipeline(engine.module, engine.mesh, engine.configuration)
    pipeline: Pipeline = vars(engine)["_pipeline"]
    return pipeline


def _train_stages(engine: Any, micro_batches: list[Any], loss: Loss | None) -> torch.Tensor:
    pipeline = _pipeline_of(engine, loss)
    arguments = _arguments(micro_batches)
    for given in arguments:
        engine.telemetry.forward_starts(engine.module, given)
    # One meeting of all ranks: within it every stage has passes in an order of its own.
    with engine.meeting("train_batch"):
        losses = pipeline.run(arguments, _Passes(engine), trains=True)
        engine.complete_gradients()
    mean = _mean_over_ranks(engine, losses)
    engine.telemetry.loss_is(mean)
    engine.count_passes(len(micro_batches) - 1)
    engine.step()
    return mean


class _Passes:
    """The passes of a stage, as its strategy runs a forward and a backward pass."""

    def __init__(self, engine: AccumulatingEngine | Any) -> None:
        self._engine = engine

    def forward(self, arguments: Arguments, *, is_last: bool) -> torch.Tensor:
        """Run a micro-batch through the stage; the last stage gives its loss."""
        beat()
        with self._engine.profile("forward"):
            output: torch.Tensor = self._engine.forward_stage(*arguments[0], **arguments[1])
        return extract_loss(output, self._engine) if is_last else output

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """Return a loss as its backward pass begins with it."""
        scaled: torch.Tensor = self._engine.scale_loss(loss)
        return scaled

    def backward(
        self, output: torch.Tensor | GradientEdge, gradient: torch.Tensor | None, *, ends_stage: bool, ends_step: bool
    ) -> None:
        """Add the gradients of a pass, its last one of the stage or of the step."""
        with self._engine.profile("backward"):
            self._engine.backward_stage(output, gradient, ends_stage=ends_stage, ends_step=ends_step)

    def backward_weights(self, run: Callable[[], None], *, ends_step: bool) -> None:
        """Add the gradients of weights alone, which `run` computes."""
        with self._engine.profile("backward"):
            self._engine.backward_weights(run, ends_step=ends_step)
