"""An accelerate script that accumulates, clips, saves its state once and may load it: losses go to a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from stdlib_text import VOCABULARY, StdlibText
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

STEPS, SAVED_AFTER = 8, 4


def main(output: Path, resumes: bool) -> None:
    set_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    config = GPT2Config(vocab_size=VOCABULARY, bos_token_id=None, eos_token_id=None, n_embd=32, n_layer=2, n_head=2)
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0  # loaders draw from the generator of dropout
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(StdlibText(length=32, windows=128), batch_size=2, shuffle=False)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    completed = 0
    losses: list[float] = []
    if resumes:
        accelerator.load_state(str(output / "state"))
        losses = json.loads((output / "losses.json").read_text())[:SAVED_AFTER]
        # The plan may have cut other micro-batches than the script wrote.
        taken, completed = SAVED_AFTER * accelerator.gradient_accumulation_steps, SAVED_AFTER
        loader = accelerator.skip_first_batches(loader, taken)
    micro: list[torch.Tensor] = []
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            micro.append(accelerator.gather(loss.detach().reshape(1)).mean())
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                completed += 1
                losses.append(torch.stack(micro).mean().item())
                micro.clear()
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients and completed == SAVED_AFTER and not resumes:
            accelerator.save_state(str(output / "state"))
        if completed == STEPS:
            break
    if accelerator.is_main_process:
        (output / ("resumed.json" if resumes else "losses.json")).write_text(json.dumps(losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]), resumes="resume" in sys.argv[2:])
