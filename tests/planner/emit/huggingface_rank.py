"""An HF Trainer script that takes its arguments from `training_arguments.json`: four steps of a tiny OPT."""

import json
import os
import random
from pathlib import Path

from transformers import OPTConfig, OPTForCausalLM, Trainer, TrainingArguments

arguments = json.loads(Path("training_arguments.json").read_text())
settings = TrainingArguments(
    **arguments, output_dir="out", max_steps=4, logging_steps=1, save_strategy="no", report_to="none",
    lr_scheduler_type="constant", seed=0,
)  # fmt: skip
size = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
model = OPTForCausalLM(OPTConfig(vocab_size=64, max_position_embeddings=32, dropout=0.0, **size))
draw = random.Random(0)
texts = [[draw.randrange(4, 20) for _ in range(16)] for _ in range(64)]
trainer = Trainer(model=model, args=settings, train_dataset=[{"input_ids": text, "labels": text} for text in texts])
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
answer = {"world": settings.world_size, "wrapper": type(trainer.model_wrapped).__name__, "losses": losses}
Path(f"rank{os.environ['RANK']}.json").write_text(json.dumps(answer))
trainer.accelerator.wait_for_everyone()
# Gloo's threads can abort a process that tears Python down; the answer is written.
os._exit(0)
