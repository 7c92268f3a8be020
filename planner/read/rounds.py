"""Rounds of generation, as the trainers of GRPO and PPO write them: prompts, completions, and where they are generated.

huggingface/trl@f2cd5771 `trl/trainer/grpo_config.py`, modelscope/ms-swift@3602360a `swift/arguments/rlhf_args.py`,
volcengine/verl@b178a3cd `verl/trainer/config/_generated_ppo_trainer.yaml` and `rollout/rollout.yaml`,
NVIDIA-NeMo/RL@7ea279ab `examples/configs/grpo_math_1B.yaml`, OpenRLHF/OpenRLHF@3c3be623
`openrlhf/cli/train_ppo_ray.py`.
"""

from __future__ import annotations

from planner import vocabulary as words
from planner.read.form import Notebook
from planner.read.trainers import default_of

ROUND = "its part of a round of generation is not counted"
"""Why a key of generation that no estimate follows may matter."""
APART = "gpus_apart"
"""The answer that says how many GPUs generate beside those that the launcher, or the config, counts for training."""
_TASKS: dict[str, words.Task] = {
    "ppo": "ppo",
    **dict.fromkeys(("grpo", "rloo", "gspo", "reinforce", "dapo", "cispo", "remax"), "grpo"),
}


_USUAL_PROMPT = 512
"""Tokens of a prompt where nothing says how many (TRL's `max_prompt_length` as long as it had one)."""


def counts_rounds(word: str) -> bool:
    """Return whether a method's word is one whose rounds TRL's keys, and ms-swift's, describe; PPO has others."""
    return word in _TASKS and word != "ppo"


def read_rounds(book: Notebook, trainer: str, key: str, word: str) -> None:
    """Fill in task and rounds of a method that generates; completions are counted at their longest.

    Raises:
        BrokenFile: a value is no number, or none that its key can have.
    """
    book.answer("task", _TASKS[word], key)
    if trainer in ("trl", "ms-swift"):
        _read_trl(book, trainer)
    elif trainer == "verl":
        _read_verl(book)
    elif trainer == "nemo-rl":
        _read_nemo(book)
    else:
        _read_openrlhf(book)
    prompt, completion = book.answers.get("prompt_len"), book.answers.get("completion_len")
    if completion is not None:
        book.answers["seq_len"] = None if prompt is None else prompt + int(completion)
    book.assume("completions are counted at their longest, as no file says how long they are on average", key)
    if word == "ppo" or _TASKS[word] == "grpo":
        book.assume("a reward model is not counted beside the trained one", key)


def _lengths(book: Notebook, prompt: int | None, completion: int | None, *keys: str) -> None:
    if prompt is not None:
        book.answer("prompt_len", prompt, *keys[:1])
    if completion is not None:
        book.answer("completion_len", str(completion), *keys[1:])


def _number(book: Notebook, field: str, key: str, default: int | None) -> int | None:
    value = book.positive(key, default)
    if value is not None:
        book.answer(field, value, key)
    return value


def _beta(book: Notebook, key: str, default: float) -> None:
    value = book.number(key, default)
    book.answer("beta", float(value or 0), key)


def _share(book: Notebook, key: str, default: float) -> None:
    book.answer("rollout_memory", float(book.number(key, default) or default), key)


def _apart(book: Notebook, gpus: int, per_engine: int, *keys: str) -> None:
    """Count GPUs that only generate, beside those that train."""
    book.answer("rollout", "server", *keys)
    book.answer("rollout_gpus", max(gpus // per_engine, 1) * per_engine, *keys)


def _read_trl(book: Notebook, trainer: str) -> None:
    completion = book.positive("max_completion_length", default_of("trl", "max_completion_length"))
    _lengths(book, book.positive("max_prompt_length"), completion, "max_prompt_length", "max_completion_length")
    generations = _number(book, "generations", "num_generations", default_of("trl", "num_generations")) or 1
    _number(book, "num_iterations", "num_iterations", 1)
    _beta(book, "beta", 0.04 if trainer == "ms-swift" else 0.0)
    together = book.positive("generation_batch_size")
    if together is not None:
        book.answer("prompts_per_step", max(together // generations, 1), "generation_batch_size")
    elif (steps := book.positive("steps_per_generation")) is not None:
        book.answer("steps_per_generation", steps, "steps_per_generation")
    if not book.flag("use_vllm", bool(default_of(trainer, "use_vllm"))):
        book.answer("rollout", "hf", "use_vllm")
        return
    keys = ("use_vllm", "vllm_mode")
    per_engine = _number(book, "rollout_tp", "vllm_tensor_parallel_size", 1) or 1
    if book.word("vllm_mode", "colocate") == "colocate":
        book.answer("rollout", "colocate", *keys)
        _share(book, "vllm_gpu_memory_utilization", float(default_of(trainer, "vllm_gpu_memory_utilization")))
        sleeps = "sleep_level" in book if trainer == "ms-swift" else book.flag("vllm_enable_sleep_mode")
        book.answer("rollout_sleep", sleeps, "vllm_enable_sleep_mode", "sleep_level")
        return
    _apart(book, per_engine, per_engine, *keys)
    book.answers[APART] = per_engine
    book.assume(f"the server of completions is counted as one engine of {per_engine} GPUs of its own", "vllm_mode")


def _read_verl(book: Notebook) -> None:
    actor, rollout = "actor_rollout_ref.actor.", "actor_rollout_ref.rollout."
    keys = ("data.max_prompt_length", "data.max_response_length")
    _lengths(book, book.positive(keys[0], 512), book.positive(keys[1], 512), *keys)
    _number(book, "generations", f"{rollout}n", 1)
    _number(book, "prompts_per_step", "data.train_batch_size", 1024)
    _number(book, "num_iterations", f"{actor}ppo_epochs", 1)
    if book.flag(f"{actor}use_kl_loss"):
        _beta(book, f"{actor}kl_loss_coef", 0.001)
        book.become("beta", book.answers["beta"], f"{actor}use_kl_loss")
    else:
        in_reward = book.flag("algorithm.use_kl_in_reward")
        _beta(book, "algorithm.kl_ctrl.kl_coef", 0.001)
        book.answers["beta"] = book.answers["beta"] if in_reward else 0.0
        book.become("beta", book.answers["beta"], f"{actor}use_kl_loss", "algorithm.use_kl_in_reward")
    book.answer("rollout", "colocate", f"{rollout}name", f"{rollout}mode")
    _number(book, "rollout_tp", f"{rollout}tensor_model_parallel_size", 2)
    _share(book, f"{rollout}gpu_memory_utilization", 0.5)
    book.answer("rollout_sleep", book.flag(f"{rollout}free_cache_engine", True), f"{rollout}free_cache_engine")
    book.answers.setdefault("loss", "plain")


def _read_nemo(book: Notebook) -> None:
    total, generation = book.answers.get("seq_len"), "policy.generation."
    completion = book.positive(f"{generation}max_new_tokens", total)
    prompt = book.positive("data.max_input_seq_length")
    if total is not None and completion is not None and completion < total:
        _lengths(book, total - completion, completion, "data.max_input_seq_length", f"{generation}max_new_tokens")
    else:
        book.become("seq_len", total, f"{generation}max_new_tokens")
        book.become("seq_len", prompt, "data.max_input_seq_length")
        if total is not None and total <= 2 * _USUAL_PROMPT:
            book.answer("prompt_len", total // 2)
            book.assume("half of a sample is counted as its prompt, as no key says how long prompts are")
    _number(book, "generations", "grpo.num_generations_per_prompt", 16)
    _number(book, "prompts_per_step", "grpo.num_prompts_per_step", 32)
    _beta(book, "loss_fn.reference_policy_kl_penalty", 0.01)
    _number(book, "rollout_tp", f"{generation}vllm_cfg.tensor_parallel_size", 1)
    per_engine = book.answers["rollout_tp"]
    if book.flag(f"{generation}colocated.enabled", True):
        book.answer("rollout", "colocate", f"{generation}colocated.enabled")
        _share(book, f"{generation}vllm_cfg.gpu_memory_utilization", 0.6)
        book.answer("rollout_sleep", True)
    else:
        resources = f"{generation}colocated.resources."
        per_node = book.positive(f"{resources}gpus_per_node") or book.positive("cluster.gpus_per_node", 8) or 8
        gpus = per_node * (book.positive(f"{resources}num_nodes", 1) or 1)
        names = (f"{generation}colocated.enabled", f"{resources}gpus_per_node", f"{resources}num_nodes")
        _apart(book, gpus, per_engine, *names)
    if book.flag("grpo.async_grpo.enabled"):
        keys = ("grpo.async_grpo.max_trajectory_age_steps", "grpo.async_grpo.enabled")
        book.answer("steps_off", book.positive(keys[0], 1), *keys)
    book.answers.setdefault("loss", "plain")


def _read_openrlhf(book: Notebook) -> None:
    keys = ("data.prompt_max_len", "rollout.max_new_tokens")
    completion, whole = book.positive(keys[1], 1024) or 1024, book.positive("data.max_len") or 0
    if keys[0] not in book and whole > completion:  # since 0.9: of prompt and completion together
        _lengths(book, whole - completion, completion, "data.max_len", keys[1])
    else:
        _lengths(book, book.positive(keys[0], 1024), completion, *keys)
    _number(book, "generations", "rollout.n_samples_per_prompt", 1)
    _number(book, "prompts_per_step", "rollout.batch_size", default_of("openrlhf", "rollout.batch_size"))
    _beta(book, "algo.kl.init_coef", float(default_of("openrlhf", "algo.kl.init_coef")))
    per_engine = _number(book, "rollout_tp", "vllm.tensor_parallel_size", 1) or 1
    if book.flag("train.colocate_all"):
        book.answer("rollout", "colocate", "train.colocate_all")
        _share(book, "vllm.gpu_memory_utilization", float(default_of("openrlhf", "vllm.gpu_memory_utilization")))
        book.answer("rollout_sleep", book.flag("vllm.enable_sleep"), "vllm.enable_sleep")
    elif (engines := book.positive("vllm.num_engines")) is not None:
        _apart(book, engines * per_engine, per_engine, "vllm.num_engines")
        book.answers[APART] = engines * per_engine
        book.assume("reference and critic are counted on the actor's GPUs", "vllm.num_engines")
    book.answers.setdefault("loss", "plain")
