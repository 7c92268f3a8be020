"""A HF Trainer script that knows nothing of dsplan. Run it with `dsplan run scripts/examples/hf_trainer.py`."""

from __future__ import annotations

import argparse
import tempfile

from stdlib_text import VOCABULARY, StdlibText
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--sequence-length", type=int, default=128)
    options = parser.parse_args()
    set_seed(0)
    width = {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": options.sequence_length}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None, **width))
    with tempfile.TemporaryDirectory() as output:
        arguments = TrainingArguments(
            output_dir=output,
            max_steps=options.steps,
            per_device_train_batch_size=8,
            learning_rate=1e-3,
            logging_steps=5,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        data = StdlibText(length=options.sequence_length, windows=4096)
        Trainer(model=model, args=arguments, train_dataset=data).train()


if __name__ == "__main__":
    main()
