"""Claims on a run: the outermost user of a training library in this process trains. No torch.

A hook, or an entry of dsplan's own, puts its work into `use`:

    with claim.use("huggingface") as is_outermost:
        if not is_outermost:
            return original(*positional, **named)  # somebody else trains, and uses this library inside
        ...  # make a plan, apply it, then
        claim.take_over(is_planned=True)  # this library's hook measures and follows the plan

The first use claims for the whole process. Uses of other libraries pass through from then on, and so do uses of the
same library inside the block: the DDP inside accelerate, the DeepSpeed inside Trainer, the DDP of our own engine. A
claim that is not taken over leaves the measuring to torch's optimizer hooks (strategies/launch/hooks/observer.py).

The claim is written into the run directory, where the command reads it with `read_claim`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from strategies.run_directory.files import CLAIM_FILE, write_json
from strategies.run_directory.spec import SAVING, ScriptKind
from strategies.variables import RUN_DIRECTORY


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """The training in the ranks of a run, as they saw it."""

    kind: ScriptKind
    """The library whose user claimed the run; plain where a step was done and nobody had."""
    parameters: int | None = None
    """How many parameters are trained, where only an optimizer's steps were seen."""


_claim: Claim | None = None
_uses = _own_works = 0
_is_taken_over = _is_planned = False
_waiting: list[Callable[[ScriptKind], object]] = []


@contextmanager
def use(kind: ScriptKind) -> Iterator[bool]:
    """Use the library `kind`, and give whether this is the outermost use, which claims the run if nobody has."""
    global _uses
    is_outermost = may_claim(kind)
    if is_outermost:
        _note(kind)
    _uses += 1
    try:
        yield is_outermost
    finally:
        _uses -= 1


def may_claim(kind: ScriptKind) -> bool:
    """Return whether a use of the library now would be the outermost."""
    return _uses == 0 and _own_works == 0 and (_claim is None or _claim.kind in (kind, "plain"))


@contextmanager
def own_work() -> Iterator[None]:
    """Run dsplan's own work inside, as a micro-benchmark's optimizer steps: nobody trains, and nobody claims."""
    global _own_works
    _own_works += 1
    try:
        yield
    finally:
        _own_works -= 1


def is_own_work() -> bool:
    """Return whether what runs now is dsplan's own."""
    return _own_works > 0


def claimed() -> ScriptKind | None:
    """Return the kind of who claimed the run; None before."""
    return None if _claim is None else _claim.kind


def take_over(*, is_planned: bool) -> None:
    """Note that who claimed the run measures it from here on, and follows a plan or not."""
    global _is_taken_over, _is_planned
    _is_taken_over, _is_planned = True, _is_planned or is_planned


def is_taken_over() -> bool:
    """Return whether the steps are measured by who claimed the run."""
    return _is_taken_over


def is_planned() -> bool:
    """Return whether the training follows a plan."""
    return _is_planned


def once_claimed(callback: Callable[[ScriptKind], object]) -> None:
    """Call this with the kind of who claims the run, when that happens."""
    _waiting.append(callback)


def note_unplanned(parameters: int) -> None:
    """Note that a step on so many parameters is done, and nobody has taken the run over."""
    _write(Claim(kind="plain" if _claim is None else _claim.kind, parameters=parameters))


def read_claim(directory: Path) -> Claim | None:
    """Read the claim in a run directory, of its newest attempt that got so far; None where none did."""
    try:
        return Claim(**json.loads((directory / CLAIM_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def claimed_kind(directory: Path) -> ScriptKind | None:
    """Return the kind of who claimed the run of a directory; None where nobody did."""
    claim = read_claim(directory)
    return None if claim is None else claim.kind


LEFT_TO_SCRIPT = "dsplan saved nothing; the script resumes from what it saved itself"
"""What is said of a run that was stopped and whose script `saves_itself`."""


def saves_itself(directory: Path) -> bool:
    """Return whether the script of a run has to save and load by itself, as dsplan keeps no checkpoint of it.

    It does not say at which step it goes on, and counts from the begin of each attempt.
    """
    return claimed_kind(directory) not in (None, *SAVING)


def _note(kind: ScriptKind) -> None:
    if _claim is not None and _claim.kind == kind:
        return
    _write(Claim(kind=kind))
    for callback in _waiting:
        callback(kind)


def _write(claim: Claim) -> None:
    global _claim
    _claim = claim
    directory = os.environ.get(RUN_DIRECTORY)
    if directory and os.environ.get("LOCAL_RANK", "0") == "0":
        with suppress(OSError):  # a full disk ends no training
            write_json(Path(directory) / CLAIM_FILE, asdict(claim))


def forget() -> None:
    """Forget every claim, as in a process that begins; for tests."""
    global _claim, _uses, _own_works, _is_taken_over, _is_planned
    _claim, _uses, _own_works, _is_taken_over, _is_planned = None, 0, 0, False, False
    _waiting.clear()
