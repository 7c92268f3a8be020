"""Functions that the tests of compressed communication run on ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from scripts.measure.measured_run import text_batches
from strategies.engine.initialize import initialize
from tests.strategies import training_bodies
from tests.strategies.training_bodies import Recipe

SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "bf16": {"compression": "bf16"},
    "fp16": {"compression": "fp16"},
    "int8": {"compression": "int8"},
    "int8 without feedback": {"compression": "int8", "error_feedback": False},
}
_VOCABULARY, _WIDTH, _LENGTH = 97, 48, 24


class TextModel(nn.Module):
    """A small decoder over words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(_WIDTH, 4, 4 * _WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.head = nn.Linear(_WIDTH, _VOCABULARY)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(_LENGTH - 1, dtype=self.head.weight.dtype)
        hidden = self.embedding(words[:, :-1])
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        return functional.cross_entropy(self.head(hidden).flatten(0, 1).float(), words[:, 1:].flatten())


@dataclass(frozen=True, kw_only=True, slots=True)
class TextRun:
    """A run over Python's standard library."""

    recipe: Recipe
    compression: str
    steps: int = 40


def learn_text(run: TextRun) -> list[float]:
    """The loss of every step, the mean over ranks."""
    torch.manual_seed(11)
    engine, *_ = initialize(
        model=TextModel(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        plan=run.recipe.plan(),
        config={"communication": SETTINGS[run.compression]},
    )
    rank = engine.environment.rank
    samples = engine.configuration.micro_batch_size
    batches = text_batches(_VOCABULARY, samples, _LENGTH, seed=rank, device=engine.device)
    losses = []
    for _ in range(run.steps):
        loss = engine(next(batches)["input_ids"])
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / engine.environment.world_size)
    return losses


@contextmanager
def _counted() -> Iterator[Counter[str]]:
    """Bytes that this rank sends, by the kind of call: messages and all-reduces (whose input it is)."""
    sent: Counter[str] = Counter()
    originals = {name: getattr(dist, name) for name in ("isend", "all_reduce")}

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            sent[name] += tensor.numel() * tensor.element_size()
            return call(tensor, *args, **kwargs)

        return counted

    for name, call in originals.items():
        setattr(dist, name, counting(name, call))
    try:
        yield sent
    finally:
        for name, call in originals.items():
            setattr(dist, name, call)


class WideModel(nn.Module):
    """A few matrices of whole blocks; no stack of blocks, so that stage 3 gathers nothing in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.float().square().mean()


def sent_by_a_backward_pass(recipe: Recipe, compression: str) -> tuple[int, int]:
    """Bytes that this rank sends to sum gradients in a backward pass, and how many elements are trained."""
    torch.manual_seed(0)
    engine, *_ = initialize(model=WideModel(), plan=recipe.plan(), config={"communication": SETTINGS[compression]})
    x = torch.randn(4, 256)
    for _ in range(2):  # DDP orders its buckets in the first step
        engine.backward(engine(x))
        engine.step()
    loss = engine(x)
    with _counted() as sent:
        engine.backward(loss)
    engine.step()
    return sum(sent.values()), sum(parameter.numel() for parameter in WideModel().parameters())


def train_compressed(recipe: Recipe, compression: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and parameters of a run of the tiny model."""
    torch.manual_seed(3)
    engine, *_ = initialize(
        model=training_bodies.TinyModel(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
        plan=recipe.plan(),
        config={"communication": SETTINGS[compression], "gradient_clipping": recipe.clipping},
    )
    losses = [training_bodies.one_step(engine, step) for step in range(recipe.steps)]
    return losses, training_bodies.whole_parameters(engine)


def poison_compressed(recipe: Recipe) -> tuple[bool, int, list[float]]:
    """A loss that is not a number on rank 1 alone, in 8 bits: whether weights stayed, steps skipped, later losses."""
    torch.manual_seed(3)
    engine, *_ = initialize(
        model=training_bodies.TinyModel(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
        plan=recipe.plan(),
        config={"communication": SETTINGS["int8"], "fp16": {"enabled": recipe.precision == "fp16", "hysteresis": 1}},
    )
    before = training_bodies.whole_parameters(engine)
    loss = engine(*(tensor[:2] for tensor in training_bodies.batch_of(0)))
    engine.backward(loss * (torch.nan if engine.environment.rank == 1 else 1.0))
    engine.step()
    after = training_bodies.whole_parameters(engine)
    stayed = all(torch.equal(before[name], after[name]) for name in before)
    return stayed, engine.skipped_steps, [training_bodies.one_step(engine, step) for step in range(6)]
