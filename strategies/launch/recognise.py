"""Which training library a script uses, read from its source without running it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from hardware_db.errors import BrokenFile, DsplanError
from planner import vocabulary as words
from strategies.run_directory.spec import ScriptKind

_TRAINER_NAMES = frozenset({"Trainer", "TrainingArguments", "Seq2SeqTrainer", "Seq2SeqTrainingArguments"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Script:
    """A training script: where it is, what it uses, and whether it accumulates gradients through accelerate."""

    path: Path
    kind: ScriptKind
    accumulates: bool = False


def recognise(path: Path) -> Script:
    """The kind of a script. The first of dsplan, HF Trainer, accelerate, DeepSpeed that it uses decides.

    Raises:
        BrokenFile: the file is missing, is not a file, or is not Python.
    """
    tree = _parse(path)
    imported = _imported_modules(tree)
    called = {name for node in ast.walk(tree) if isinstance(node, ast.Call) for name in _call_names(node)}
    if "dsplan" in imported:
        kind: ScriptKind = "dsplan"
    elif "transformers" in imported and any(name.rpartition(".")[2] in _TRAINER_NAMES for name in called):
        kind = "huggingface"
    elif "accelerate" in imported and any(name.rpartition(".")[2] == "Accelerator" for name in called):
        kind = "accelerate"
    elif "deepspeed" in imported and any(name.rpartition(".")[2] == "initialize" for name in called):
        kind = "deepspeed"
    else:
        kind = "plain"
    return Script(path=path, kind=kind, accumulates=any(name.endswith(".accumulate") for name in called))


def _parse(path: Path) -> ast.Module:
    if not path.exists():
        raise BrokenFile(path, "no such script", "name the Python file that trains your model")
    if not path.is_file():
        raise BrokenFile(path, "is not a file", "name the Python file that trains your model")
    try:
        return ast.parse(path.read_bytes(), filename=str(path))
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise BrokenFile(path, f"is not Python that this interpreter reads: {reason}{line}") from None
    except OSError as error:
        raise BrokenFile(path, f"cannot be read: {error.strerror}") from None


def _imported_modules(tree: ast.Module) -> set[str]:
    """Top-level packages that the script imports, wherever the import stands."""
    modules: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            modules.add(node.module.partition(".")[0])
    return modules


def _call_names(node: ast.Call) -> tuple[str, ...]:
    """The dotted name of what is called and of what is handed over (`HfArgumentParser((TrainingArguments,))`)."""
    names = [_dotted(node.func)]
    for argument in node.args:
        elements = argument.elts if isinstance(argument, (ast.Tuple, ast.List)) else [argument]
        names += [_dotted(element) for element in elements]
    return tuple(name for name in names if name)


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return ""


# Strategies that each kind of script can run.


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
