"""Which strategies each kind of script can run."""

from __future__ import annotations

from hardware_db.errors import DsplanError
from planner import vocabulary as words
from strategies.launch.settings import ScriptKind

_WHO: dict[str, str] = {
    "huggingface": "HF Trainer",
    "accelerate": "accelerate",
    "deepspeed": "DeepSpeed",
}

# accelerate 1.15, which HF Trainer trains with, knows DDP as its only way to spread a model over CPU ranks.
_ACCELERATE_ON_CPU: tuple[words.Strategy, ...] = ("single", "ddp")
# deepspeed.initialize knows data parallelism (stage 0) and its own ZeRO.
_DEEPSPEED: tuple[words.Strategy, ...] = ("single", "ddp", "zero1", "zero2", "zero3")


def accepted(kind: ScriptKind, *, gpus: bool) -> tuple[words.Strategy, ...]:
    """The strategies that a kind of script can run, on GPUs or on CPU ranks."""
    if kind in ("huggingface", "accelerate") and not gpus:
        return _ACCELERATE_ON_CPU
    if kind == "huggingface":
        # TrainingArguments takes hsdp as an object only, which no file of a plan can hold.
        return tuple(name for name in words.STRATEGIES if name != "hsdp")
    return _DEEPSPEED if kind == "deepspeed" else words.STRATEGIES


def check_strategy(kind: ScriptKind, strategy: str, *, gpus: bool) -> None:
    """Refuse a strategy that the script's library cannot run.

    Raises:
        DsplanError: names the strategies that it can.
    """
    possible = accepted(kind, gpus=gpus)
    if strategy not in possible:
        where = "on GPUs" if gpus else "without a GPU"
        raise DsplanError(f"{_WHO[kind]} cannot run {strategy} {where}; it can run {', '.join(possible)}")
