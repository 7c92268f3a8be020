"""Supervision of an engine at the end of every step, so that a run reaches its last one."""

from __future__ import annotations

import ast
import atexit
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from torch import nn

from hardware_db.errors import DsplanError
from hardware_db.notices import notice
from strategies.checkpoint.object_store import location
from strategies.distributed.consensus import objects_of_all, on_rank_zero
from strategies.protocols import Observer
from strategies.run_directory.attempt_options import AttemptOptions
from strategies.run_directory.heartbeat import PULSE
from strategies.run_directory.spec import EndingKind
from strategies.supervision.autosave import AutomaticSaves, SaveTarget, SupervisedEngine
from strategies.supervision.autosave_interval import Interval
from strategies.supervision.hang_detection import begin_watching
from strategies.supervision.not_finite import FiniteWatch
from strategies.supervision.process import describe_stop, leave
from strategies.supervision.resume import (
    Resumed,
    add_common_past,
    is_left_behind,
    nothing_left,
    resume,
    step_of,
)
from strategies.supervision.stopping import Stopping, open_board
from strategies.variables import RUN_DIRECTORY

if TYPE_CHECKING:
    import torch

# Whether a script keeps its place in `client_state`, read from its source without running it.


def reads_client_state(script: Path) -> bool:
    """Return whether a script uses the second thing that `load_checkpoint` returns; False for what cannot be read."""
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return False
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    taken: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _loads(node.value):
            for target in node.targets:
                second = target.elts[1] if isinstance(target, ast.Tuple) and len(target.elts) == 2 else None
                taken |= {second.id} if isinstance(second, ast.Name) else set()
        elif isinstance(node, ast.Subscript) and _loads(node.value):
            taken |= set() if isinstance(node.slice, ast.Constant) and node.slice.value == 0 else read
    return bool(taken & read)


def _loads(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load_checkpoint"


_MARGIN = 1.5
"""A save is begun in the time left where the last one took no more than this part of it; the first one always is."""


class Supervision(Observer):
    """Saves, stops and gives up for one engine. It comes last among the observers: a step is written down by then.

    Every rank has one. The script's own calls of `save_checkpoint` and `load_checkpoint` come through it.
    """

    def __init__(self, engine: SupervisedEngine, options: AttemptOptions, run_directory: Path) -> None:
        environment = engine.environment
        options = add_common_past(options, environment)
        self._engine, self._options, self._run_directory = engine, options, run_directory
        self._finite = FiniteWatch(engine)
        board = open_board(run_directory, environment)
        self._stopping = Stopping(board, environment.rank, environment.world_size)
        PULSE.has_engine = True
        self._watch = begin_watching(run_directory, environment.rank, options.supervision.hang_seconds)
        self._watch.attach(board, self._stopping, environment.world_size)
        self._resumed: Resumed | None = None
        self._owed: DsplanError | None = None
        self._script_reads_state = reads_client_state(Path(sys.argv[0]))
        self._is_first_load = self._trains_alone = True
        self._begins_data_anew = False
        self._saves = AutomaticSaves(
            engine,
            _target_of(options),
            run_directory=run_directory,
            is_clean=lambda: self._finite.is_clean,
            may_save=self._may_save,
        )
        atexit.register(self._watch.end)

    def resume(self) -> None:
        """Resume where an earlier attempt has saved; if nothing is left, the script has to load something itself.

        Raises:
            BrokenFile: none of its checkpoints can be loaded.
        """
        options = self._options
        resumed = self._resumed = resume(self._engine, self._run_directory, options)
        loader = self._engine.dataloader
        if resumed is None:
            if options.reached and not options.may_begin_anew:
                self._owed = nothing_left(self._run_directory, options)
            elif options.reached and self._engine.is_main:
                reached = options.reached
                notice(f"no checkpoint was complete when the run was at step {reached}: it begins at step 1 again")
            return
        PULSE.step = resumed.checkpoint.step
        self._saves.resumed(resumed.checkpoint)
        if loader is not None:
            loader.skip_trained_passes()
        if self._engine.is_main:
            passed_over = f"; {resumed.passed_over}" if resumed.passed_over else ""
            notice(f"resumed at step {resumed.checkpoint.step} from {resumed.checkpoint.path}{passed_over}")
            self._begins_data_anew = loader is None and not resumed.client_state

    @property
    def resumed_state(self) -> Mapping[str, Any] | None:
        """The `client_state` of the checkpoint from which this attempt resumed; None where it began anew."""
        return None if self._resumed is None else self._resumed.client_state

    # What happens in a step.

    def forward_starts(self, module: nn.Module, inputs: tuple[Any, Mapping[str, Any]]) -> None:
        """Refuse to train from the first step on where the run had got further, until the script has loaded something.

        Raises:
            CannotRun: it would begin at its first step though the run had got further.
        """
        if self._owed is not None:
            raise self._owed
        if self._begins_data_anew:
            self._begins_data_anew = False
            if self._is_first_load:  # else the script has asked where the run stands
                notice(
                    "the script reads its data itself, and begins with its first sample again; training_data= resumes"
                )
        PULSE.call()

    def loss_is(self, loss: torch.Tensor) -> None:
        """Look whether the loss is finite."""
        PULSE.call()
        self._finite.loss_is(loss)

    def starts(self, section: str) -> None:
        """Publish what the rank is in."""
        PULSE.section = section
        PULSE.beat()

    def ends(self, section: str) -> None:
        """Publish that the rank is in the script again."""
        PULSE.section = ""
        PULSE.beat()

    def step_ended(self) -> None:
        """Count the step, save where it is time, stop where that was asked for.

        Raises:
            NotFinite: too many steps in a row were not finite.
            Stopped: the rank has saved and ends on purpose.
        """
        step = PULSE.step = self._engine.global_steps
        PULSE.call()
        self._is_first_load = False
        self._finite.step_ended()
        if self._stopping.is_at(step):
            request = self._stopping.request
            assert request is not None
            self.stop(request.kind, request.deadline)
        self._saves.step_ended(step)

    def stop(self, kind: EndingKind, deadline: float = sys.float_info.max) -> NoReturn:
        """Save if there is time until `deadline` (`time.monotonic`), and leave; every rank calls it.

        Raises:
            Stopped: always.
        """
        step = self._engine.global_steps
        path, sentence = self._save_in_time(step, deadline)
        message = f"stopped at step {step}{sentence}"
        if self._engine.is_main:
            notice(message)
        word = describe_stop(kind, message, self._run_directory, path)
        leave(self._stopping, self._watch, self._run_directory, word)

    @property
    def mark(self) -> dict[str, Any]:
        """The origin of a checkpoint that is begun now."""
        return self._saves.mark

    # The script's own checkpoints.

    def settle(self) -> None:
        """Complete the automatic checkpoint that is on its way; that it failed is an alert."""
        self._saves.finish()

    def script_saved(self, path: Path) -> None:
        """Count from a checkpoint that the script has begun; a resume considers it."""
        self._saves.script_saved(path)

    def script_completed(self, path: Path) -> None:
        """List that a checkpoint that the script has begun is complete."""
        self._saves.completed(None, path)

    def script_could_not_save(self, problem: DsplanError) -> None:
        """Report that a save of the config's went wrong, which does not end the training."""
        self._saves.failed(problem)

    @property
    def is_resumed(self) -> bool:
        """True if this attempt has resumed and the script has not asked yet where the run stands."""
        return self._resumed is not None and self._is_first_load

    def load(self, directory: Path) -> tuple[Path | None, dict[str, Any]]:
        """Load for the script: at the start of a resumed attempt the newer of its own checkpoint and the run's."""
        is_first, self._is_first_load = self._is_first_load, False
        if self._resumed is not None and is_first:
            step, resumed = step_of(directory), self._resumed.checkpoint
            if step is None or step <= resumed.step:
                if self._engine.dataloader is not None:
                    self._engine.dataloader.skip_nothing()
                return location(resumed.path), dict(self._resumed.client_state)
        if is_first and is_left_behind(directory, self._options):
            if self._engine.is_main:
                notice(f"{directory} is not loaded: the run begins anew, as --resume-from said")
            return None, {}
        self.settle()
        path, client_state = self._engine._checkpoints.load(directory)
        if path is not None:
            self._owed = None
        PULSE.step = self._engine.global_steps
        return path, client_state

    def _save_in_time(self, step: int, deadline: float) -> tuple[Path | None, str]:
        """Return the checkpoint of this step, and how the sentence about the stop continues; alike on every rank."""
        saves = self._saves
        saves.finish()
        if saves.complete is not None and saves.complete.step == step:
            return location(saves.complete.path), " and saved"
        needed = 0.0 if saves.seconds is None else _MARGIN * saves.seconds
        is_clean = self._is_clean_everywhere()
        reason = on_rank_zero(lambda: self._why_unsaveable(deadline - time.monotonic() - needed, is_clean))
        path = None if reason else saves.save(asynchronous=False)
        if path is not None:
            return path, " and saved"
        before = "" if saves.complete is None else f"; the checkpoint before is of step {saves.complete.step}"
        return None, f", not saved: {reason or 'it could not be written'}{before}"

    def _is_clean_everywhere(self) -> bool:
        """Return whether the last step was finite on every rank."""
        return all(objects_of_all(self._finite.is_clean))

    @property
    def unsaveable(self) -> str | None:
        """Reason why no checkpoint can be made now from which the run could resume; None where one can."""
        return self._why_unsaveable(0.0, self._finite.is_clean)

    def _why_unsaveable(self, seconds_left: float, is_clean: bool) -> str | None:
        if seconds_left < 0:
            return "the time left is shorter than saving takes"
        if not is_clean:
            return "losses or gradients are not finite"
        if not self._may_save():
            return "the script reads client_state, which only it can fill in; keep it in engine.client_state"
        return None

    def _may_save(self) -> bool:
        """Return whether an automatic checkpoint holds all that the script needs to resume; rank 0's answer counts."""
        return self._trains_alone and (not self._script_reads_state or bool(self._engine.client_state))

    def give_up(self, second: SupervisedEngine) -> None:
        """Leave saving to the script, which trains a second engine: a checkpoint of one of them is not the run."""
        self._trains_alone = False
        if second.is_main:
            notice("the script trains a second model: dsplan run saves neither by itself; call save_checkpoint on both")


def supervise(engine: SupervisedEngine) -> None:
    """Let a run's options rule an engine: resume it, and add what saves and stops it; nothing where there are none.

    Every rank calls this together, at the end of `initialize`. They are those of one engine per process: a script
    that trains a second one saves by itself.

    Raises:
        BrokenFile: none of the run's checkpoints can be loaded.
    """
    global _supervised
    directory = os.environ.get(RUN_DIRECTORY)
    options = None if directory is None else AttemptOptions.load(Path(directory))
    if directory is None or options is None:
        return
    if _supervised is not None:
        _supervised.give_up(engine)
        return
    supervision = _supervised = Supervision(engine, options, Path(directory))
    engine.supervision = supervision
    engine.observers.append(supervision)
    supervision.resume()


_supervised: Supervision | None = None


def stop_here(engine: SupervisedEngine, kind: EndingKind) -> None:
    """Save and leave with status 75; every rank calls it together at the end of a step.

    Raises:
        Stopped: always, where the engine is supervised; elsewhere nothing happens.
    """
    if engine.supervision is not None:
        engine.supervision.stop(kind)


def _target_of(options: AttemptOptions) -> SaveTarget:
    """Return where the options say to save, and how often."""
    return SaveTarget(
        directory=location(options.supervision.checkpoint_directory),
        interval=Interval.of(options.supervision),
        attempt=options.attempt,
        run_id=options.run_id,
        since=options.since,
        has_nodes=options.has_nodes,
    )
