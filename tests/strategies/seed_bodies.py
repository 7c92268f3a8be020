"""Functions that ranks run in `engine/test_seed_calls.py`: calls as people know them from other libraries."""

from __future__ import annotations

import contextlib
import io
import json
import os
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import dsplan
from hardware_db.errors import DsplanError
from strategies.engine.base import Engine
from tests.strategies.training_bodies import LENGTH, VOCABULARY, TinyModel, batch_of

STEPS = 2


def model() -> TinyModel:
    torch.manual_seed(3)
    return TinyModel()


def dataset(samples: int = 24) -> TensorDataset:
    ids = torch.randint(0, VOCABULARY, (samples, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    return TensorDataset(ids[:, :-1], ids[:, 1:])


def own_batch(step: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's micro-batch of a step."""
    rank = dist.get_rank()
    ids, targets = batch_of(step, 2 * size)
    return ids[rank::2], targets[rank::2]


def trained(config: Any, **options: Any) -> Engine:
    """An engine of a config, after some micro-batches."""
    engine, *_ = dsplan.initialize(model(), config=config, **options)
    losses = [train_one(engine, step) for step in range(STEPS * engine.configuration.gradient_accumulation_steps)]
    assert all(loss == loss for loss in losses)
    assert engine.global_steps == STEPS
    return cast("Engine", engine)


def train_one(engine: Engine, step: int) -> float:
    loss = engine(*own_batch(step, engine.configuration.micro_batch_size))
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def by_config(config: Mapping[str, Any], backend: str | None) -> tuple[str, str, str]:
    """Strategy, backend and offload that a config trains under."""
    engine = trained(dict(config), backend=backend)
    return engine.configuration.strategy, engine.configuration.backend, engine.configuration.offload


def refusal(config: Mapping[str, Any], options: Mapping[str, Any]) -> str:
    """The one line that a config or an option ends with."""
    with pytest.raises(DsplanError) as caught:
        dsplan.initialize(model(), config=dict(config), **options)
    return str(caught.value)


def messages_before_the_engine(folder: str) -> None:
    dsplan.init_distributed()
    device, usual, other = ("cuda", "nccl", "gloo") if torch.cuda.is_available() else ("cpu", "gloo", "nccl")
    with pytest.raises(DsplanError, match=f"dist_backend is '{other}' and ranks on {device} use {usual}"):
        dsplan.init_distributed(other)
    tensor = torch.zeros(1)
    if dist.get_rank() == 0:
        tensor += 1
        request = dist.isend(tensor, dst=1)
    else:
        request = dist.irecv(tensor, src=0)
    assert request is not None
    request.wait()
    assert tensor.item() == 1


def command_line_names_the_config(folder: str) -> None:
    path = Path(folder, f"ds_config{dist.get_rank()}.json")
    path.write_text(json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 2}}))
    for arguments in (Namespace(deepspeed_config=str(path), local_rank=0), Namespace(dsplan_config=path)):
        net = model()
        engine, optimizer, _, _ = dsplan.initialize(args=arguments, model=net, model_parameters=net.parameters())
        train_one(engine, 0)
        assert engine.configuration.strategy == "zero2"
        assert optimizer is engine.optimizer
        assert engine.configuration.global_batch_size == 8
    with pytest.raises(DsplanError, match=r"args\.deepspeed_config is .* and config= is given too"):
        dsplan.initialize(model(), args=Namespace(deepspeed_config=str(path)), config={})
    with pytest.raises(DsplanError, match="model is a Namespace"):
        dsplan.initialize(Namespace())  # type: ignore[arg-type]


def config_by_position(folder: str) -> None:
    config = {"train_batch_size": 8, "zero_optimization": {"stage": 1}}
    engine, *_ = dsplan.initialize(model(), config, backend="native")
    assert engine.configuration.strategy == "zero1"
    before = DistributedDataParallel(model())
    ids, targets = own_batch(0, 4)
    assert train_one(engine, 0) == pytest.approx(before(ids, targets).item(), rel=1e-5)


def loop_with_checkpoints(folder: str) -> None:
    config = {"train_batch_size": 8, "zero_optimization": {"stage": 2}}
    engine = trained(config, backend="native")
    path, client = engine.load_checkpoint(Path(folder, "none"))
    assert (path, client) == (None, {})
    saved = Path(folder, "model_pretrain")
    if int(os.environ.get("RANK", "0")) == 0:
        saved.mkdir(exist_ok=True)
    dist.barrier()
    engine.save_checkpoint(saved, client_state={"step": 7})
    expected = train_one(engine, 5)
    again = trained(config, backend="native")
    path, client = again.load_checkpoint(saved)
    assert (client["step"] + 1, again.global_steps) == (8, STEPS)
    assert train_one(again, 5) == pytest.approx(expected, rel=1e-6)


def quick_start(folder: str) -> None:
    config = {
        "batch_size": 2,
        "learning_rate": 1e-2,
        "zero_stage": 2,
        "fp16": True,
        "gradient_accumulation_steps": 1,
        "save_dir": f"{folder}/checkpoints",
        "save_interval": 6,
    }
    training = dsplan.setup_distributed_training(model(), config, training_data=dataset(), backend="native")
    losses = training.train(epochs=3)
    assert len(losses) == 3
    assert losses[-1] < losses[0]
    assert training.engine.global_steps == 3 * 6
    assert training.has_checkpoint()
    assert training.train(epochs=3) == [], "epochs count from the first run on"


def advanced(folder: str) -> None:
    config = {
        "batch_size": 2,
        "learning_rate": 1e-4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "zero_stage": 3,
        "offload_optimizer": True,
        "offload_param": True,
        "fp16": True,
        "loss_scale": None,
        "activation_checkpointing": True,
        "save_dir": f"{folder}/checkpoints",
        "save_interval": 500,
        "keep_checkpoints": 5,
        "log_interval": 10,
        "steps_per_print": 10,
        "wall_clock_breakdown": False,
        "profiling": False,
    }
    engine = trained(config, backend="native")
    configuration = engine.configuration
    assert (configuration.strategy, configuration.offload, configuration.precision) == ("zero3", "all", "fp16")
    assert configuration.activation_checkpointing == "full"
    assert engine.checkpointing.keep_last == 5


def own_loader(folder: str) -> None:
    loader = dsplan.DistributedDataLoader(
        dataset=dataset(), batch_size=3, num_workers=0, pin_memory=True, drop_last=True
    )
    sampler = loader.get_sampler()
    assert (sampler.num_replicas, sampler.rank, len(loader)) == (2, dist.get_rank(), 4)
    passes = [torch.cat([ids for ids, _ in loader]) for _ in range(2)]
    assert not torch.equal(*passes), "every pass is an epoch of its own"
    sampler.set_epoch(0)
    both = [torch.empty_like(passes[0]) for _ in range(2)]
    dist.all_gather(both, passes[0])
    rows = {tuple(row) for part in both for row in part.tolist()}
    assert rows == {tuple(row.tolist()) for row in dataset().tensors[0]}, "the ranks share the samples"
    engine, _, own, _ = dsplan.initialize(
        model(), config={"train_batch_size": 8}, training_data=dataset(), strategy="ddp"
    )
    assert own is not None
    first = next(iter(own))
    numbers = next(iter(own.get_sampler()))
    assert torch.equal(first[0], torch.stack([dataset()[number][0] for number in numbers]))
    assert engine.dataloader is own


def manager_made_before_the_engine(folder: str) -> None:
    manager = dsplan.CheckpointManager(save_dir=folder, save_interval=1, keep_interval=1, async_save=True)
    with pytest.raises(DsplanError, match="has no engine yet"):
        manager.step()
    engine = trained({"train_batch_size": 8}, strategy="ddp")
    manager.save(engine, 11, engine.optimizer, engine.lr_scheduler)
    manager.close()
    train_one(engine, 2)
    path = manager.step()
    manager.close()
    assert path is not None
    assert [item.name for item in Path(folder).glob("step-*")] == [path.name], "one is kept"
    expected = train_one(engine, 3)
    loaded, _ = manager.load(path, engine, engine.optimizer, engine.lr_scheduler)
    assert (loaded, engine.global_steps) == (path, STEPS + 1)
    assert train_one(engine, 3) == pytest.approx(expected, rel=1e-6)
    with pytest.raises(DsplanError, match="this optimizer is not the engine's"):
        manager.save(engine, 4, torch.optim.SGD(model().parameters()))
    with pytest.raises(TypeError, match="'save_folder'"):
        dsplan.CheckpointManager(save_folder=folder)
    with pytest.raises(DsplanError, match="save_dir and directory say the same"):
        dsplan.CheckpointManager(None, folder, save_dir=folder)


def saved_its_own_way(folder: str) -> None:
    def save(engine: Engine, step: int, path: Path) -> None:
        torch.save({"engine": engine.state_dict(), "step": step, "custom_data": [1, 2]}, path)

    engine = trained({"train_batch_size": 8, "zero_optimization": {"stage": 3}}, backend="native")
    manager = dsplan.CheckpointManager(save_dir=folder, save_function=save)
    path = manager.save(engine, 2)
    read = torch.load(path / f"rank{dist.get_rank()}.pt")
    assert (read["step"], read["custom_data"]) == (STEPS, [1, 2])
    plain = model()
    plain.load_state_dict(read["engine"])
    ids, targets = own_batch(6, 4)
    assert engine(ids, targets).item() == pytest.approx(plain(ids, targets).item(), rel=1e-5)


def weights_copied(config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    engine = trained(dict(config), **options)
    plain = model()
    assert plain.load_state_dict(engine.state_dict())
    ids, targets = own_batch(6, engine.configuration.micro_batch_size)
    assert engine(ids, targets).item() == pytest.approx(plain(ids, targets).item(), rel=1e-5)


class Fragile(nn.Module):
    """Fails once, in a forward pass."""

    def __init__(self, fails_at: int) -> None:
        super().__init__()
        self.net, self.calls, self.fails_at = model(), 0, fails_at

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        if self.calls == self.fails_at:
            raise RuntimeError("the network went away")
        return {"loss": self.net(ids, targets)}


def trainer_on_ranks(folder: str) -> None:
    engine = trained({"train_batch_size": 8}, strategy="ddp", training_data=dataset())
    monitor = dsplan.TrainingMonitor(log_dir=f"{folder}/logs", quiet=True, sample_seconds=60)
    trainer = dsplan.DistributedTrainer(
        engine=engine, optimizer=engine.optimizer, monitor=monitor, config={"save_dir": f"{folder}/checkpoints"}
    )
    errors = io.StringIO()
    with contextlib.redirect_stderr(errors):
        trainer.enable_fault_tolerance(auto_resume=True, max_retry_attempts=3, checkpoint_interval=2)
    assert ("start the script with `dsplan run --retries 3`" in errors.getvalue()) == engine.is_main
    assert not trainer.has_checkpoint()
    with pytest.raises(DsplanError, match="reset: the state before the first step was not kept"):
        trainer.reset()
    trainer.train(2)
    monitor.close()
    assert trainer.has_checkpoint()
    assert trainer.restore_from_checkpoint().name.startswith("step-")


def memory_of_training(folder: str) -> None:
    engine = trained({"train_batch_size": 8, "zero_optimization": {"stage": 1}}, backend="native")
    profiler = dsplan.MemoryProfiler()
    assert profiler.get_memory_report().peak_bytes is None
    profiler.profile_training(steps=1)
    train_one(engine, 0)
    report = profiler.get_memory_report()
    assert report.peak_bytes is not None
    assert report.peak_bytes > report.live_bytes > 0, "activations and gradients are gone after the step"
    engine.counted_peak_bytes = None
    train_one(engine, 1)
    assert engine.counted_peak_bytes is None, "it looks at as many steps as it was asked to"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        again = engine.memory_profile()
    assert again.rank == dist.get_rank()
    assert printed.getvalue().startswith("memory of rank 0") == engine.is_main


def chosen_modules_recompute(folder: str) -> None:
    from tests.strategies.training_bodies import Block

    net = model()
    assert dsplan.checkpointing.checkpoint(net, lambda module: isinstance(module, Block)) is net  # type: ignore[attr-defined]
    engine, *_ = dsplan.initialize(net, config={"train_batch_size": 8}, strategy="ddp")
    before = trained({"train_batch_size": 8}, strategy="ddp")
    ids, targets = own_batch(0, 4)
    saved: list[int] = []
    for one in (engine, before):
        kept: list[torch.Tensor] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, kept=kept: kept.append(tensor) or tensor, lambda x: x
        ):  # type: ignore[misc]
            one(ids, targets)
        saved.append(len(kept))
    assert saved[0] < saved[1], "blocks keep their inputs alone"


class Descent(dsplan.ZeroOptimizer):
    """A script's own optimizer, written as people write them."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params)
        self.lr = lr

    def step(self) -> None:  # type: ignore[override]
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter -= self.lr * parameter.grad


def own_optimizer(folder: str) -> None:
    dsplan.register_optimizer("custom", Descent)
    optimizer = {"type": "custom", "params": {"lr": 0.1}}
    losses = {}
    for stage, backend in ((0, None), (3, "native")):
        config = {"train_batch_size": 8, "optimizer": optimizer, "zero_optimization": {"stage": stage}}
        engine, *_ = dsplan.initialize(model(), config=config, backend=backend)
        losses[stage] = [train_one(engine, 0) for _ in range(3)]
        assert engine.get_lr() == [0.1]
    assert losses[3] == pytest.approx(losses[0], rel=1e-5)
    assert losses[0][-1] < losses[0][0]


def sections_and_scalars(folder: str) -> None:
    written: list[tuple[str, float, int]] = []

    class Writer:
        def add_scalar(self, tag: str, value: float, step: int) -> None:
            written.append((tag, value, step))

        def flush(self) -> None: ...

    config = {
        "train_batch_size": 8,
        "profiling": {
            "enabled": True,
            "profile_step": 2,
            "module_depth": -1,
            "top_modules": 1,
            "output_path": f"{folder}/traces",
        },
    }
    with dsplan.profiling.profile("before"):  # type: ignore[attr-defined]
        engine, *_ = dsplan.initialize(model(), config=config, strategy="ddp")
    engine.set_tensorboard_writer(Writer(), every=2)
    for step in range(4):
        with dsplan.profiling.profile("custom_section"):  # type: ignore[attr-defined]
            batch = own_batch(step, 4)
        engine.backward(engine(*batch))
        engine.step()
    engine.close()
    trace = json.loads(Path(folder, "traces", f"trace-rank{dist.get_rank()}.json").read_text())
    assert "custom_section" in {event.get("name") for event in trace["traceEvents"]}
    tags = {tag for tag, _, _ in written}
    wanted = {"train/loss", "train/learning_rate", "memory/host_bytes", "seconds/communication_seconds"}
    assert (wanted | {"seconds/custom_section_seconds"} <= tags) == engine.is_main
    if engine.is_main:
        assert [step for tag, _, step in written if tag == "train/loss"] == [1, 2, 3, 4]
    else:
        assert not written
    with pytest.raises(DsplanError, match="str has no add_scalar"):
        engine.set_tensorboard_writer("runs")


def models_of_transformers(folder: str) -> None:
    from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    gpt = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=64, n_positions=16))
    ids = torch.randint(0, 64, (2, 8))
    engine, _, _, scheduler = dsplan.initialize(
        model=gpt,
        config={
            "train_batch_size": 8,
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 2,
            "zero_optimization": {"stage": 2},
            "fp16": {"enabled": True},
        },
        backend="native",
    )
    for _ in range(2):
        outputs = engine(input_ids=ids, labels=ids)
        engine.backward(outputs.loss)
        engine.step()
    assert (engine.global_steps, scheduler) == (1, None)
    bert = BertForSequenceClassification(
        BertConfig(num_hidden_layers=2, hidden_size=16, num_attention_heads=2, intermediate_size=32, vocab_size=64)
    )
    engine, *_ = dsplan.initialize(
        model=bert,
        config={
            "train_batch_size": 4,
            "train_micro_batch_size_per_gpu": 2,
            "optimizer": {"type": "AdamW", "params": {"lr": 2e-5}},
            "zero_optimization": {"stage": 1},
        },
        backend="native",
    )
    outputs = engine(input_ids=ids, labels=torch.tensor([0, 1]))
    engine.backward(outputs.loss)
    engine.step()
    assert engine.get_lr() == [2e-5]


def buckets(folder: str) -> None:
    section = {"overlap_comm": True, "bucket_cap_mb": 0.001, "overlap_reduce_scatter": True}
    engine = trained({"train_batch_size": 8, "communication": section}, strategy="ddp")
    # DDP makes a bucket for as many gradients as fit, and one more for what is there before the first step is over.
    assert cast("DistributedDataParallel", engine.wrapped).bucket_bytes_cap == int(0.001 * 2**20)


BODIES = (
    messages_before_the_engine,
    config_by_position,
    loop_with_checkpoints,
    quick_start,
    advanced,
    own_loader,
    manager_made_before_the_engine,
    saved_its_own_way,
    trainer_on_ranks,
    memory_of_training,
    chosen_modules_recompute,
    own_optimizer,
    sections_and_scalars,
    models_of_transformers,
    buckets,
)
