"""A HF Trainer script that saves every three steps and whose rank 1 is killed once, where it is told to be."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from stdlib_text import VOCABULARY, StdlibText
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

STEPS = 10


class Killer(TrainerCallback):  # type: ignore[misc]
    """Kills this rank behind a step, once in the life of `mark`."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 8 and os.environ["RANK"] == "1" and not self._mark.exists():
            self._mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def main(output: str, faulty: str) -> None:
    set_seed(0)
    config = GPT2Config(vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None, n_embd=32, n_layer=2, n_head=2)
    arguments = TrainingArguments(
        output_dir=output,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        logging_steps=1,
        save_strategy="steps",
        save_steps=3,
        report_to="none",
        disable_tqdm=True,
    )
    callbacks = [Killer(Path(output).with_suffix(".killed"))] if faulty == "faulty" else []
    data = StdlibText(length=32, windows=512)
    trainer = Trainer(model=GPT2LMHeadModel(config), args=arguments, train_dataset=data, callbacks=callbacks)
    trainer.train()
    if trainer.is_world_process_zero():
        losses = {row["step"]: row["loss"] for row in trainer.state.log_history if "loss" in row}
        Path(output).with_suffix(".losses").write_text(json.dumps(losses))


if __name__ == "__main__":
    main(*sys.argv[1:])
