"""The server of the page: on this machine's own address unless another is asked for."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from hardware_db.errors import DsplanError
from hardware_db.notices import notice
from hardware_db.probe.cgroup import usable_cores
from hardware_db.records import dataclass
from strategies.launch.reported_runs import runs_at

LOCAL = "127.0.0.1"
PORT = 7860
"""Gradio's own, which Spaces of the Hub forward."""
_LAST_PORT = PORT + 20
_MOST_WORKERS = 4
_END_SECONDS = 1
"""For connections that are open when the server ends; a page that is left open would hold it for ever."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerOptions:
    """Address of the page and number of its processes."""

    host: str = LOCAL
    port: int | None = None
    """None takes the first free one from 7860 on."""
    share: bool = False
    """Whether Gradio's servers give it a public address, which everybody can open who knows it."""
    workers: int | None = None
    """Processes that answer; None means one for every core, and at most four."""
    seconds: float = 20.0
    """The longest that one answer may take."""
    runs: str | None = None
    """The folder, or the database, whose runs stand on a page of their own; None: there is none."""


def serve(options: ServerOptions) -> None:
    """Serve the page until the process is interrupted.

    Raises:
        DsplanError: Gradio is not installed, the address cannot be had, or the folder or database of runs is none.
    """
    if options.runs is not None:
        runs_at(options.runs)
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    with _open_listener(options) as listener:  # before Gradio is imported, which takes seconds
        _serve(options, listener)


def _serve(options: ServerOptions, listener: socket.socket) -> None:
    try:
        import uvicorn

        from dsplan.ui.app import application
        from dsplan.ui.runs import RunsPage
        from dsplan.ui.workers import Remembered, Workers
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in ("dsplan", "planner", "hardware_db"):
            raise
        raise DsplanError(f"dsplan ui cannot serve a page here ({error}); pip install 'dsplan[ui]'") from None
    runs = None if options.runs is None else RunsPage(options.runs)
    with Workers(options.workers or _usual_workers(), seconds=options.seconds) as workers:
        port = listener.getsockname()[1]
        config = uvicorn.Config(
            application(Remembered(workers), runs), log_level="warning", timeout_graceful_shutdown=_END_SECONDS
        )
        notice(f"the page is at http://{_readable(options.host)}:{port} (Ctrl+C ends it)", stream="stdout")
        if runs is not None:
            notice(f"the runs are at http://{_readable(options.host)}:{port}/runs", stream="stdout")
        if options.share:
            notice(f"and for everybody at {_public_address(port)}, through Gradio's servers", stream="stdout")
        uvicorn.Server(config).run(sockets=[listener])


def _usual_workers() -> int:
    return min(usable_cores(), _MOST_WORKERS)


@contextmanager
def _open_listener(options: ServerOptions) -> Iterator[socket.socket]:
    ports = range(PORT, _LAST_PORT + 1) if options.port is None else (options.port,)
    for port in ports:
        try:
            listener = _bound(options.host, port)
        except UnicodeError as error:  # Python's word for a host that no name server would be asked for
            raise DsplanError(f"--host {options.host[:40]!r} is no name of a host ({error}); give another") from None
        except OSError as error:
            reason = error
            continue
        with listener:
            yield listener
        return
    where = f"{options.host}:{ports[0]}" if len(ports) == 1 else f"{options.host}:{ports[0]} to {ports[-1]}"
    raise DsplanError(f"no page can be served at {where} ({reason.strerror or reason}); give another --port or --host")


def _bound(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A server that just ended keeps its port for a minute otherwise; Windows would share it with one that runs.
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        raise
    return listener


def _readable(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _public_address(port: int) -> str:
    """Return what Gradio's servers call a tunnel to this machine's port.

    Raises:
        DsplanError: they cannot be reached.
    """
    from gradio.networking import setup_tunnel

    try:
        return str(setup_tunnel(LOCAL, port, secrets.token_urlsafe(32), None, None))
    except Exception as error:
        reason = " ".join(str(error).split())
        raise DsplanError(f"Gradio's servers give no public address ({reason}); leave --share out") from None
