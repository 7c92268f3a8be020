"""The process that others are forked from: to import torch and transformers takes each seconds of processor time."""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

PRELOAD = (
    "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "strategies.engine.initialize",
    "transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama",
)  # fmt: skip

_ADDRESS = "TEST_FORK_SERVER"


def serve_forks(home: Path) -> None:
    """Start the process that those of all workers of this session are forked from; it ends with this one.

    `home` is where forked processes have their user data, if nothing else is said to them.
    """
    if sys.version_info >= (3, 14):  # its servers want a key that workers do not have: each worker has its own
        return
    multiprocessing.set_forkserver_preload(list(PRELOAD))
    with mock.patch.dict(os.environ, DSPLAN_HOME=str(home)):
        forkserver.ensure_running()
    os.environ[_ADDRESS] = _server()._forkserver_address


def use_served_forks() -> None:
    """Have this worker's processes forked where the session's are."""
    if address := os.environ.get(_ADDRESS):
        server = _server()
        server._forkserver_address, server._forkserver_alive_fd = address, os.open(os.devnull, os.O_WRONLY)
        server.ensure_running = lambda: None  # it is the child of another process, which alone may wait for it


def _server() -> forkserver.ForkServer:
    return forkserver._forkserver  # type: ignore[attr-defined]
