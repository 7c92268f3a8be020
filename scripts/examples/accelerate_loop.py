"""An accelerate script that knows nothing of dsplan. Run it with `dsplan run scripts/examples/accelerate_loop.py`."""

from __future__ import annotations

import argparse
import itertools

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from stdlib_text import VOCABULARY, StdlibText
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--sequence-length", type=int, default=128)
    options = parser.parse_args()
    set_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=options.sequence_length,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = DataLoader(StdlibText(length=options.sequence_length, windows=4096), batch_size=4, shuffle=True)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)

    step = 0
    for batch in itertools.chain.from_iterable(itertools.repeat(data)):
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            step += 1
            if step % 5 == 0:
                accelerator.print(f"step {step} loss {loss.item():.4f}")
            if step == options.steps:
                break
    accelerator.end_training()


if __name__ == "__main__":
    main()
