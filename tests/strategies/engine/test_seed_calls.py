"""Calls that people know from DeepSpeed, FairScale and other libraries, as docs/reference/calls.md lists them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import dsplan
from dsplan.diagnostics.bench.rank_pool import RankPool
from hardware_db.errors import DsplanError
from tests.strategies import seed_bodies
from tests.strategies.seed_bodies import Fragile, dataset

ADAM = {"type": "Adam", "params": {"lr": 1e-4}}
FILE: dict[str, Any] = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": 1e-4, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.01},
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-4, "warmup_num_steps": 1000},
    },
    "zero_optimization": {
        "stage": 2,
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "contiguous_gradients": True,
        "cpu_offload": False,
    },
    "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
    "activation_checkpointing": {
        "partition_activations": False,
        "cpu_checkpointing": False,
        "contiguous_memory_optimization": False,
        "number_checkpoints": None,
        "synchronize_checkpoint_boundary": False,
        "profile": False,
    },
    "wall_clock_breakdown": False,
}
NOTES: dict[str, Any] = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "Adam", "params": {"lr": 0.00015, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
    "fp16": {"enabled": True, "auto_cast": True},
    "gradient_clipping": 0,
    "zero_optimization": True,
}
STAGE_3: dict[str, Any] = {
    "stage": 3,
    "reduce_bucket_size": 5e8,
    "contiguous_gradients": True,
    "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9,
    "stage3_prefetch_bucket_size": 1e7,
    "stage3_param_persistence_threshold": 1e5,
    "sub_group_size": 1e9,
}
PERSISTENT = {"stage": 3, "param_persistence_threshold": 1e6, "model_persistence_threshold": 1e6}
OFFLOADED = {"stage": 3, "cpu_offload": True, "cpu_offload_params": True, "cpu_offload_use_pin_memory": True}
ON_HOST = {"device": "cpu", "pin_memory": True}
COMPRESSED = {
    "enabled": True,
    "compression_type": "fp16",
    "quantization_type": "asymmetric_quantization_signed",
    "quantization_bits": 8,
    "error_feedback": True,
    "all_gather_fp16": True,
}


def of(**config: Any) -> dict[str, Any]:
    return {"train_batch_size": 8, **config}


@pytest.mark.parametrize("body", seed_bodies.BODIES, ids=lambda body: body.__name__)
@pytest.mark.sweep(every=8)
def test_calls(body: Callable[[str], None], ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(body, str(tmp_path))


@pytest.mark.parametrize(
    ("config", "strategy"),
    [
        (NOTES, "zero1"),
        (FILE, "zero2"),
        (
            of(gradient_accumulation_steps=2, optimizer=ADAM, zero_optimization={"stage": 2, "cpu_offload": False}),
            "zero2",
        ),
        (of(zero_optimization={"stage": 1, "reduce_bucket_size": 5e8}), "zero1"),
        (of(zero_optimization={"stage": 2, "allgather_partitions": True, "reduce_scatter": True}), "zero2"),
        (of(zero_optimization=STAGE_3), "zero3"),
        (of(zero_optimization=PERSISTENT), "zero3"),
        (of(zero_stage=2, gather_16bit_weights_on_model_save=True), "zero2"),
        (of(zero_stage=3, offload_optimizer=ON_HOST, offload_param=ON_HOST), "zero3 all"),
        (
            of(zero_optimization={"stage": 2, "offload_optimizer": {**ON_HOST, "ratio": 0.3, "buffer_count": 4}}),
            "zero2 optimizer",
        ),
        (of(zero_optimization=OFFLOADED), "zero3 all"),
        (
            of(zero_stage=2, communication_data_type="fp16", allgather_base_size=10**6, reduce_scatter_base_size=10**6),
            "zero2",
        ),
        (of(zero_stage=2, compression=COMPRESSED), "zero2"),
        (
            of(
                zero_optimization={"stage": 3, "cpu_offload": True},
                activation_checkpointing={"partition_activations": True, "cpu_checkpointing": True},
            ),
            "zero3 optimizer",
        ),
        ({"train_micro_batch_size_per_gpu": 2, "train_batch_size": 8, "gradient_accumulation_steps": 2}, ""),
    ],
    ids=str,
)
@pytest.mark.sweep(every=3)
def test_configs_train(config: Mapping[str, Any], strategy: str, ranks: RankPool) -> None:
    name, _, offload = ranks.run(seed_bodies.by_config, config, "native" if strategy else None)[0]
    if strategy:
        assert (name, offload) == (strategy.partition(" ")[0], strategy.partition(" ")[2] or "none")


@pytest.mark.parametrize("zero", [PERSISTENT, OFFLOADED], ids=["thresholds", "offload"])
def test_deepspeed_itself_trains_by_them(zero: Mapping[str, Any], deepspeed_ranks: RankPool) -> None:
    config = of(zero_optimization=zero, optimizer={"type": "AdamW", "params": {"lr": 1e-3}})
    offload = "all" if zero is OFFLOADED else "none"
    assert deepspeed_ranks.run(seed_bodies.by_config, config, "deepspeed") == [("zero3", "deepspeed", offload)] * 2


def test_a_command_line_names_the_config(deepspeed_ranks: RankPool, tmp_path: Path) -> None:
    deepspeed_ranks.run(seed_bodies.command_line_names_the_config, str(tmp_path))


@pytest.mark.parametrize(
    ("config", "options", "words"),
    [
        ({"pipeline": {"stages": 4, "partition": "uniform", "seed_layers": False}}, {}, "4"),
        ({}, {"pipeline": True}, "pipeline=True, and the plan has no pipeline"),
        (
            {"zero_optimization": {"stage": 3, "offload_param": ON_HOST}},
            {},
            "set zero_optimization.offload_optimizer.device too",
        ),
        (
            {**FILE, "train_batch_size": 32},
            {},
            "4 x gradient_accumulation_steps 2 x 2 ranks = 16 is not train_batch_size 32",
        ),
    ],
    ids=["pipeline", "pipeline=True", "offload_param", "batch"],
)
def test_what_cannot_be_done_is_said_in_one_line(
    config: Mapping[str, Any], options: Mapping[str, Any], words: str, ranks: RankPool
) -> None:
    for line in ranks.run(seed_bodies.refusal, config, options):
        assert words in line
        assert "\n" not in line


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "native zero2"])
def test_state_dict_is_what_the_module_loads(strategy: str, ranks: RankPool) -> None:
    backend, _, name = strategy.rpartition(" ")
    ranks.run(seed_bodies.weights_copied, of(), {"strategy": name, "backend": backend or None})


def test_a_process_alone_goes_on_after_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Saved after steps 2 and 4 of 6, failed in step 6: the epoch's data goes on where the checkpoint has it."""
    loader = DataLoader(dataset(12), batch_size=2)
    trainers = []
    for folder, fails_at in ((tmp_path / "whole", 0), (tmp_path / "failed", 6)):
        engine, *_ = dsplan.initialize(Fragile(fails_at), config={"batch_size": 2, "save_dir": str(folder)})
        trainer = dsplan.DistributedTrainer(engine=engine)
        trainer.enable_fault_tolerance(auto_resume=True, max_retry_attempts=1, checkpoint_interval=2)
        trainer.train(1, loader)
        trainers.append(trainer)
    assert "RuntimeError: the network went away; training goes on from step 4" in capsys.readouterr().err
    whole, failed = (trainer.engine.state_dict() for trainer in trainers)
    assert all(torch.equal(whole[name], failed[name]) for name in whole)
    trainers[1].reset()
    assert trainers[1].engine.global_steps == 0
    start = trainers[1].engine.state_dict()
    fresh = Fragile(0).state_dict()
    assert all(torch.equal(start[name], fresh[name]) for name in fresh)


def test_what_a_trainer_needs_is_said_in_one_line(tmp_path: Path) -> None:
    training = dsplan.setup_distributed_training(nn.Linear(4, 1), {"batch_size": 2})
    with pytest.raises(DsplanError, match="train: there is no data; give"):
        training.train(epochs=1)
    with pytest.raises(DsplanError, match=r"Linear returns a tensor \[2, 1\] and no loss; have it return the loss"):
        training.train(1, [torch.zeros(2, 4)])
    with pytest.raises(DsplanError, match="epochs is 0"):
        training.train(0)


def test_monitors(tmp_path: Path) -> None:
    seen: list[float] = []
    monitor = dsplan.TrainingMonitor(
        log_interval=2,
        save_logs=True,
        log_dir=tmp_path,
        track_gpu_memory=True,
        track_cpu_memory=True,
        track_network=True,
    )
    monitor.add_callback("loss_alert", lambda metrics: seen.append(metrics["loss"]))
    for step in range(4):
        monitor.track_metric("loss", torch.tensor(float(step)), step)
        monitor.track_metric("accuracy", 0.5, step)
    stats = monitor.get_system_stats()
    monitor.close()
    assert stats["cpu_memory"] is not None
    assert stats["cpu_memory"] > 2**20
    assert "gpu_memory" in stats
    assert seen == [1.0, 3.0]
