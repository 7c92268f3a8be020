"""The first code of every rank: send output to the run directory, install the hooks of the script's kind, run it.

Run as `python -m strategies.launch.rank_main SPEC` by the agent, with torch elastic's environment.
"""

from __future__ import annotations

import atexit
import os
import runpy
import signal
import sys
import threading
import traceback
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from hardware_db.errors import DsplanError
from strategies.launch.die_with_parent import die_with_parent
from strategies.launch.recognise import ScriptKind
from strategies.launch.spec import LaunchSpec, failure_path, log_path, write_json

_HOOKS: dict[ScriptKind, str] = {
    "huggingface": "strategies.launch.hooks.huggingface",
    "accelerate": "strategies.launch.hooks.accelerate",
    "deepspeed": "strategies.launch.hooks.deepspeed",
}


def main(spec_path: str) -> int:
    """Run the script of the spec; its exit status. An exception is written down, in short, beside the log."""
    die_with_parent(signal.SIGKILL, int(os.environ["DSPLAN_AGENT_PID"]))
    spec = LaunchSpec.load(Path(spec_path))
    rank = int(os.environ["RANK"])
    _redirect(spec.directory, rank)
    os.environ.pop("PYTHONSAFEPATH", None)
    try:
        _run_script(spec)
    except SystemExit as exit_request:
        return _exit_status(exit_request, spec.directory, rank)
    except BaseException as error:
        _write_failure(spec.directory, rank, error)
        if isinstance(error, DsplanError):
            print(f"error: {error}", file=sys.stderr)
        else:
            _print_traceback(error)
        return error.exit_code if isinstance(error, DsplanError) else 1
    return 0


def _redirect(directory: Path, rank: int) -> None:
    """Point file descriptors 1 and 2 at this rank's logs, so that output of C++ libraries lands there as well."""
    for descriptor, stream in ((1, "stdout"), (2, "stderr")):
        opened = os.open(log_path(directory, rank, stream), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)


def _run_script(spec: LaunchSpec) -> None:
    hook = _HOOKS.get(spec.kind)
    sys.argv = [spec.script, *spec.arguments]
    sys.path[0:0] = [str(Path(spec.script).resolve().parent)]
    if hook is not None:
        import_module(hook).install(spec)
    runpy.run_path(spec.script, run_name="__main__")


def _exit_status(exit_request: SystemExit, directory: Path, rank: int) -> int:
    """What `sys.exit(value)` means to a shell: None is 0, a text is printed and is 1."""
    code = exit_request.code
    if code is None or isinstance(code, int):
        return code or 0
    print(code, file=sys.stderr)
    _write_failure(directory, rank, exit_request)
    return 1


def _write_failure(directory: Path, rank: int, error: BaseException) -> None:
    text = str(error).strip().splitlines() or [""]
    failure = {"type": type(error).__name__, "message": text[0][:500], "expected": isinstance(error, DsplanError)}
    write_json(failure_path(directory, rank), failure)


def _print_traceback(error: BaseException) -> None:
    """The script's own traceback, without the frames of this runner and of runpy above it."""
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
