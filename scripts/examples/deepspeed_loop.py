"""A DeepSpeed script that knows nothing of dsplan. Run it with `dsplan run scripts/examples/deepspeed_loop.py`."""

from __future__ import annotations

import argparse
import itertools

import deepspeed
import torch
from stdlib_text import VOCABULARY, StdlibText
from transformers import GPT2Config, GPT2LMHeadModel

CONFIG = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 1,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--local_rank", type=int, default=0)
    options = parser.parse_args()
    torch.manual_seed(0)
    width = {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": options.sequence_length}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None, **width))
    data = StdlibText(length=options.sequence_length, windows=4096)
    engine, _, loader, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), training_data=data, config=CONFIG
    )

    for batch in itertools.chain.from_iterable(itertools.repeat(loader)):
        batch = {name: tensor.to(engine.device) for name, tensor in batch.items()}
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        if engine.is_gradient_accumulation_boundary() and engine.global_rank == 0 and engine.global_steps % 5 == 0:
            print(f"step {engine.global_steps} loss {loss.item():.4f}", flush=True)
        if engine.global_steps >= options.steps:
            break


if __name__ == "__main__":
    main()
