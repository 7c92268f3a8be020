"""The workload: the task, and its batch and sequence sizes."""

from __future__ import annotations

from dataclasses import dataclass

from planner import vocabulary as words
from planner.errors import ContradictoryRequest


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One training job, independent of how it is spread over devices.

    `sequence_length` is tokens per sample (patches for images, decoder tokens for speech), `source_length` the
    encoder's length in encoder-decoders. `max_memory_bytes` caps every device, `host_memory_bytes` every node.

    Evaluation and saving count for the peak where they are asked for. `evaluation_batch_size` is samples per device and
    evaluation step, 0 where none is asked for; the logits of `evaluation_steps_kept` steps stay on the device at once
    (HF Trainer's `eval_accumulation_steps`; without it, every step of the evaluation), 0 where only the loss is kept.
    `save` says whether a checkpoint is assembled on rank 0 (`full`) or every rank writes its own part (`sharded`).

    Raises:
        ContradictoryRequest: a number is not positive or a word is not in the vocabulary.
    """

    task: words.Task
    sequence_length: int
    global_batch_size: int
    precision: words.Precision = "bf16"
    optimizer: words.Optimizer = "adamw"
    attention: words.Attention = "sdpa"
    source_length: int = 0
    max_memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    evaluation_batch_size: int = 0
    evaluation_steps_kept: int = 0
    save: words.Save = "none"

    def __post_init__(self) -> None:
        for name in ("sequence_length", "global_batch_size"):
            if getattr(self, name) < 1:
                raise ContradictoryRequest(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("evaluation_batch_size", "evaluation_steps_kept"):
            if getattr(self, name) < 0:
                raise ContradictoryRequest(f"{name} is {getattr(self, name)}; it must be at least 0")
        if self.evaluation_steps_kept and not self.evaluation_batch_size:
            raise ContradictoryRequest(
                f"evaluation_steps_kept is {self.evaluation_steps_kept} without evaluation_batch_size; give both"
            )
        for name, allowed in (
            ("task", words.TASKS),
            ("precision", words.PRECISIONS),
            ("optimizer", words.OPTIMIZERS),
            ("attention", words.ATTENTIONS),
            ("save", words.SAVES),
        ):
            if getattr(self, name) not in allowed:
                raise ContradictoryRequest(f"{name} {getattr(self, name)!r} is not one of {', '.join(allowed)}")
