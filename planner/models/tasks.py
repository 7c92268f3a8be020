"""What a model is usually trained for, and on how long samples."""

from __future__ import annotations

from planner.models.facts import ModelFacts
from planner.vocabulary import TASKS, Task

_TASKS: dict[str, Task] = {
    "decoder": "causal-lm",
    "vision-language": "causal-lm",
    "encoder": "masked-lm",
    "encoder-decoder": "seq2seq",
    "speech-encoder-decoder": "seq2seq",
    "vision": "image-cls",
    "vision-text": "image-cls",
    "custom": "causal-lm",
}
_OTHER_TASKS: dict[str, tuple[Task, ...]] = {
    "decoder": ("seq-cls",),
    "encoder": ("seq-cls",),
    "encoder-decoder": ("seq-cls",),
}
"""Tasks beside the usual one that transformers has heads for; nothing is known of what a custom module does."""
LONGEST_DEFAULT = {"decoder": 2048, "vision-language": 2048, "custom": 2048}
"""Sequence length planned for when none is asked: common in pre-training; encoders and encoder-decoders take 512."""


def default_task(facts: ModelFacts) -> Task:
    """The task a model of this kind is trained for unless another is named; a classifier's class says so itself."""
    if facts.kind in ("encoder", "decoder") and facts.architecture.endswith(("Classification", "ForQuestionAnswering")):
        return "seq-cls"
    return _TASKS[facts.kind]


def possible_tasks(facts: ModelFacts) -> tuple[Task, ...]:
    """The tasks that models of this kind can be trained for, the usual one first."""
    return TASKS if facts.kind == "custom" else (_TASKS[facts.kind], *_OTHER_TASKS.get(facts.kind, ()))


def default_sequence_length(facts: ModelFacts) -> int:
    """Tokens per sample: 2048 for decoders, 512 for the rest, never more than the model's positions.

    Images take their patches and the class token, speech models their decoder's positions.
    """
    if facts.kind == "vision":
        return (facts.image_size // facts.patch_size) ** 2 + 1
    if facts.max_target_positions:
        return facts.max_target_positions
    positions = facts.max_position_embeddings or (facts.text.max_position_embeddings if facts.text else 0)
    return min(LONGEST_DEFAULT.get(facts.kind, 512), positions or 1 << 30)
