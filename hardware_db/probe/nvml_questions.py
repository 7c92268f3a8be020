"""Asking NVML so that every refusal becomes None and, for all the GPUs that share it, one sentence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hardware_db.probe import nvml_words as words

_Answer = TypeVar("_Answer")


@dataclass(slots=True)
class Questions:
    """Asks NVML one thing at a time about one GPU and keeps what it refused."""

    nvml: Any
    index: int
    lost: bool = False
    refusals: list[tuple[str, int]] = field(default_factory=list)

    def ask(self, what: str, call: Callable[[], _Answer], *, otherwise: _Answer | None = None) -> _Answer | None:
        """The answer; `otherwise` where the GPU does not support the question; None, noted, on any other refusal."""
        if self.lost:
            return None
        try:
            return call()
        except self.nvml.NVMLError as error:
            if error.value == words.NOT_SUPPORTED and otherwise is not None:
                return otherwise
            self.note(what, error.value)
        except self.nvml.NVMLLibraryMismatchError:
            self.refusals.append((what, 13))
        return None

    def note(self, what: str, code: int) -> None:
        """Keeps a refusal; after one that means the GPU is gone nothing more is asked of it."""
        self.lost = self.lost or code in words.LOST
        self.refusals.append((what, code))


def sentences(asked: list[Questions]) -> tuple[str, ...]:
    """One sentence per reason and set of refused questions, for all the GPUs that share it."""
    grouped: dict[tuple[int, tuple[str, ...]], list[int]] = {}
    for questions in asked:
        by_reason: dict[int, dict[str, None]] = {}
        for what, code in questions.refusals:
            by_reason.setdefault(code, {})[what] = None
        for code, refused in by_reason.items():
            grouped.setdefault((code, tuple(refused)), []).append(questions.index)
    return tuple(_sentence(code, refused, indexes) for (code, refused), indexes in grouped.items())


def _sentence(code: int, refused: tuple[str, ...], indexes: list[int]) -> str:
    who = "NVML" if indexes == [-1] else f"GPU {', '.join(map(str, indexes))}"
    reason = words.ERRORS.get(code, f"NVML error {code}")
    return f"{who} does not tell {', '.join(refused)}: {reason}"
