"""GPT-2 of Hugging Face learns the text of Python's standard library; the same script under every strategy.

    dsplan run scripts/examples/train_gpt2.py
    dsplan run --strategy zero3 scripts/examples/train_gpt2.py --backend native
    torchrun --nproc-per-node 2 scripts/examples/train_gpt2.py --save checkpoints    # resumes from there the next time

The loss is the same under DDP, FSDP2 and every ZeRO stage. At the end the model writes a few lines itself.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import torch
from stdlib_text import VOCABULARY, StdlibText
from torch.utils.data import Subset
from transformers import GPT2Config, GPT2LMHeadModel

import dsplan

HELD_OUT = 32


def build_model(length: int) -> GPT2LMHeadModel:
    # Without dropout every strategy computes the same losses: random numbers depend on how ranks share the batch.
    none = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    width = {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": length}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None, **width, **none))


def train(engine: Any, dataloader: Any, steps: int) -> None:
    """Train up to `steps` optimizer steps; the batches continue where a checkpoint left off."""
    batches = itertools.chain.from_iterable(itertools.repeat(dataloader))
    while engine.global_steps < steps:
        batch = next(batches)
        loss = engine(**{name: tensor.to(engine.device) for name, tensor in batch.items()}).loss
        engine.backward(loss)
        engine.step()
        if engine.is_main and engine.is_gradient_accumulation_boundary() and engine.global_steps % 10 == 0:
            print(f"step {engine.global_steps} loss {loss.item():.4f}", flush=True)


@torch.no_grad()
def evaluate(engine: Any, data: Any) -> float:
    """The mean loss over `data`, which every rank goes through: in stage 3 ranks work together in evaluation too."""
    engine.eval()
    samples = [data[index] for index in range(len(data))]
    batch = {name: torch.stack([sample[name] for sample in samples]).to(engine.device) for name in samples[0]}
    loss: float = engine(**batch).loss.item()
    engine.train()
    return loss


def write(engine: Any, start: str, tokens: int) -> str:
    """Text with which the model continues, greedily."""
    ids = torch.tensor([list(start.encode())], device=engine.device)
    engine.eval()
    with engine.whole_parameters():  # on every rank: stage 3 gathers its weights once for all tokens
        written = engine.module.generate(ids, max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    engine.train()
    return bytes(written[0].tolist()).decode(errors="replace")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--global-batch", type=int, default=16, help="samples per optimizer step, over all ranks")
    parser.add_argument("--sequence-length", type=int, default=128, help="bytes per sample")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--backend", choices=["torch", "deepspeed", "native"], help="what runs the plan; default: any")
    parser.add_argument("--save", help="a folder for checkpoints, to resume from and to end with")
    options = parser.parse_args()

    torch.manual_seed(0)
    text = StdlibText(length=options.sequence_length, windows=4096)
    engine, _, dataloader, _ = dsplan.initialize(
        model=build_model(options.sequence_length),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=options.learning_rate),
        training_data=Subset(text, range(HELD_OUT, len(text))),
        config={"train_batch_size": options.global_batch},
        backend=options.backend,
    )
    if options.save:
        engine.load_checkpoint(options.save)
    train(engine, dataloader, options.steps)
    if options.save:
        engine.save_checkpoint(options.save)
    loss, sample = (
        evaluate(engine, Subset(text, range(HELD_OUT))),
        write(engine, "import ", tokens=options.sequence_length // 2),
    )
    if engine.is_main:
        print(f"loss {loss:.4f} on text it has not seen; it writes {sample!r}", flush=True)


if __name__ == "__main__":
    main()
