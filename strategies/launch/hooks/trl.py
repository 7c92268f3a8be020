"""TRL's trainers read while they are made: the task, the lengths of its samples, and the rounds that it generates.

TRL builds on HF Trainer, whose hook comes here with the trainer and its arguments (TRL 1.16, `trl/trainer`).
Nothing of TRL is imported: a class is known by its name and its package.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from planner import vocabulary as words
from strategies.tracing.example import first_samples

_LOG = logging.getLogger(__name__)

TASKS: Mapping[str, words.Task] = {
    "SFTTrainer": "sft",
    "DPOTrainer": "dpo",
    "KTOTrainer": "kto",
    "ORPOTrainer": "orpo",
    "CPOTrainer": "orpo",
    "RewardTrainer": "reward",
    "GRPOTrainer": "grpo",
    "RLOOTrainer": "grpo",
}
"""Trainers whose memory and time are known, by the planner's tasks; CPO's SimPO has pairs and no reference, as ORPO."""
WHOLE_BATCHES = frozenset(
    {"KTOTrainer", "GRPOTrainer", "RLOOTrainer", "OnlineDPOTrainer", "NashMDTrainer", "XPOTrainer"}
)
"""Trainers that mean something by a micro-batch: a part of a generation, or the completions that KTO mismatches."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrlWork:
    """The work of a TRL trainer."""

    task: words.Task | None
    """None for a trainer of which only its micro-batches are known to matter."""
    options: Mapping[str, Any]
    """Fields of the planner's options that say the rest."""
    steps_per_generation: int | None = None
    """Micro-batches of one generation."""
    keeps_micro_batch: bool = False
    """Another micro-batch would change what is trained."""


def trl_work(trainer: Any, settings: Any, data: Any, processing: Any) -> TrlWork | None:
    """Return the work of a trainer of TRL's; None for any other trainer."""
    names = [base.__name__ for base in type(trainer).__mro__ if base.__module__.partition(".")[0] == "trl"]
    task = next((TASKS[name] for name in names if name in TASKS), None)
    keeps = any(name in WHOLE_BATCHES for name in names)
    if task is None:
        return TrlWork(task=None, options={}, keeps_micro_batch=True) if keeps else None
    if task == "grpo":
        return _generating(settings, data, processing)
    precomputes = bool(getattr(settings, "precompute_ref_log_probs", False))
    options = {"precompute_ref": precomputes} if task in words.REFERRING else {}
    return TrlWork(task=task, options=options, keeps_micro_batch=keeps)


def _generating(settings: Any, data: Any, processing: Any) -> TrlWork:
    """Return the rounds of GRPO or RLOO, which generate to the longest completion that they allow."""
    engine = bool(getattr(settings, "use_vllm", False))
    mode = getattr(settings, "vllm_mode", "colocate")
    options: dict[str, Any] = {
        "prompt_len": _prompt_tokens(data, processing),
        "completion_len": str(settings.max_completion_length),
        "generations": settings.num_generations,
        "num_iterations": settings.num_iterations,
        "beta": float(settings.beta),
        "rollout": "hf" if not engine else "server" if mode == "server" else "colocate",
    }
    if engine and mode == "server":
        # Its GPUs are in another job, of which the arguments say nothing: one is the least.
        options |= {"rollout_gpus": 1}
    elif engine:
        options |= {
            "rollout_tp": settings.vllm_tensor_parallel_size,
            "rollout_memory": settings.vllm_gpu_memory_utilization,
            "rollout_sleep": settings.vllm_enable_sleep_mode,
        }
    return TrlWork(
        task="grpo",
        options=options,
        steps_per_generation=settings.steps_per_generation,
        keeps_micro_batch=True,
    )


def _prompt_tokens(data: Any, processing: Any) -> int | None:
    """Return the tokens of the longest of the first prompts, by the trainer's tokenizer; None without any."""
    samples = (sample for sample in first_samples(data) if isinstance(sample, Mapping))
    prompts = [sample["prompt"] for sample in samples if "prompt" in sample]
    try:
        return max((len(_ids(prompt, processing)) for prompt in prompts), default=0) or None
    except Exception:
        # The script's own tokenizer and templates, which may raise anything; a usual length is planned for then.
        _LOG.debug("the first prompts cannot be made tokens of", exc_info=True)
        return None


def _ids(prompt: Any, processing: Any) -> Sequence[int]:
    if isinstance(prompt, str):
        return list(processing(text=prompt)["input_ids"])
    rendered = processing.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=True)
    return list(rendered["input_ids"])
