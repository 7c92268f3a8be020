"""Scripts of other people, as they are: they train under the plan that was asked for, as they are, or are refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from hardware_db.store import open_store
from strategies.run_directory.claim import Claim, read_claim
from tests.strategies.launch.command import IMAGES, run

# A loop that nobody plans for, which marks its first step.
LOOP = """
import os, sys, torch
from pathlib import Path
torch.manual_seed(0)
model = torch.nn.Linear(64, 10)
optimizer = torch.optim.AdamW(model.parameters())
samples, labels = torch.randn(128, 64), torch.randint(0, 10, (128,))
for step in range(8):
    loss = torch.nn.functional.cross_entropy(model(samples), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    Path(sys.argv[1]).touch()
"""


def _script(folder: Path, files: dict[str, str]) -> Path:
    for name, source in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(source)
    return folder / next(iter(files))


@pytest.mark.slow
def test_a_loop_that_nobody_plans_for_is_measured_and_stored(tmp_path: Path) -> None:
    script = _script(tmp_path, {"loop.py": LOOP})
    finished = run("--nproc", "1", "--json", script, str(tmp_path / "stepped"), cwd=tmp_path)
    assert finished.status == 0, finished.err
    ended, measured = finished.json, finished.json["measured"]
    assert "trains with none of dsplan, HF Trainer" in finished.err
    assert (ended["trained_with"], ended["plan"], measured["steps"]) == ("plain", None, 8)
    assert measured["last_loss"] < measured["first_loss"]
    assert measured["step_seconds"] > 0
    # The loss is over 128 x 10 logits; weights, gradients and two moments are 650 numbers each.
    assert 4 * 650 * 4 < measured["peak_allocated_bytes"] < 100_000
    claim = read_claim(Path(ended["run_directory"]))
    assert claim == Claim(kind="plain", parameters=650)
    with open_store() as store:
        stored = store.get(ended["measurement_id"])
    assert (stored.model, stored.strategy, stored.measured.steps) == ("loop.py", "unplanned", 8)
    assert stored.predicted.step_seconds is None


@pytest.mark.slow
def test_what_cannot_be_applied_is_refused_before_the_first_step(tmp_path: Path) -> None:
    script = _script(tmp_path, {"loop.py": LOOP})
    finished = run("--nproc", "1", "--strategy", "zero3", script, str(tmp_path / "stepped"), cwd=tmp_path)
    assert finished.status == 2
    assert "--strategy zero3 cannot be applied: loop.py, line 10 trains with none of" in finished.err
    assert "Traceback" not in finished.err
    assert not (tmp_path / "stepped").exists()


# A start of two lines, a Trainer of the script's own, and arguments that work out one setting from others.
TRAINER = {
    "main.py": "from package.training import main\nmain()\n",
    "package/own.py": """
from dataclasses import dataclass, field
from transformers import Trainer, TrainingArguments

@dataclass
class OwnArguments(TrainingArguments):
    samples: int = field(default=0)

    def __post_init__(self):
        if self.samples:
            raise ValueError("samples are worked out, not given")
        super().__post_init__()
        self.samples = self.per_device_train_batch_size * self.gradient_accumulation_steps

class OwnTrainer(Trainer):
    def __init__(self, *given, train_dataset, args, **named):
        args.logging_first_step = True
        rows = [{"input_ids": tokens, "labels": tokens} for tokens in train_dataset]
        super().__init__(*given, args=args, train_dataset=rows, **named)
""",
    "package/training.py": """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser
from package.own import OwnArguments, OwnTrainer

def main():
    command = "--output_dir out --max_steps 4 --per_device_train_batch_size 4 --report_to none --save_strategy no"
    (args,) = HfArgumentParser(OwnArguments).parse_args_into_dataclasses(command.split())
    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))
    trainer = OwnTrainer(model=model, args=args, train_dataset=[torch.randint(0, 256, (32,)) for _ in range(64)])
    trainer.train()
    assert args.logging_first_step
    print("SAMPLES", args.samples, args.per_device_train_batch_size * args.gradient_accumulation_steps)
""",
}


@pytest.mark.slow
def test_a_subclass_of_trainer_behind_two_lines_trains_under_a_plan(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    finished = run("--nproc", "1", "--json", _script(tmp_path, TRAINER), cwd=tmp_path)
    assert finished.status == 0, finished.err
    ended = finished.json
    assert (ended["trained_with"], ended["measured"]["steps"]) == ("huggingface", 4)
    chosen = ended["plan"]["plan"]
    assert (chosen["sequence_length"], chosen["global_batch_size"]) == (32, 4)
    assert "SAMPLES 4 4" in finished.err
    assert 0.85 < ended["measured"]["peak_allocated_bytes"] / ended["plan"]["memory"]["peak_allocated_bytes"] < 1.15


@pytest.mark.slow
def test_a_library_inside_a_library_claims_nothing(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    finished = run("--strategy", "ddp", "--json", IMAGES, cwd=tmp_path)
    assert finished.status == 0, finished.err
    assert (finished.json["trained_with"], finished.json["measured"]["steps"]) == ("accelerate", 4)
    assert finished.json["plan"]["plan"]["strategy"] == "ddp"
    assert "WRAPPED DistributedDataParallel" in finished.err


VISION = """
import deepspeed, sys, torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 10))
config = {"train_batch_size": 16, "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}}
engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
for step in range(4):
    loss = torch.nn.functional.cross_entropy(engine(torch.randn(8, 3, 8, 8)), torch.randint(0, 10, (8,)))
    engine.backward(loss)
    engine.step()
print("STAGE", engine.zero_optimization_stage())
"""


@pytest.mark.slow
@pytest.mark.parametrize(("options", "strategy", "stage"), [((), None, 0), (("--strategy", "zero2"), "zero2", 2)])
def test_a_vision_model_under_deepspeed(
    options: tuple[str, ...], strategy: str | None, stage: int, tmp_path: Path
) -> None:
    pytest.importorskip("deepspeed")
    finished = run(*options, "--json", _script(tmp_path, {"vision.py": VISION}), cwd=tmp_path)
    assert finished.status == 0, finished.err
    ended = finished.json
    assert (ended["trained_with"], ended["measured"]["steps"]) == ("deepspeed", 4)
    assert f"STAGE {stage}" in finished.err
    assert (ended["plan"] and ended["plan"]["plan"]["strategy"]) == strategy
    assert ("the script has shown no data to plan for" in finished.err) is (strategy is None)


SFT = {
    "sft.py": "from sft_training import main\nmain()\n",
    "sft_training.py": """
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

def tokenizer():
    words = ["<pad>", "<eos>", "<unk>", *"abcdefghij"]
    model = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )

def main():
    rows = [{"text": " ".join("abcdefghij"[(row + index) % 10] for index in range(12))} for row in range(64)]
    sizes = {"vocab_size": 16, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1))
    args = SFTConfig(
        output_dir="out", max_steps=5, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        report_to="none", save_strategy="no", max_length=32,
    )
    SFTTrainer(model=model, args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer()).train()
""",
}


@pytest.mark.slow
def test_trl_fine_tunes_under_a_plan(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    finished = run("--strategy", "ddp", "--json", _script(tmp_path, SFT), cwd=tmp_path)
    assert finished.status == 0, finished.err
    ended = finished.json
    assert (ended["trained_with"], ended["measured"]["steps"], ended["measured"]["ranks"]) == ("huggingface", 5, 2)
    # 12 words and the end of the text, of which TRL makes tokens before it comes to Trainer.
    assert (ended["plan"]["plan"]["sequence_length"], ended["plan"]["plan"]["global_batch_size"]) == (13, 8)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import torch\n\ntorch.zeros(2).to('cuda:0')\n", "bad.py, line 3: asks for CUDA"),
        ("import torch.distributed as dist\ndist.init_process_group('nccl')\n", "bad.py, line 2: asks for NCCL"),
    ],
)
def test_what_wants_a_gpu_is_named_by_its_line(source: str, says: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    finished = run("--nproc", "2", _script(tmp_path, {"bad.py": source}), cwd=tmp_path)
    assert finished.status == 2
    assert says in finished.err.splitlines()[-1]
