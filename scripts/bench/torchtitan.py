"""Step time of FSDP2 with tensor parallelism: dsplan beside torchtitan's own train loop, in turns in one run.

    pip install torchtitan==0.3.0 triton
    python -m scripts.bench.torchtitan [--ranks 4] [--hidden 512] [--layers 4] [--rounds 7]

Both train torchtitan's own `Llama3Model` from the same weights on the same tokens over gloo, tp 2, FSDP2 over the rest,
fp32, fused AdamW, clipping by the global norm. torchtitan's side is `Trainer.train_step`, as its `train` calls it. It
is written for CUDA, so five things are changed from outside: its device module answers for a CPU, attention is its own
`ScaledDotProductAttention` (its language models take only FlexAttention and varlen, which have no backward pass on a
CPU), CUDA graphs are off, gradients are summed without NCCL's scaled sum, which gloo has not, and its modules are split
as DTensors (`partial_dtensor`). Each side's seconds are the median of its rounds.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

import dsplan
from dsplan.diagnostics.bench.rank_pool import RankPool

TP, SAMPLES, LENGTH, VOCABULARY, HEADS = 2, 4, 256, 4096, 8
LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIPPING = 1e-3, (0.9, 0.95), 0.1, 1.0
Side = Callable[[int], torch.Tensor]
"""Trains one step and returns this rank's part of the sum of the loss over ranks that read different samples."""


def main() -> None:
    """Print torchtitan's steps beside dsplan's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7, help="of three steps of each side in turn")
    options = parser.parse_args()
    missing = [name for name in ("torchtitan", "triton") if find_spec(name) is None]
    if missing:
        sys.exit(f"{' and '.join(missing)}: not installed; pip install torchtitan==0.3.0 triton")
    with RankPool(options.ranks, timeout_seconds=1800) as pool:
        results = pool.run(measure, options.hidden, options.layers, options.rounds)
    own, titan, losses = results[0]
    print(f"dsplan {own:.3f} s/step, torchtitan {titan:.3f} s/step, ratio {own / titan:.3f}")
    print(f"losses after the same steps: {losses[0]:.6f} and {losses[1]:.6f}")


def measure(hidden: int, layers: int, rounds: int) -> tuple[float, float, tuple[float, float]]:
    """Median seconds of a step of both sides on this rank, and their last losses."""
    logging.disable(logging.INFO)
    _answer_for_a_cpu()
    titan, weights = _by_torchtitan(hidden, layers)
    sides = [_by_dsplan(hidden, layers, weights), titan]
    seconds: list[list[float]] = [[], []]
    last = [torch.zeros(()), torch.zeros(())]
    for turn in range(rounds + 1):
        for index in (0, 1) if turn % 2 else (1, 0):
            dist.barrier()
            start = time.perf_counter()
            for step in range(3):
                last[index] = sides[index](3 * turn + step)
            if turn:  # the first warms up
                seconds[index].append((time.perf_counter() - start) / 3)
    for loss in last:
        dist.all_reduce(loss)
    return statistics.median(seconds[0]), statistics.median(seconds[1]), (float(last[0]) / TP, float(last[1]) / TP)


def _batch(turn: int, data_rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * turn + data_rank)
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _answer_for_a_cpu() -> None:
    """Give torchtitan a device module that answers what it asks of `torch.cuda`."""
    device: Any = ModuleType("cpu_device")
    device.current_device = lambda: 0
    device.get_device_name = lambda *_: "CPU"
    device.get_device_properties = lambda *_: SimpleNamespace(total_memory=64 << 30)
    device.memory_stats = lambda *_: {}
    for name in ("set_device", "reset_peak_memory_stats", "empty_cache", "synchronize"):
        setattr(device, name, lambda *_: None)
    utils: Any = import_module("torchtitan.tools.utils")
    utils.device_type, utils.device_module = "cpu", device
    utils.get_local_device = lambda: torch.device("cpu")
    os.environ.setdefault("LOCAL_RANK", "0")


def _description(hidden: int, layers: int) -> Any:
    """Return the configuration of a small LLaMA of torchtitan with its own SDPA attention."""
    llama: Any = import_module("torchtitan.models.llama3")
    attention: Any = import_module("torchtitan.models.common.attention")
    llama.get_attention_config = lambda _: attention.ScaledDotProductAttention.Config()
    norm = llama.RMSNorm.Config(normalized_shape=hidden, param_init=llama._NORM_INIT)
    blocks = llama._build_llama3_layers(
        n_layers=layers,
        dim=hidden,
        n_heads=HEADS,
        n_kv_heads=HEADS // 2,
        hidden_dim=3 * hidden,
        fuse_qkv=False,
        rope=llama.ComplexRoPE.Config(dim=hidden // HEADS, max_seq_len=4096, theta=10000.0, scaling="none"),
        attn_backend="sdpa",
    )
    return llama.Llama3Model.Config(
        dim=hidden,
        vocab_size=VOCABULARY,
        tok_embeddings=llama.Embedding.Config(
            num_embeddings=VOCABULARY, embedding_dim=hidden, param_init=llama._EMBEDDING_INIT
        ),
        norm=norm,
        lm_head=llama.Linear.Config(
            in_features=hidden, out_features=VOCABULARY, param_init=llama._output_linear_init(hidden)
        ),
        layers=blocks,
    )


def _by_torchtitan(hidden: int, layers: int) -> tuple[Side, dict[str, torch.Tensor]]:
    """Its train loop, and the whole weights that it begins with."""
    settings: Any = _settings(hidden, layers)
    trainer = import_module("torchtitan.trainer").Trainer(settings)
    (model,) = trainer.model_parts
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    weights = {name: value.full_tensor().detach().clone() for name, value in model.state_dict().items()}
    losses: list[torch.Tensor] = []
    forward_backward = trainer.forward_backward_step

    def noted(**kwargs: Any) -> torch.Tensor:
        loss: torch.Tensor = forward_backward(**kwargs)
        losses[:] = [loss.detach().clone()]
        return loss

    trainer.forward_backward_step = noted
    positions = torch.arange(LENGTH).expand(SAMPLES, LENGTH).contiguous()

    def step(turn: int) -> torch.Tensor:
        tokens, labels = _batch(turn, trainer.dataloader.data_rank)
        trainer.step += 1
        trainer.train_step(trainer.batch_generator([({"input": tokens, "positions": positions}, labels)]))
        return losses[0]

    return step, weights


def _settings(hidden: int, layers: int) -> Any:
    llama, trainer = import_module("torchtitan.models.llama3"), import_module("torchtitan.trainer")
    config, data = import_module("torchtitan.config"), import_module("torchtitan.components.dataloader")
    optimizer, tokens = import_module("torchtitan.components.optimizer"), _loader(data, "BaseDataLoader")
    tokenizer = import_module("torchtitan.components.tokenizer")
    spec = import_module("torchtitan.protocols.model_spec").ModelSpec(
        name="llama3",
        flavor="bench",
        model=_description(hidden, layers),
        parallelize_fn=llama.parallelize_llama,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=None,
    )
    return trainer.Trainer.Config(
        model_spec=spec,
        loss=import_module("torchtitan.components.loss").CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        optimizer=optimizer.default_adamw(lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY),
        lr_scheduler=optimizer.LRSchedulersContainer.Config(warmup_steps=0),
        tokenizer=_loader(tokenizer, "BaseTokenizer").Config(),
        dataloader=tokens.Config(),
        training=config.TrainingConfig(
            local_batch_size=SAMPLES,
            seq_len=LENGTH,
            steps=10**9,
            max_norm=CLIPPING,
            disable_cuda_graphs=True,
            mixed_precision_param="float32",
        ),
        parallelism=config.ParallelismConfig(
            tensor_parallel_degree=TP, enable_sequence_parallel=False, spmd_backend="partial_dtensor"
        ),
        metrics=import_module("torchtitan.components.metrics").MetricsProcessor.Config(log_freq=10**9),
        checkpoint=import_module("torchtitan.components.checkpoint").CheckpointManager.Config(enable=False),
        activation_checkpoint=None,
    )


def _loader(module: Any, base: str) -> Any:
    """Make a loader or tokenizer without files, of torchtitan's base class: batches come from `_batch`."""
    parent: Any = getattr(module, base)

    class Empty(parent):  # type: ignore[misc]
        @dataclass(kw_only=True, slots=True)
        class Config(parent.Config):  # type: ignore[misc]
            pass

        def __init__(self, config: Any = None, *, dp_rank: int = 0, **_: Any) -> None:
            super().__init__()
            self.data_rank = dp_rank

        def __iter__(self) -> Iterator[Any]:
            return iter(())

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            pass

        def encode(self, *_: Any, **__: Any) -> list[int]:
            return []

        def decode(self, *_: Any, **__: Any) -> str:
            return ""

        def get_vocab_size(self) -> int:
            return VOCABULARY

    return Empty


def _by_dsplan(hidden: int, layers: int, weights: dict[str, torch.Tensor]) -> Side:
    model = _description(hidden, layers).build()
    model.init_weights(buffer_device=None)
    model.load_state_dict(weights)
    ways = dist.get_world_size() // TP
    engine, *_ = dsplan.initialize(
        model=model,
        optimizer=lambda parameters: torch.optim.AdamW(
            parameters, lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
        ),
        config={
            "train_micro_batch_size_per_gpu": SAMPLES,
            "train_batch_size": SAMPLES * ways,
            "gradient_clipping": CLIPPING,
        },
        strategy="fsdp",
        parallel={"tp": TP, "sequence_parallel": False},
    )
    assert engine.configuration.activation_checkpointing == "none", "the other side keeps all activations"

    def step(turn: int) -> torch.Tensor:
        tokens, labels = _batch(turn, engine.data_parallel_rank)
        loss = functional.cross_entropy(engine(tokens).flatten(0, 1).float(), labels.flatten())
        engine.backward(loss)
        engine.step()
        return loss.detach() / ways

    return step


if __name__ == "__main__":
    main()
