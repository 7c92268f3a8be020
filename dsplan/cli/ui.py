"""`dsplan ui`: the questions of `recommend` on a page; `dsplan mcp`: the same for assistants."""

from __future__ import annotations

from typing import Annotated

import typer

from dsplan.cli.flags import number
from planner import limits


def ui(
    host: Annotated[
        str,
        typer.Option(metavar="ADDRESS", help="Address to serve at; 0.0.0.0 for all who reach this machine."),
    ] = "127.0.0.1",
    port: Annotated[
        int | None, number(limits.PORTS, "Port to serve at; by default the first free one from 7860 on.", "PORT")
    ] = None,
    share: Annotated[bool, typer.Option("--share", help="Get a public address too, from Gradio's servers.")] = False,
    workers: Annotated[
        int | None, number(limits.PROCESSES, "Processes that answer; one for every core, at most 4, if left open.")
    ] = None,
    seconds: Annotated[float, number(limits.ANSWER_SECONDS, "The longest that one answer may take.", "SECONDS")] = 20.0,
    runs: Annotated[
        str | None,
        typer.Option(
            "--runs",
            metavar="DIR|postgresql://HOST",
            help="Also serve the runs below this directory, or of a team's database, as watch --runs lists them.",
        ),
    ] = None,
) -> None:
    """Plans, their figures and configs on a page in the browser. Only this machine reaches it unless --host says more.

    The address of the page holds the question, to be sent to others. Needs `pip install 'dsplan[ui]'`.
    """
    from dsplan.ui.server import ServerOptions, serve

    serve(ServerOptions(host=host, port=port, share=share, workers=workers, seconds=seconds, runs=runs))


def mcp(
    seconds: Annotated[float, number(limits.ANSWER_SECONDS, "The longest that one answer may take.", "SECONDS")] = 20.0,
) -> None:
    """Questions of assistants over the Model Context Protocol, on standard input and output.

    The tools `recommend`, `estimate`, `max`, `check` and `explain` only read, and answer the JSON of the commands that
    they are named after. Needs `pip install 'dsplan[mcp]'`.
    """
    from dsplan.ui.tools import serve_tools

    serve_tools(seconds)
