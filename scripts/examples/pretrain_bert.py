"""BERT learns to fill in hidden words of Python's standard library; `finetune_bert.py` starts from what it exports.

dsplan run scripts/examples/pretrain_bert.py --out bert
dsplan run scripts/examples/finetune_bert.py --pretrained bert
"""

from __future__ import annotations

import argparse
import itertools

import torch
from stdlib_packages import VOCABULARY, Masked
from transformers import BertConfig, BertForMaskedLM

import dsplan


def bert_config(length: int) -> BertConfig:
    """A small BERT; without dropout every strategy computes the same losses."""
    return BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="bert", help="where the model goes, as from_pretrained reads it")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--global-batch", type=int, default=32, help="passages per optimizer step, over all ranks")
    parser.add_argument("--sequence-length", type=int, default=64, help="words per passage")
    parser.add_argument("--backend", choices=["torch", "deepspeed", "native"], help="what runs the plan; default: any")
    options = parser.parse_args()

    torch.manual_seed(0)
    engine, _, dataloader, _ = dsplan.initialize(
        model=BertForMaskedLM(bert_config(options.sequence_length)),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        training_data=Masked(length=options.sequence_length),
        config={"train_batch_size": options.global_batch},
        backend=options.backend,
    )
    assert dataloader is not None
    for batch in itertools.chain.from_iterable(itertools.repeat(dataloader)):
        loss = engine(**{name: tensor.to(engine.device) for name, tensor in batch.items()}).loss
        engine.backward(loss)
        engine.step()
        if engine.is_main and engine.is_gradient_accumulation_boundary() and engine.global_steps % 10 == 0:
            print(f"step {engine.global_steps} loss {loss.item():.4f}", flush=True)
        if engine.global_steps == options.steps:
            break
    engine.export(options.out)


if __name__ == "__main__":
    main()
