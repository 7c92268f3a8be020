"""A question about post-training, its defaults filled in: lengths, batches of generation and of optimizer steps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hardware_db.errors import DsplanError
from hardware_db.handed_in import quote
from hardware_db.records import dataclass
from hardware_db.units import parse_length
from planner import limits
from planner import vocabulary as words
from planner.errors import ContradictoryRequest
from planner.types.cluster import Cluster
from planner.types.post_training import PostTraining

PROMPT_LENGTH = 512
"""Tokens of a prompt where nothing is said."""
COMPLETION_LENGTH = 256
"""TRL's `max_completion_length`."""
GENERATIONS = 8
"""TRL's `num_generations`."""
ROLLOUT_MEMORY: dict[words.Rollout, float] = {"hf": 0.3, "colocate": 0.3, "server": 0.9}
"""Share of a GPU that an engine takes: TRL's `vllm_gpu_memory_utilization` beside training, vLLM's own elsewhere."""
BETA: dict[words.Task, float] = {"grpo": 0.0, "ppo": 0.05}
"""Weight of the reference model: TRL's GRPO has none by default, and its PPO 0.05 (`kl_coef`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PostTrainingOptions:
    """A person's words on post-training; a field is named as its flag, and None if they did not say."""

    prompt_len: int | None = None
    completion_len: str | None = None
    generations: int | None = None
    prompts_per_step: int | None = None
    num_iterations: int | None = None
    beta: float | None = None
    rollout: words.Rollout | None = None
    rollout_gpus: int | None = None
    rollout_tp: int | None = None
    rollout_memory: float | None = None
    rollout_sleep: bool | None = None
    steps_off: int | None = None
    precompute_ref: bool = False


_GENERATION = (
    *("generations", "prompts_per_step", "num_iterations", "beta", "rollout", "rollout_gpus", "rollout_tp"),
    *("rollout_memory", "rollout_sleep", "steps_off"),
)
_WEIGHTED: tuple[words.Task, ...] = ("dpo", "kto", "orpo", *words.GENERATING)
"""Tasks whose loss weighs something by `beta`."""
_TASKS: dict[str, tuple[words.Task, ...]] = {
    "prompt_len": words.POST_TRAINING,
    "completion_len": words.POST_TRAINING,
    "precompute_ref": words.REFERRING,
    **dict.fromkeys(_GENERATION, words.GENERATING),
    "beta": _WEIGHTED,
}
"""Tasks that take a flag, by its field."""
_UNSAID = PostTrainingOptions()
_SMALLEST_GROUP = 2
"""Completions of a prompt that GRPO compares: TRL's `GRPOConfig` refuses fewer, as one is its own mean."""
_LIMITS = {
    "prompt_len": limits.TOKENS,
    "generations": limits.SAMPLES,
    "prompts_per_step": limits.SAMPLES,
    "num_iterations": limits.SAMPLES,
    "rollout_gpus": limits.GPUS,
    "rollout_tp": limits.GPUS,
    "rollout_memory": limits.SHARE,
}


def usual_loss(task: words.Task, code: str) -> words.Loss:
    """Return how the trainer of a task makes a loss of logits: TRL's in tiles, where its trainers run."""
    tiled = ("sft", "dpo", "kto", "grpo")
    return "tiled" if task in tiled and code == "transformers" else "plain"


def lengths_of(
    options: PostTrainingOptions, task: words.Task, total: int | None, usual: int, defaults: list[str]
) -> tuple[int, int, int] | None:
    """Return tokens of a prompt, and of a completion on average and at most; None where nothing is said of them.

    `total` are those of a whole sample where they were given, `usual` where nothing else says.

    Raises:
        ContradictoryRequest: they do not add up to `total`, leave nothing for the completion, or a flag is for another
            task.
    """
    _require_task(options, task)
    is_given = options.prompt_len is not None or options.completion_len is not None
    if task not in words.POST_TRAINING or (not is_given and task not in words.GENERATING):
        return None
    prompt, (mean, longest) = options.prompt_len, _completion(options.completion_len)
    if longest is None:
        rest = None if total is None else total - (PROMPT_LENGTH if prompt is None else prompt)
        if rest is None and task not in words.GENERATING:
            rest = usual - (prompt or 0)
        longest = mean = COMPLETION_LENGTH if rest is None else rest
        if longest < 1:
            raise ContradictoryRequest(f"a prompt of {prompt or PROMPT_LENGTH} tokens leaves none for a completion")
        defaults.append(f"completions of {longest} tokens (--completion-len)")
    if prompt is None:
        prompt = PROMPT_LENGTH if total is None else total - longest
        defaults.append(f"prompts of {prompt} tokens (--prompt-len)")
    if total not in (None, prompt + longest):
        raise ContradictoryRequest(
            f"--seq-len {total} is not the prompt's {prompt} and the longest completion's {longest} tokens; leave it"
            " out"
        )
    return prompt, mean or longest, longest


def _completion(text: str | None) -> tuple[int | None, int | None]:
    """Return the mean and the longest of `MEAN[:MAX]`; without a maximum all are as long."""
    if text is None:
        return None, None
    mean, _, longest = text.partition(":")
    try:
        numbers = int(parse_length(mean)), int(parse_length(longest or mean))
    except (DsplanError, ValueError):
        numbers = (0, 0)
    if not all(map(limits.TOKENS.allows, numbers)) or numbers[0] > numbers[1]:
        raise ContradictoryRequest(
            f"--completion-len {quote(text)} is not MEAN or MEAN:MAX in tokens; write 1k or 1200:4k"
        )
    return numbers


def post_training(
    options: PostTrainingOptions,
    task: words.Task,
    lengths: tuple[int, int, int] | None,
    *,
    total: int,
    batch: int,
    heads: int,
    gpus: int,
) -> PostTraining | None:
    """Return what post-training adds to a workload of `total` tokens a sample and `batch` samples a step.

    `heads` are those of a layer's attention, `gpus` those that train.

    Raises:
        ContradictoryRequest: a number is out of range, or engines cannot be of so many GPUs.
    """
    if task not in words.POST_TRAINING:
        return None
    for name, limit in _LIMITS.items():
        limit.check(_flag(name), getattr(options, name))
    prompt, mean, longest = lengths or (0, total, total)
    if task not in words.GENERATING:
        return PostTraining(
            prompt_length=prompt,
            completion_length=mean,
            completion_max=longest,
            prompts_per_step=batch,
            beta=options.beta or 0.0,
            precompute_reference=options.precompute_ref,
        )
    require_site(options)
    rollout: words.Rollout = options.rollout or ("server" if options.rollout_gpus else "hf")
    if rollout == "server" and not options.rollout_gpus:
        raise ContradictoryRequest("--rollout server generates on GPUs of its own; say how many with --rollout-gpus")
    _require_engines(options.rollout_tp or 1, heads, options.rollout_gpus or gpus, trains=rollout != "server")
    generations = GENERATIONS if options.generations is None else options.generations
    post = PostTraining(
        prompt_length=prompt,
        completion_length=mean,
        completion_max=longest,
        generations=generations,
        prompts_per_step=options.prompts_per_step or max(batch // generations, 1),
        num_iterations=options.num_iterations or 1,
        beta=BETA[task] if options.beta is None else options.beta,
        rollout=rollout,
        rollout_gpus=options.rollout_gpus or 0,
        rollout_tp=options.rollout_tp or 1,
        rollout_memory=options.rollout_memory or ROLLOUT_MEMORY[rollout],
        rollout_sleep=bool(options.rollout_sleep),
        steps_off=options.steps_off or 0,
    )
    require_whole_round(post, batch)
    return post


def _require_task(options: PostTrainingOptions, task: words.Task) -> None:
    """Refuse a flag that the task does not take."""
    for name, tasks in _TASKS.items():
        if getattr(options, name) != getattr(_UNSAID, name) and task not in tasks:
            raise ContradictoryRequest(f"{_flag(name)} is for --task {' or '.join(tasks)}, not {task}")


def require_site(options: PostTrainingOptions) -> None:
    """Refuse GPUs that only generate beside engines, or a model, that generate on those that train.

    Raises:
        ContradictoryRequest: it is so.
    """
    if options.rollout_gpus and options.rollout not in (None, "server"):
        raise ContradictoryRequest(
            f"--rollout-gpus {options.rollout_gpus} is for --rollout server, not {options.rollout}; drop one of the two"
        )


def _require_engines(tp: int, heads: int, gpus: int, *, trains: bool) -> None:
    """Refuse engines whose GPUs cannot share the heads evenly, as vLLM asks, or do not make up all that generate."""
    problem = None
    if heads % tp:
        problem = f"the {heads} attention heads, which an engine shares evenly"
    elif gpus % tp:
        where = "training and generation (--gpus)" if trains else "generation (--rollout-gpus)"
        problem = f"the {gpus} GPU{'s' * (gpus > 1)} of {where}"
    if problem is not None:
        sizes = [str(size) for size in range(1, gpus + 1) if heads % size == 0 and gpus % size == 0]
        choices = f"{', '.join(sizes[:-1])} or {sizes[-1]}" if len(sizes) > 1 else sizes[0]
        raise ContradictoryRequest(f"--rollout-tp {tp} does not divide {problem}; use {choices}")


def require_group(task: words.Task | None, generations: int | None) -> None:
    """Refuse one completion a prompt where completions of a prompt are compared.

    Raises:
        ContradictoryRequest: it is so.
    """
    if task == "grpo" and generations is not None and generations < _SMALLEST_GROUP:
        raise ContradictoryRequest(
            f"--generations {generations} leaves --task grpo nothing to compare a completion with;"
            f" give {_SMALLEST_GROUP} or more"
        )


def require_whole_round(post: PostTraining, batch: int) -> None:
    """Refuse a round whose samples do not make up optimizer steps of `batch` samples.

    Raises:
        ContradictoryRequest: it is so.
    """
    if post.samples * post.num_iterations % batch:
        raise ContradictoryRequest(
            f"{post.prompts_per_step} prompts x {post.generations} generations = {post.samples} samples are no whole"
            f" number of optimizer steps of {batch}; change --prompts-per-step, --generations or --global-batch"
        )


def usual_batch(options: PostTrainingOptions, task: words.Task, per_gpus: int) -> int:
    """Return the samples of an optimizer step where nothing is said of them: all of a round.

    `per_gpus` are those of the GPUs in other tasks, here in whole groups of generations.
    """
    if task not in words.GENERATING:
        return per_gpus
    generations = GENERATIONS if options.generations is None else options.generations
    if options.prompts_per_step is not None:
        return options.prompts_per_step * generations
    return -(-per_gpus // generations) * generations


def training_cluster(cluster: Cluster, options: PostTrainingOptions) -> Cluster:
    """Return the GPUs that are left to training where others generate: whole nodes first, else as many of each.

    Raises:
        ContradictoryRequest: none are left, or unequal nodes.
    """
    apart = options.rollout_gpus if options.rollout in (None, "server") else None
    if not apart:
        return cluster
    left = cluster.gpus - apart
    if left < 1:
        raise ContradictoryRequest(f"--rollout-gpus {apart} leaves none of {cluster.gpus} GPUs to train on")
    if left % cluster.gpus_per_node == 0:
        return replace(cluster, nodes=left // cluster.gpus_per_node)
    if left % cluster.nodes:
        raise ContradictoryRequest(
            f"--rollout-gpus {apart} of {cluster.nodes} nodes of {cluster.gpus_per_node} leaves nodes unequal; use a"
            f" multiple of {cluster.nodes} or of {cluster.gpus_per_node}"
        )
    return replace(cluster, gpus_per_node=left // cluster.nodes)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def with_rounds(
    post: PostTraining, *, batch: int, samples_per_micro_step: int, steps_per_generation: int | None, is_given: bool
) -> PostTraining:
    """Return the rounds of an exact configuration, whose micro-batches count a generation's samples.

    `samples_per_micro_step` are those of all ranks; `is_given` says that the prompts of a round were.

    Raises:
        ContradictoryRequest: the two ways to say it differ, or a round is no whole number of optimizer steps.
    """
    values: dict[str, Any] = {}
    if steps_per_generation is not None:
        samples = steps_per_generation * samples_per_micro_step
        if samples % post.generations or (is_given and samples != post.samples):
            raise ContradictoryRequest(
                f"--steps-per-generation {steps_per_generation} x {samples_per_micro_step} samples = {samples} are not"
                f" {post.prompts_per_step if is_given else 'whole'} prompts x {post.generations} generations"
            )
        values["prompts_per_step"] = samples // post.generations
    elif not is_given:
        return replace(post, prompts_per_step=-(-batch // post.generations))
    rounds = replace(post, **values)
    require_whole_round(rounds, batch)
    return rounds
