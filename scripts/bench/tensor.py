"""Step time of FSDP2 with tensor parallelism: dsplan beside hand-written torch, in turns in one run.

    python -m scripts.bench.tensor [--ranks 4] [--hidden 512] [--layers 4] [--rounds 9]

Both train the same LLaMA of transformers over gloo, tp 2, FSDP2 over the rest. The hand-written side is what torch's
tutorial of tensor parallelism has: `parallelize_module` with DTensor styles, `loss_parallel` over the split vocabulary,
then `fully_shard` of the blocks and the root. Each side's seconds are the median of its rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn import functional

import dsplan
from dsplan.diagnostics.bench.rank_pool import RankPool

TP, SAMPLES, LENGTH, VOCABULARY = 2, 4, 256, 4096


def main() -> None:
    """Print the seconds of split layers beside torch's own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9, help="of three steps of each side in turn")
    options = parser.parse_args()
    with RankPool(options.ranks, timeout_seconds=1800) as pool:
        results = pool.run(measure, options.hidden, options.layers, options.rounds)
    own, by_hand, losses = results[0]
    print(f"dsplan {own:.3f} s/step, hand-written {by_hand:.3f} s/step, ratio {own / by_hand:.3f}")
    print(f"losses after the same steps: {losses[0]:.6f} and {losses[1]:.6f}")


def measure(hidden: int, layers: int, rounds: int) -> tuple[float, float, tuple[float, float]]:
    """Median seconds of a step of both sides on this rank, and their last losses."""
    sides = [_by_dsplan(hidden, layers), _by_hand(hidden, layers)]
    seconds: list[list[float]] = [[], []]
    losses = [0.0, 0.0]
    for turn in range(rounds + 1):
        for index in (0, 1) if turn % 2 else (1, 0):
            dist.barrier()
            start = time.perf_counter()
            for _ in range(3):
                losses[index] = sides[index](turn)
            if turn:  # the first warms up
                seconds[index].append((time.perf_counter() - start) / 3)
    return statistics.median(seconds[0]), statistics.median(seconds[1]), (losses[0], losses[1])


def _model(hidden: int, layers: int) -> Any:
    transformers: Any = import_module("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        use_cache=False,
    )
    return transformers.LlamaForCausalLM(config)


def _batch(turn: int, data_rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * turn + data_rank)
    return torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=generator)


def _by_dsplan(hidden: int, layers: int) -> Callable[[int], float]:
    ways = dist.get_world_size() // TP
    engine, *_ = dsplan.initialize(
        model=_model(hidden, layers),
        optimizer=_optimizer,
        config={"train_micro_batch_size_per_gpu": SAMPLES, "train_batch_size": SAMPLES * ways},
        strategy="fsdp",
        parallel={"tp": TP, "sequence_parallel": False},
    )
    assert engine.configuration.activation_checkpointing == "none", "the other side keeps all activations"

    def step(turn: int) -> float:
        tokens = _batch(turn, engine.data_parallel_rank)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    return step


def _by_hand(hidden: int, layers: int) -> Callable[[int], float]:
    mesh = init_device_mesh("cpu", (dist.get_world_size() // TP, TP), mesh_dim_names=("dp", "tp"))
    model, tp = _model(hidden, layers), mesh["tp"]
    columns, rows = ColwiseParallel, RowwiseParallel
    block = {f"self_attn.{name}_proj": columns() for name in "qkv"} | {"self_attn.o_proj": rows()}
    block |= {"mlp.gate_proj": columns(), "mlp.up_proj": columns(), "mlp.down_proj": rows()}
    parallelize_module(
        model,
        tp,
        {
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(use_local_output=False),
        },
    )
    for layer in model.model.layers:
        parallelize_module(layer, tp, block)
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    optimizer = _optimizer(model.parameters())

    def step(turn: int) -> float:
        tokens = _batch(turn, mesh["dp"].get_local_rank())
        targets = functional.pad(tokens, (0, 1), value=-100)[:, 1:].flatten()
        with loss_parallel():
            loss = functional.cross_entropy(model(input_ids=tokens).logits.flatten(0, 1).float(), targets)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach().full_tensor())  # type: ignore[attr-defined]

    return step


def _optimizer(parameters: Iterable[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, fused=False, foreach=False)


if __name__ == "__main__":
    main()
