"""The first code of every rank: send output to the run directory, install the hooks of the script's kind, run it.

Run as `python -m strategies.launch.rank_main SPEC` by any launcher, whose variables say which rank it is.
"""

from __future__ import annotations

import atexit
import gc
import os
import runpy
import sys
import threading
import traceback
from pathlib import Path
from typing import NoReturn

from hardware_db.errors import DsplanError
from strategies.launch.elastic.place import take_place
from strategies.launch.hooks import capabilities, places
from strategies.run_directory.files import log_path
from strategies.run_directory.spec import LaunchSpec
from strategies.run_directory.state_consensus import (
    narrow,
    reach_consensus,
    release_waiting_ranks,
    wait_for_training_ranks,
)
from strategies.supervision.failures import describe_failure, exit_status, failure_of, write_failure, write_success
from strategies.supervision.hang_detection import explain_failure
from strategies.supervision.process import begin


def main(spec_path: str) -> int:
    """Run the script of the spec; its exit status. An exception is written down, in short, beside the log."""
    spec = LaunchSpec.load(Path(spec_path))
    try:
        rank = take_place(spec).rank
    except DsplanError as error:  # without a rank there is no log to write to
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    _redirect(spec.directory, rank)
    os.environ.pop("PYTHONSAFEPATH", None)
    begin(spec, rank)
    places.install()
    try:
        _run_script(spec)
    except SystemExit as exit_request:
        status = _exit_status(exit_request, spec.directory, rank)
        if status == 0:
            _leave_word(spec.directory, rank)
        return status
    except BaseException as error:
        failure = explain_failure(failure_of(error, spec.directory), spec.directory)
        write_failure(spec.directory, rank, failure)
        if not isinstance(error, DsplanError):
            _print_traceback(error)
        if failure.expected:
            print(f"error: {error if isinstance(error, DsplanError) else failure.message}", file=sys.stderr)
        return exit_status(failure)
    _leave_word(spec.directory, rank)
    return 0


def _leave_word(directory: Path, rank: int) -> None:
    """Say that this rank's script has ended well, to the command and to ranks that still mean to meet this one."""
    from strategies.distributed.rendezvous import notify_end

    write_success(directory, rank)
    notify_end()


def _redirect(directory: Path, rank: int) -> None:
    """Point file descriptors 1 and 2 at this rank's logs, so that output of C++ libraries lands there as well."""
    for descriptor, stream in ((1, "stdout"), (2, "stderr")):
        opened = os.open(log_path(directory, rank, stream), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)


def _run_script(spec: LaunchSpec) -> None:
    gc.disable()
    from strategies.distributed.environment import (
        meet_before_script,  # with torch, which must not load before the output is caught
    )

    gc.freeze()  # torch stays: looking through it for garbage makes what the script imports a quarter slower
    gc.enable()
    store = meet_before_script()
    state = reach_consensus(store, spec.directory)
    if store is not None and state.ranks < int(os.environ["WORLD_SIZE"]):
        if int(os.environ["RANK"]) >= state.ranks:
            return wait_for_training_ranks(store, state)
        narrow(state, os.environ)
    start = spec.start
    if start.by_accelerate:
        from strategies.launch.hooks.accelerate import launcher_environment

        os.environ.update(launcher_environment(start.accelerate))
    own_rank = [f"{start.local_rank}={os.environ['LOCAL_RANK']}"] if start.local_rank else []
    sys.argv = [spec.script, *own_rank, *spec.arguments]
    sys.path[0:0] = [os.getcwd() if start.module else str(Path(spec.script).resolve().parent)]
    try:
        try:
            if start.module:
                runpy.run_module(start.module, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(spec.script, run_name="__main__")
        except SystemExit as exit_request:
            if exit_request.code:
                raise
        capabilities.refuse_unapplied()
    finally:
        if store is not None and os.environ["RANK"] == "0":
            release_waiting_ranks(store)


def _exit_status(exit_request: SystemExit, directory: Path, rank: int) -> int:
    """Return what `sys.exit(value)` means to a shell: None is 0, a text is printed and is 1."""
    code = exit_request.code
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)
    write_failure(directory, rank, describe_failure("failed", exit_request, directory))
    return 1


def _print_traceback(error: BaseException) -> None:
    """Print the script's own traceback, without the frames of this runner and of runpy above it."""
    frames = error.__traceback__
    while frames is not None and (
        frames.tb_frame.f_code.co_filename == __file__ or "runpy" in frames.tb_frame.f_code.co_filename
    ):
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames or error.__traceback__)


def _leave(status: int) -> NoReturn:
    """End the process with `status` after everything Python runs at its end, but before C++ tears down.

    Gloo's background threads abort the process (SIGABRT) when a script ends without `destroy_process_group`, which HF
    Trainer scripts never call: a run that trained to its end would count as failed. Calling it here instead would wait
    for peers that may be gone. What the GPU still has to do for them is waited for.
    """
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join()
    torch = sys.modules.get("torch")
    if status == 0 and torch is not None and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    _leave(main(sys.argv[1]))
