"""A rank of a run whose ranks split the model is killed: what is trained is what an undisturbed run trains."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, os, signal, sys
from pathlib import Path
import torch
from transformers import LlamaConfig, LlamaForCausalLM
import dsplan

ledger, steps = Path(sys.argv[1]), 12
torch.manual_seed(0)
config = LlamaConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, vocab_size=64,
    max_position_embeddings=32, tie_word_embeddings=True,
)
engine, *_ = dsplan.initialize(
    LlamaForCausalLM(config), lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
    config={"train_batch_size": 8, "gradient_clipping": 1.0},
)
engine.load_checkpoint(ledger / "own")
while engine.global_steps < steps:
    step = engine.global_steps
    if len(sys.argv) > 2 and step == 7 and engine.environment.rank == 3 and not (ledger / "killed").exists():
        (ledger / "killed").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    ids = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(step))
    own = ids.chunk(engine.data_parallel_size)[engine.data_parallel_rank]
    loss = float(engine.train_batch({"input_ids": own, "labels": own}))
    if engine.is_main:
        with open(ledger / "losses.jsonl", "a") as file:
            file.write(json.dumps([step, loss]) + "\\n")
"""


def losses_of(folder: Path, flags: list[str], *words: str) -> dict[int, float]:
    """The last loss of each step of a run on four ranks."""
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    options = ["--nproc", "4", "--checkpoint-steps", "3", "--retries", "2", "--run-dir", str(folder / "run")]
    command = [sys.executable, "-m", "dsplan", "run", *flags, *options, str(folder / "train.py"), str(folder), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "DSPLAN_HOME": str(folder)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return dict(json.loads(line) for line in (folder / "losses.jsonl").read_text().splitlines())


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "flags",
    [
        ["--strategy", "fsdp", "--tp", "2"],
        ["--strategy", "zero2", "--backend", "native", "--tp", "2"],
        ["--strategy", "ddp", "--tp", "2", "--pp", "2"],
        ["--strategy", "fsdp", "--pp", "2"],
    ],
    ids=" ".join,
)
def test_a_killed_rank_changes_no_loss(flags: list[str], tmp_path: Path) -> None:
    right = losses_of(tmp_path / "undisturbed", flags)
    found = losses_of(tmp_path / "killed", flags, "kill")
    assert (tmp_path / "killed" / "killed").exists()
    assert sorted(found) == list(range(12))
    assert [found[step] for step in range(12)] == pytest.approx([right[step] for step in range(12)], rel=1e-6)
