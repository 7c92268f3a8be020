"""Which strategies each kind of script can run."""

from __future__ import annotations

from hardware_db.errors import DsplanError
from planner import vocabulary as words
from strategies.launch.recognise import ScriptKind

_WHO: dict[str, str] = {
    "huggingface": "HF Trainer",
    "accelerate": "accelerate",
    "deepspeed": "DeepSpeed",
}

# deepspeed.initialize knows data parallelism (stage 0) and its own ZeRO; accelerate wires up the rest itself.
ACCEPTED: dict[ScriptKind, tuple[str, ...]] = {
    "dsplan": words.STRATEGIES,
    "huggingface": words.STRATEGIES,
    "accelerate": words.STRATEGIES,
    "deepspeed": ("single", "ddp", "zero1", "zero2", "zero3"),
    "plain": words.STRATEGIES,
}


def check_strategy(kind: ScriptKind, strategy: str) -> None:
    """Refuse a strategy that the script's library cannot run.

    Raises:
        DsplanError: names the strategies that it can.
    """
    if strategy not in ACCEPTED[kind]:
        raise DsplanError(
            f"a script that uses {_WHO[kind]} cannot run {strategy}; it can run {', '.join(ACCEPTED[kind])}"
        )
