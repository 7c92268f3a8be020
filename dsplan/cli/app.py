"""The `dsplan` command: a table of commands, each loaded from its own file when it is called.

A module of this package offers one command, either as a function named after it or as a `typer.Typer` named `app`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from dsplan.cli.complaints import complaint
from dsplan.cli.flags import read_strictly
from hardware_db.errors import DsplanError, UnknownName

COMMANDS: dict[str, str] = {
    "probe": "dsplan.cli.catalogues:probe",
    "doctor": "dsplan.cli.doctor:doctor",
    "models": "dsplan.cli.catalogues:models",
    "devices": "dsplan.cli.catalogues:devices",
    "estimate": "dsplan.cli.estimate:estimate",
    "recommend": "dsplan.cli.recommend:recommend",
    "explain": "dsplan.cli.emit:explain",
    "emit": "dsplan.cli.emit:emit",
    "run": "dsplan.cli.run:run",
    "bench": "dsplan.cli.bench:bench",
    "db": "dsplan.cli.db:app",
}


class LazyGroup(TyperGroup):
    """The commands of `COMMANDS`, imported by name."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return load_command(cmd_name)


def load_command(name: str) -> Any:
    """The command object behind a name of `COMMANDS`.

    Raises:
        UnknownName: there is no such command.
    """
    if name not in COMMANDS:
        raise UnknownName("command", name, COMMANDS, hint="`dsplan --help` lists them all")
    module, attribute = COMMANDS[name].split(":")
    found = getattr(import_module(module), attribute)
    app = found if isinstance(found, typer.Typer) else _single_command_app(found)
    command = typer.main.get_command(app)
    command.name = name
    # `dsplan db` alone is bad input like any other, told in one line.
    command.no_args_is_help = False
    return read_strictly(command)


def run(arguments: Sequence[str]) -> int:
    """The exit status of one command line.

    Raises:
        DsplanError: it cannot be answered.
    """
    # UsageError, the base of every complaint about flags, which typer exports under no name of its own.
    usage_error: Any = typer.BadParameter.__base__
    command = build()
    try:
        # typer's own `main` would end the process where the reader of the output is gone.
        with command.make_context("dsplan", list(arguments)) as context:
            command.invoke(context)
    except typer.Exit as ending:
        return int(ending.exit_code)
    except typer.Abort:
        return 130
    except usage_error as error:
        raise WrongFlag(complaint(error)) from None
    return 0


class WrongFlag(DsplanError):
    """A command line that cannot be read."""


def build() -> Any:
    """The whole command line as one command object."""
    app = typer.Typer(cls=LazyGroup, add_completion=False, invoke_without_command=True, rich_markup_mode=None)
    app.callback()(dsplan)
    return typer.main.get_command(app)


def dsplan(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Will it fit, and what is the fastest way to train it? Plans, configs and runs of distributed training."""
    if version:
        from dsplan import __version__

        typer.echo(f"dsplan {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _single_command_app(function: Any) -> typer.Typer:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(function)
    return app
