"""BERT learns which package of Python's standard library a passage is from; the same script under every strategy.

    dsplan run scripts/examples/finetune_bert.py                        # from random weights
    dsplan run scripts/examples/finetune_bert.py --pretrained bert      # from what pretrain_bert.py exported
    dsplan run --strategy zero2 scripts/examples/finetune_bert.py --backend native

The loss is the same under DDP, FSDP2 and every ZeRO stage. At the end it is tested on passages that it has not
seen.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import torch
from pretrain_bert import bert_config
from stdlib_packages import PACKAGES, Passages
from transformers import BertForSequenceClassification

import dsplan


@torch.no_grad()
def accuracy(engine: Any, passages: Passages) -> float:
    """The share of passages whose package is recognised; every rank goes through the same ones."""
    engine.eval()
    right = 0
    batches = len(passages) // 64
    for start in range(0, batches * 64, 64):
        samples = [passages[index] for index in range(start, start + 64)]
        ids, labels = (torch.stack([sample[name] for sample in samples]) for name in ("input_ids", "labels"))
        guesses = engine(input_ids=ids.to(engine.device)).logits.argmax(1).cpu()
        right += int((guesses == labels).sum())
    engine.train()
    return right / (batches * 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrained", help="a folder that from_pretrained reads; default: random weights")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--global-batch", type=int, default=32, help="passages per optimizer step, over all ranks")
    parser.add_argument("--sequence-length", type=int, default=64, help="words per passage")
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--backend", choices=["torch", "deepspeed", "native"], help="what runs the plan; default: any")
    options = parser.parse_args()

    torch.manual_seed(0)
    if options.pretrained:
        model = BertForSequenceClassification.from_pretrained(options.pretrained, num_labels=len(PACKAGES))
    else:
        config = bert_config(options.sequence_length)
        config.num_labels = len(PACKAGES)
        model = BertForSequenceClassification(config)
    engine, _, dataloader, _ = dsplan.initialize(
        model=model,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=options.learning_rate),
        training_data=Passages(length=options.sequence_length, held_out=False),
        config={"train_batch_size": options.global_batch},
        backend=options.backend,
    )
    assert dataloader is not None
    engine.train()
    for batch in itertools.chain.from_iterable(itertools.repeat(dataloader)):
        loss = engine(**{name: tensor.to(engine.device) for name, tensor in batch.items()}).loss
        engine.backward(loss)
        engine.step()
        if engine.is_main and engine.is_gradient_accumulation_boundary() and engine.global_steps % 10 == 0:
            print(f"step {engine.global_steps} loss {loss.item():.4f}", flush=True)
        if engine.global_steps == options.steps:
            break
    share = accuracy(engine, Passages(length=options.sequence_length, held_out=True))
    if engine.is_main:
        print(f"{share:.1%} of the passages it has not seen; guessing finds {1 / len(PACKAGES):.1%}", flush=True)


if __name__ == "__main__":
    main()
