"""Tasks that a model is usually trained for, and how long their samples are."""

from __future__ import annotations

import re
from dataclasses import replace

from planner.models.counting.count import active_parameters, count_parameters
from planner.models.facts import ModelFacts
from planner.vocabulary import POST_TRAINING, TASKS, Task

_TASKS: dict[str, Task] = {
    "decoder": "causal-lm",
    "vision-language": "causal-lm",
    "encoder": "masked-lm",
    "encoder-decoder": "seq2seq",
    "speech-encoder-decoder": "seq2seq",
    "vision": "image-cls",
    "vision-text": "image-cls",
    "diffusion": "diffusion",
    "custom": "causal-lm",
}
_OTHER_TASKS: dict[str, tuple[Task, ...]] = {
    "decoder": ("seq-cls", *POST_TRAINING),
    "vision-language": tuple(task for task in POST_TRAINING if task != "reward"),
    "encoder": ("seq-cls",),
    "encoder-decoder": ("seq-cls",),
}
"""Tasks beside the usual one that transformers has heads for; nothing is known of what a custom module does."""
_CLASSIFIERS = ("Classification", "ForQuestionAnswering")
_LANGUAGE_HEAD = re.compile(r"(ForCausalLM|LMHeadModel|ForMaskedLM|ForPreTraining|ForConditionalGeneration|Model)$")
LONGEST_DEFAULT = {"decoder": 2048, "vision-language": 2048, "custom": 2048}
"""Sequence length planned for when none is asked: common in pre-training; encoders and encoder-decoders take 512."""


def default_task(facts: ModelFacts) -> Task:
    """Return the task that a model of this kind is trained for unless another is named; a classifier's class says."""
    if facts.kind in ("encoder", "decoder") and facts.architecture.endswith(_CLASSIFIERS):
        return "seq-cls"
    return _TASKS[facts.kind]


def possible_tasks(facts: ModelFacts) -> tuple[Task, ...]:
    """Return the tasks that models of this kind can be trained for, the usual one first."""
    if facts.recorded_as:
        return (_TASKS[facts.kind],)
    return TASKS if facts.kind == "custom" else (_TASKS[facts.kind], *_OTHER_TASKS.get(facts.kind, ()))


def facts_for_task(facts: ModelFacts, task: Task) -> ModelFacts:
    """Return the facts of the class that has the head of `task`, where the model's own class has another.

    A classifier of text has a small head on one position in place of the one over the vocabulary, and no table that the
    head shares; two labels, transformers' default, where the model says nothing of them. A
    reward model has one.
    """
    if (
        task not in ("seq-cls", "reward")
        or facts.measured_counts is not None
        or facts.architecture.endswith(_CLASSIFIERS)
    ):
        return facts
    classifier = replace(
        facts,
        architecture=_LANGUAGE_HEAD.sub("", facts.architecture) + "ForSequenceClassification",
        num_labels=1 if task == "reward" else max(facts.num_labels, 2),
        tie_word_embeddings=facts.kind == "encoder-decoder",
        mlm_transform=False,
        lm_head_bias=False,
        pooler=False,
    )
    counts = count_parameters(classifier)
    return replace(classifier, parameters=counts.total, active_parameters=active_parameters(classifier, counts))


def default_sequence_length(facts: ModelFacts) -> int:
    """Tokens per sample: 2048 for decoders, 512 for the rest, never more than the model's positions.

    Images take their patches and the class token, denoisers their patches, speech models their decoder's positions.
    """
    if facts.kind == "vision":
        return (facts.image_size // facts.patch_size) ** 2 + 1
    if facts.kind == "diffusion":
        return (facts.image_size // facts.patch_size) ** 2
    if facts.max_target_positions:
        return facts.max_target_positions
    positions = facts.max_position_embeddings or (facts.text.max_position_embeddings if facts.text else 0)
    return min(LONGEST_DEFAULT.get(facts.kind, 512), positions or 1 << 30)
