"""TRL's trainers under a plan: what is read of them, and that their batches and losses stay theirs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from strategies.errors import CannotRun
from strategies.launch.hooks.trl import trl_work
from tests.planner.emit.plans import TINY, make_plan
from tests.strategies.launch.command import run


def trainer_named(name: str, package: str = "trl.trainer") -> Any:
    """Return an object of a class of that name, and of one below it, as scripts make them."""
    base = type(name, (), {"__module__": package})
    return type("OwnTrainer", (base,), {})()


def generating(**chosen: Any) -> SimpleNamespace:
    """Return the arguments of a GRPOTrainer, settled."""
    return SimpleNamespace(
        **{
            "max_completion_length": 128,
            "num_generations": 4,
            "num_iterations": 1,
            "beta": 0.0,
            "steps_per_generation": 4,
            "use_vllm": False,
            "vllm_mode": "colocate",
            "vllm_tensor_parallel_size": 2,
            "vllm_gpu_memory_utilization": 0.3,
            "vllm_enable_sleep_mode": True,
            **chosen,
        }
    )


@pytest.mark.parametrize(
    ("name", "task", "keeps"),
    [
        ("SFTTrainer", "sft", False),
        ("DPOTrainer", "dpo", False),
        ("KTOTrainer", "kto", True),
        ("CPOTrainer", "orpo", False),
        ("RewardTrainer", "reward", False),
        ("OnlineDPOTrainer", None, True),
    ],
)
def test_a_trainer_says_its_task_and_whether_its_micro_batches_may_be_cut_anew(
    name: str, task: str | None, keeps: bool
) -> None:
    work = trl_work(trainer_named(name), SimpleNamespace(precompute_ref_log_probs=True), [], None)
    assert work is not None
    assert (work.task, work.keeps_micro_batch) == (task, keeps)
    assert work.options.get("precompute_ref", False) is (task in ("dpo", "kto"))


def test_other_trainers_say_nothing() -> None:
    assert trl_work(trainer_named("Trainer", "transformers.trainer"), SimpleNamespace(), [], None) is None
    assert trl_work(trainer_named("GRPOTrainer", "mine"), SimpleNamespace(), [], None) is None


def test_a_model_with_adapters_is_planned_as_its_base_and_their_method() -> None:
    """Adapters that no flag says, beside a trained head or over 16 bits in fp32, leave it to be traced."""
    peft = pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForCausalLM

    from strategies.launch.hooks.script_plan import facts_of

    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)

    def adapted(*, narrow: bool = False, **chosen: Any) -> Any:
        model = LlamaForCausalLM(config)
        model = model.half() if narrow else model
        return facts_of(peft.get_peft_model(model, peft.LoraConfig(r=4, **chosen)), "fp32")

    facts, options = adapted(target_modules="all-linear")
    assert facts.model_type == "llama"
    names = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert set(options.pop("lora_targets").split(",")) == names
    assert options == {"method": "lora", "lora_rank": 4, "load_dtype": "fp32"}
    for traced in ({"modules_to_save": ["lm_head"]}, {"narrow": True}):
        facts, options = adapted(target_modules=["q_proj"], **traced)
        assert (facts.kind, options) == ("custom", {})


def test_rounds_are_read_with_prompts_in_tokens() -> None:
    def words(text: str) -> dict[str, list[str]]:
        return {"input_ids": text.split()}

    data = [{"prompt": "a b c"}, {"prompt": "a b c d e"}]
    work = trl_work(trainer_named("GRPOTrainer"), generating(), data, words)
    assert work is not None
    assert (work.task, work.steps_per_generation, work.keeps_micro_batch) == ("grpo", 4, True)
    assert (work.options["prompt_len"], work.options["completion_len"], work.options["rollout"]) == (5, "128", "hf")
    broken = trl_work(trainer_named("GRPOTrainer"), generating(use_vllm=True), data, None)
    assert broken is not None
    assert broken.options["prompt_len"] is None
    assert (broken.options["rollout"], broken.options["rollout_tp"], broken.options["rollout_sleep"]) == (
        "colocate",
        2,
        True,
    )
    server = trl_work(trainer_named("GRPOTrainer"), generating(use_vllm=True, vllm_mode="server"), data, words)
    assert server is not None
    assert server.options["rollout"] == "server"


@pytest.mark.parametrize(("micro", "accumulation", "refused"), [(2, 4, False), (8, 1, True)])
def test_a_given_plan_may_not_cut_generations_anew(micro: int, accumulation: int, refused: bool) -> None:
    """Micro-batch 2 x accumulation 4 became 8 x 1, and a generation of 16 completions one of 64."""
    from strategies.launch.hooks.huggingface import require_same_micro_batch

    written = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    settings = generating(_dsplan_written=written)
    configuration = SimpleNamespace(micro_batch_size=micro, gradient_accumulation_steps=accumulation)
    plan: Any = SimpleNamespace(configuration=configuration)
    require_same_micro_batch(trainer_named("SFTTrainer"), settings, plan)
    if not refused:
        require_same_micro_batch(trainer_named("GRPOTrainer"), settings, plan)
        return
    with pytest.raises(CannotRun, match="micro-batch 8 x accumulation 1 where the script has 2 x 4"):
        require_same_micro_batch(trainer_named("GRPOTrainer"), settings, plan)


def test_a_replaced_setting_has_the_name_that_the_script_uses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import TrainingArguments

    from strategies.launch.hooks.huggingface import _fill_in

    settings = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    # As the script writes it, before `__post_init__` gives it its newer name.
    settings.gradient_checkpointing, settings.activation_checkpointing = True, None
    _fill_in(settings, make_plan("ddp", gpus=1, vendor="cpu", model=TINY, precision="fp32"))
    replaced = capsys.readouterr().out
    assert "gradient_checkpointing True -> False" in replaced
    assert "activation_checkpointing" not in replaced
    assert not settings.gradient_checkpointing


GRPO = """
import json, os, sys
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed
from trl import GRPOConfig, GRPOTrainer

words = ["<pad>", "<eos>", "<unk>", *"abcdefghij"]
model = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
model.pre_tokenizer = pre_tokenizers.Whitespace()
special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>", "padding_side": "left"}
tokenizer = PreTrainedTokenizerFast(tokenizer_object=model, **special)
generated = []

def reward(completions, **rest):
    generated.append(len(completions))
    return [float(text.count("a")) for text in completions]

set_seed(0)
rows = [{"prompt": " ".join("abcdefghij"[(row + word) % 10] for word in range(8))} for row in range(64)]
sizes = {"vocab_size": 16, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
args = GRPOConfig(
    output_dir="out", max_steps=4, per_device_train_batch_size=2, gradient_accumulation_steps=4, steps_per_generation=4,
    num_generations=4, max_completion_length=12, report_to="none", save_strategy="no", logging_steps=1, use_cpu=True,
    bf16=False, learning_rate=1e-3, gradient_checkpointing=False,
)
trainer = GRPOTrainer(
    model=GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=1, eos_token_id=1)), args=args, reward_funcs=reward,
    train_dataset=Dataset.from_list(rows), processing_class=tokenizer,
)
trainer.train()
if os.environ["RANK"] == "0":
    names = ("loss", "reward", "reward_std", "completions/mean_length", "num_tokens", "step")
    log = [{name: entry.get(name) for name in names} for entry in trainer.state.log_history]
    json.dump({"log": log, "generated": generated, "batch": trainer.args.generation_batch_size}, open(sys.argv[1], "w"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2", "zero3"])
def test_grpo_generates_and_learns_as_the_script_does_alone(strategy: str, tmp_path: Path) -> None:
    """Micro-batch 2 x accumulation 4 on two ranks: a generation of 16 for every optimizer step, never another."""
    pytest.importorskip("trl")
    script = tmp_path / "grpo.py"
    script.write_text(GRPO, encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script), "alone.json"]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    subprocess.run(torchrun, cwd=tmp_path, env=environment, check=True, capture_output=True)
    finished = run("--nproc", "2", "--strategy", strategy, "--json", script, "planned.json", cwd=tmp_path)
    assert finished.status == 0, finished.err
    alone, planned = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("alone", "planned"))
    assert (planned["generated"], planned["batch"]) == (alone["generated"], 16) == ([8] * 4, 16)
    assert len(planned["log"]) == len(alone["log"]) == 5
    for mine, its in zip(planned["log"][:4], alone["log"][:4], strict=True):
        assert mine["loss"] == pytest.approx(its["loss"], rel=1e-4, abs=1e-6)
        assert {name: value for name, value in mine.items() if name != "loss"} == {
            name: value for name, value in its.items() if name != "loss"
        }
    plan = finished.json["plan"]
    assert (plan["plan"]["micro_batch_size"], plan["plan"]["gradient_accumulation_steps"]) == (2, 4)
    assert (plan["plan"]["sequence_length"], plan["workload"]["prompts_per_step"]) == (20, 4)
