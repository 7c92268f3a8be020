"""Functions that ranks run in the tests of Lightning: one module under Lightning's own strategies and ours."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dsplan.integrations import FabricStrategy, LightningStrategy
from hardware_db.errors import DsplanError
from strategies.integrations.lightning_shared import whole_state
from tests.strategies.training_bodies import LENGTH, VOCABULARY, TinyModel

SAMPLES, PER_RANK = 48, 2
for name in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning"):
    logging.getLogger(name).setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class Tiny(pl.LightningModule):
    """A small language model whose steps call it as scripts do; a parameter of its own lies beside the model."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(0)
        self.model = TinyModel()
        self.gain = nn.Parameter(torch.ones(1))
        self.dropout = nn.Dropout(options.get("dropout", 0.0))
        self.options = options
        self.automatic_optimization = not options.get("manual", 0)
        self.losses: list[float] = []
        self.seen: dict[str, Any] = {}

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.model(ids, targets).float().reshape(1) * self.gain).sum()

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self(*batch)
        self.log("train_loss", loss, sync_dist=True)
        if self.options.get("toggles"):
            with self.optimizers().toggle_model(sync_grad=(index + 1) % self.options["manual"] == 0):
                self._by_hand(loss, index)
        elif not self.automatic_optimization:
            self._by_hand(loss, index)
        self.losses.append(loss.item())
        return loss

    def _by_hand(self, loss: torch.Tensor, index: int) -> None:
        every = self.options["manual"]
        self.manual_backward(loss / every)
        if (index + 1) % every == 0:
            optimizer = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val_loss", self(*batch), sync_dist=True)

    def test_step(self, batch: Any, index: int) -> None:
        self.log("test_loss", self(*batch), sync_dist=True)

    def predict_step(self, batch: Any, index: int) -> torch.Tensor:
        return self(*batch)

    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        chosen = self.options.get("clips", gradient_clip_val)
        self.clip_gradients(optimizer, chosen, gradient_clip_algorithm)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if self.options.get("optimizers") == 2:
            return [optimizer, torch.optim.SGD([self.gain], lr=0.1)]
        if self.options.get("optimizers") == "lbfgs":
            return torch.optim.LBFGS(self.parameters())
        interval = self.options.get("interval")
        if interval is None:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": interval}}


def loader(*, batch_size: int = PER_RANK, shuffle: bool = False, samples: int = SAMPLES) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(VOCABULARY, (samples, LENGTH + 1), generator=generator)
    return DataLoader(TensorDataset(ids[:, :-1], ids[:, 1:]), batch_size=batch_size, shuffle=shuffle)


def trainer(strategy: Any, **options: Any) -> pl.Trainer:
    """A quiet Trainer on this pool's ranks."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    defaults = {"enable_checkpointing": False, "max_steps": 6, **quiet}
    # Lightning would look for MPI where its own strategy is used.
    plugins = [TorchElasticEnvironment()] if isinstance(strategy, str) and world_size > 1 else []
    chosen = {**defaults, **options}
    return pl.Trainer(accelerator="cpu", devices=world_size, strategy=strategy, plugins=plugins, **chosen)


def whole(strategy: Any, module: nn.Module) -> dict[str, torch.Tensor]:
    """Every weight after training."""
    return {name: value.float() for name, value in whole_state(getattr(strategy, "engine", None), module).items()}


def fit(arguments: dict[str, Any] | None, options: dict[str, Any], module: dict[str, Any]) -> dict[str, Any]:
    """Train under `LightningStrategy(**asked)`, None for Lightning's DDP; what there is to compare."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    strategy: Any = LightningStrategy(**arguments) if arguments is not None else "ddp" if world_size > 1 else "auto"
    runner, model = trainer(strategy, **options), Tiny(**module)
    runner.fit(model, loader(), loader(samples=8))
    rates = [group["lr"] for group in runner.optimizers[0].param_groups]
    metrics = {name: value.item() for name, value in runner.callback_metrics.items()}
    figures = {"losses": model.losses, "weights": whole(runner.strategy, model), "rates": rates, "metrics": metrics}
    return {**figures, "step": runner.global_step}


def saved(arguments: dict[str, Any], directory: str, steps: int, calm: bool = False) -> dict[str, Any]:
    """Train for twice `steps` with checkpoints every `steps`; what an undisturbed run leaves, and their paths."""
    keeps = ModelCheckpoint(directory, filename="{step}", every_n_train_steps=steps, save_top_k=-1)
    strategy = LightningStrategy(**arguments)
    runner = trainer(strategy, max_steps=2 * steps, callbacks=[keeps], enable_checkpointing=True)
    model = Tiny(interval="step", dropout=0.0 if calm else 0.3)
    runner.fit(model, loader(shuffle=not calm))
    plain = Path(directory, "weights.ckpt")
    runner.save_checkpoint(plain, weights_only=True)
    paths = {"whole": f"{directory}/step={steps}.ckpt", "weights": str(plain), "last": keeps.best_model_path}
    tested, weights = runner.test(model, loader(samples=8), verbose=False), whole(strategy, model)
    best = runner.validate(model, loader(samples=8), ckpt_path=paths["whole"], verbose=False)
    return {
        "losses": model.losses,
        "weights": weights,
        "paths": paths,
        "tested": tested[0]["test_loss"],
        "validated": best[0]["val_loss"],
    }


def resumed(arguments: dict[str, Any], path: str, steps: int, calm: bool = False) -> dict[str, Any]:
    """Go on from a checkpoint of whichever strategy, with the samples of two ranks in each batch of all."""
    strategy = LightningStrategy(**arguments)
    runner, model = trainer(strategy, max_steps=steps), Tiny(interval="step", dropout=0.0 if calm else 0.3)
    size = 2 * PER_RANK // int(os.environ.get("WORLD_SIZE", "1"))
    runner.fit(model, loader(batch_size=size, shuffle=not calm), ckpt_path=path)
    return {"losses": model.losses, "weights": whole(strategy, model), "step": runner.global_step}


def evaluated(path: str) -> dict[str, Any]:
    """Test, validate and predict without training, from a checkpoint; and read the weights as Lightning does."""
    model = Tiny(dropout=0.3)
    runner = trainer(LightningStrategy(strategy="fsdp"))
    tested = runner.test(model, loader(samples=8), ckpt_path=path, verbose=False)
    predicted = runner.predict(model, loader(samples=8))
    return {"tested": tested[0]["test_loss"], "predicted": len(predicted or ())}


def loaded(path: str) -> dict[str, torch.Tensor]:
    """Return what `load_from_checkpoint` makes of a file of weights."""
    return dict(Tiny.load_from_checkpoint(path).state_dict())


def refused(arguments: dict[str, Any], options: dict[str, Any], module: dict[str, Any]) -> str:
    """The line that a Trainer ends with."""
    try:
        trainer(LightningStrategy(**arguments), **options).fit(Tiny(**module), loader())
    except DsplanError as problem:
        return str(problem)
    return ""


def fabric_loop(arguments: dict[str, Any] | None, accumulation: int, path: str = "", steps: int = 6) -> dict[str, Any]:
    """The same loop under `FabricStrategy(**asked)`, None for Fabric's DDP; saved after half of the steps."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    strategy: Any = FabricStrategy(**arguments) if arguments is not None else "ddp"
    plugins = [] if arguments is not None else [TorchElasticEnvironment()]
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy, plugins=plugins)
    fabric.launch()
    torch.manual_seed(0)
    original = TinyModel()
    model, optimizer = fabric.setup(original, torch.optim.AdamW(original.parameters(), lr=1e-2))
    batches, losses, norms = fabric.setup_dataloaders(loader()), [], []
    state = {"model": model, "optimizer": optimizer, "step": 0}
    for index, batch in enumerate(batches):
        is_last = (index + 1) % accumulation == 0
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = model(*batch)
            fabric.backward(loss / accumulation)
        losses.append(fabric.all_reduce(loss.detach()).item())
        if is_last:
            norm = fabric.clip_gradients(model, optimizer, max_norm=0.3)
            norms.append(None if norm is None else norm.item())
            optimizer.step()
            optimizer.zero_grad()
            state["step"] += 1
            if path and state["step"] == steps // 2:
                fabric.save(path, state)
        if state["step"] == steps:
            break
    return {"losses": losses, "norms": norms, "weights": whole(fabric.strategy, original)}


def fabric_resumed(arguments: dict[str, Any], path: str) -> dict[str, Any]:
    """The step and the weights that another strategy finds."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy=FabricStrategy(**arguments))
    fabric.launch()
    original = TinyModel()
    model, optimizer = fabric.setup(original, torch.optim.AdamW(original.parameters(), lr=1e-2))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    rest = fabric.load(path, state)
    return {"step": state["step"], "rest": rest, "weights": whole(fabric.strategy, original)}
