"""The `dsplan` command: a table of commands, each loaded from its file when it is called.

A module of this package offers commands, each as a function named after it, or several as a `typer.Typer` named `app`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

from dsplan.cli.flags import CommandGroup, GroupedCommand, read_strictly, with_flags
from hardware_db.errors import DsplanError, UnknownName
from planner.limits import Limit

COMMANDS: dict[str, str] = {
    "probe": "dsplan.cli.catalogues:probe",
    "doctor": "dsplan.cli.doctor:doctor",
    "models": "dsplan.cli.catalogues:models",
    "devices": "dsplan.cli.catalogues:devices",
    "estimate": "dsplan.cli.plans:estimate",
    "recommend": "dsplan.cli.plans:recommend",
    "max": "dsplan.cli.plans:maximum",
    "simulate": "dsplan.cli.simulate:simulate",
    "queue": "dsplan.cli.simulate:queue",
    "explain": "dsplan.cli.plans:explain",
    "emit": "dsplan.cli.plans:emit",
    "check": "dsplan.cli.check:check",
    "report": "dsplan.cli.report:report",
    "ui": "dsplan.cli.ui:ui",
    "mcp": "dsplan.cli.ui:mcp",
    "run": "dsplan.cli.run:run",
    "watch": "dsplan.cli.watch:watch",
    "track": "dsplan.cli.watch:track",
    "bench": "dsplan.cli.bench:bench",
    "db": "dsplan.cli.db:app",
}


EXAMPLES: dict[str, tuple[str, ...]] = {
    "": ("dsplan recommend --model opt-6.7b --gpus 8 --gpu A100-SXM4-80GB", "dsplan run train.py"),
    "probe": ("dsplan probe", "dsplan probe --json"),
    "doctor": ("dsplan doctor",),
    "models": ("dsplan models llama",),
    "devices": ("dsplan devices H100", "dsplan devices --nodes"),
    "estimate": (
        "dsplan estimate --model opt-6.7b --gpu A100-SXM4-80GB --gpus 8 --strategy fsdp --micro-batch 4",
        "dsplan estimate --model llama-3.1-8b --gpu H100-SXM5-80GB --gpus 8 --strategy zero3 --chrome-trace step.json",
    ),
    "recommend": (
        "dsplan recommend --model opt-6.7b --gpus 8 --gpu A100-SXM4-80GB",
        "dsplan recommend --model llama-2-70b --method qlora --gpus 2 --gpu RTX-4090 --out plans",
        "dsplan recommend --config train.yaml --gpus 8 --gpu A100-SXM4-80GB --global-batch 256",
    ),
    "max": ("dsplan max --model mistral-7b --gpus 4 --gpu A100-SXM4-40GB --strategy fsdp",),
    "simulate": (
        "dsplan simulate --model llama-3.1-405b --gpus 16384 --gpu H100-SXM5-80GB",
        "dsplan simulate --model opt-66b --gpus 512 --gpu A100-SXM4-80GB --spares 2 --repair-hours 72 --elastic",
    ),
    "queue": (
        "dsplan queue --model llama-3.1-8b --gpus 64 --gpu H100-SXM5-80GB --tokens 5B",
        "dsplan queue --model opt-6.7b --gpus 16 --gpu A100-SXM4-80GB --tokens 1B --slurm-option=--partition=a100",
    ),
    "explain": ("dsplan explain plans/plan-1.yaml",),
    "emit": ("dsplan emit plans/plan-1.yaml --format accelerate --out configs",),
    "check": (
        "dsplan check train.yaml --gpus 8 --gpu A100-SXM4-80GB",
        "dsplan check train.yaml --gpus 8 --gpu A100-SXM4-80GB --fix | patch -p0",
        "dsplan check train.yaml accelerate.yaml",
        "dsplan check -- torchrun --nproc_per_node 8 run_clm.py --model_name_or_path gpt2 --bf16",
    ),
    "report": (
        "dsplan report --model opt-6.7b --gpus 8 --gpu A100-SXM4-80GB --out report.html",
        "dsplan report runs/2026-11-23 runs/2026-11-24 --out runs.html",
    ),
    "ui": ("dsplan ui", "dsplan ui --port 8080", "dsplan ui --runs runs"),
    "mcp": ("dsplan mcp", "dsplan mcp --seconds 60"),
    "run": (
        "dsplan run train.py --epochs 3",
        "dsplan run --plan plans/plan-1.yaml train.py",
        "dsplan run --strategy fsdp --tp 2 --nproc 4 train.py",
        "dsplan run --track tensorboard,wandb train.py",
        "dsplan run --resume runs/2026-11-23",
        "dsplan run -- accelerate launch --mixed_precision bf16 train.py --epochs 3",
        "dsplan run --launcher kubernetes --kube-image train@sha256:DIGEST --kube-volume runs --nproc 8 train.py",
        "dsplan run --launcher skypilot --sky-task mine.yaml --plan plan.yaml --checkpoint-dir s3://runs train.py",
    ),
    "track": ("dsplan track runs/2026-11-23 --to wandb,mlflow",),
    "watch": (
        "dsplan watch runs/2026-11-23",
        "dsplan watch runs/2026-11-23 --once --json",
        "dsplan watch --runs runs",
        "dsplan watch NAME --launcher kubernetes",
    ),
    "bench": ("dsplan bench --minutes 5",),
    "db": ("dsplan db list", "dsplan db calibrate"),
    "db list": ("dsplan db list", "dsplan db list --model opt-6.7b --strategy fsdp --limit 5"),
    "db show": ("dsplan db show 5a1c",),
    "db forget": ("dsplan db forget 5a1c",),
    "db export": ("dsplan db export runs.jsonl",),
    "db share": ("dsplan db share shared.jsonl",),
    "db import": (
        "dsplan db import runs.jsonl",
        "dsplan db import runs/2026-11-23",
        "dsplan db import https://example.org/shared.jsonl",
    ),
    "db push": ("dsplan db push",),
    "db pull": ("dsplan db pull",),
    "db calibrate": ("dsplan db calibrate --dry-run",),
}
"""Command lines that each command's help ends with."""


class LazyGroup(CommandGroup):
    """The commands of `COMMANDS`, imported by name."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands, whose modules are not imported for it."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command, imported now; None where there is none of this name."""
        return load_command(cmd_name)

    def summaries(self) -> dict[str, str]:
        """Return the first sentence of each command, whose flags need not be read for it."""
        return {name: _first_sentence(_read_command(name)) for name in COMMANDS}


def _read_command(name: str) -> Any:
    """Return what a module offers as a command: a function, or a `typer.Typer`."""
    module, attribute = COMMANDS[name].split(":")
    return getattr(import_module(module), attribute)


def _first_sentence(command_object: Any) -> str:
    written: Any = command_object.__doc__
    if isinstance(command_object, typer.Typer):
        callbacks = [command.callback.__doc__ for command in command_object.registered_commands if command.callback]
        written = command_object.info.help if isinstance(command_object.info.help, str) else callbacks[0]
    sentence, end, _ = " ".join(written.split()).partition(". ")
    return sentence + end.rstrip()


def load_command(name: str) -> Any:
    """Return the command object behind a name of `COMMANDS`.

    Raises:
        UnknownName: there is no such command.
    """
    if name not in COMMANDS:
        raise UnknownName("command", name, COMMANDS, hint="`dsplan --help` lists them all")
    command_object = _read_command(name)
    app = command_object if isinstance(command_object, typer.Typer) else _single_command_app(command_object)
    command = typer.main.get_command(app)
    command.name = name
    # `dsplan db` alone is bad input like any other, told in one line.
    command.no_args_is_help = False
    for path, each in [(name, command), *((f"{name} {inner}", child) for inner, child in _children(command).items())]:
        each.epilog = "\n".join(EXAMPLES.get(path, ()))
    return read_strictly(command)


def _children(command: Any) -> dict[str, Any]:
    return getattr(command, "commands", {})


def run(arguments: Sequence[str]) -> int:
    """Return the exit status of one command line.

    Raises:
        DsplanError: it cannot be answered.
    """
    # UsageError, the base of every complaint about flags, which typer exports under no name of its own.
    usage_error: Any = typer.BadParameter.__base__
    command = build()
    if len(arguments) == 1 and arguments[0] in ("--show-completion", "--install-completion"):
        arguments = [*arguments, _this_shell(arguments[0])]
    try:
        if COMPLETION in os.environ:
            _completion().completion_init()
            command.main(list(arguments), prog_name="dsplan", complete_var=COMPLETION)
        # typer's own `main` would end the process where the reader of the output is gone.
        with command.make_context("dsplan", list(arguments)) as context:
            command.invoke(context)
    except typer.Exit as ending:
        return int(ending.exit_code)
    except SystemExit as ending:  # how typer's completion ends
        return int(ending.code or 0)
    except typer.Abort:
        return 130
    except usage_error as error:
        raise WrongFlag(complaint(error)) from None
    return 0


class WrongFlag(DsplanError):
    """A command line that cannot be read."""


COMPLETION = "_DSPLAN_COMPLETE"
"""The environment variable in which a shell says what it wants completed."""
SHELLS = ("bash", "zsh", "fish", "powershell", "pwsh")


def _completion() -> Any:
    """Typer's module, whose time others need not wait for."""
    return import_module("typer.completion")


def _this_shell(flag: str) -> str:
    """Return the shell above this process."""
    shellingham: Any = import_module("shellingham")
    try:
        return str(shellingham.detect_shell()[0])
    except shellingham.ShellDetectionFailure:
        raise WrongFlag(f"{flag}: no shell is seen above dsplan; name it, as in dsplan {flag} bash") from None


def _known_shell(name: str) -> str:
    if name not in SHELLS:
        raise UnknownName("shell", name, SHELLS, hint=f"give one of {', '.join(SHELLS)}")
    return name


def build() -> Any:
    """Return the whole command line as one command object."""
    app = typer.Typer(cls=LazyGroup, add_completion=False, invoke_without_command=True, rich_markup_mode=None)
    app.callback()(dsplan)
    command = typer.main.get_command(app)
    command.epilog = "\n".join(EXAMPLES[""])
    return command


def dsplan(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
    install_completion: Annotated[
        str | None,
        typer.Option(
            metavar="[SHELL]",
            help="Have bash, zsh, fish or powershell complete commands, flags and names; by default this one.",
        ),
    ] = None,
    show_completion: Annotated[
        str | None,
        typer.Option(metavar="[SHELL]", help="Print what makes the shell complete, to put where you like."),
    ] = None,
) -> None:
    """Will it fit, and what is the fastest way to train it? Plans, configs and runs of distributed training."""
    if version:
        from dsplan import __version__

        typer.echo(f"dsplan {__version__}")
    elif install_completion is not None:
        shell, path = _completion().install(_known_shell(install_completion), "dsplan", COMPLETION)
        typer.echo(f"{shell} completes dsplan when it is started again; {path} has how")
    elif show_completion is not None:
        typer.echo(
            _completion().get_completion_script(
                prog_name="dsplan", complete_var=COMPLETION, shell=_known_shell(show_completion)
            )
        )
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _single_command_app(function: Any) -> typer.Typer:
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command(cls=GroupedCommand)(with_flags(function))
    return app


# Error messages for flags that cannot be used, each with the problem, the place and the remedy.


def complaint(error: Any) -> str:
    """One line for a usage error of typer, which exports its class under no name."""
    where = error.ctx.command_path if error.ctx else "dsplan"
    return f"{_problem(error)}; see {where} --help"


def _problem(error: Any) -> str:
    parameter = getattr(error, "param", None)
    if parameter is None:
        return _model_without_flag(error) or _flag_of_estimate(error) or _unknown_flag(error)
    flag = max(parameter.opts, key=len) if parameter.param_type_name == "option" else parameter.human_readable_name
    if not error.message:
        return f"{flag} is missing; give it a value"
    given, separator, _ = str(error.message).partition(" is not ")
    wanted = _instruction_for(parameter)
    if not separator or not wanted or ";" in error.message:
        return f"{flag}: {str(error.message).rstrip('.')}"
    return f"{flag} is {given}; {wanted}"


def _model_without_flag(error: Any) -> str:
    """Return what to write in place of `dsplan recommend opt-6.7b`; empty for any other complaint."""
    message = str(error.format_message())
    extra = message.rpartition(" (")[2].rstrip(").").split()
    takes_model = error.ctx is not None and any(parameter.name == "model" for parameter in error.ctx.command.params)
    if not takes_model or "unexpected extra argument" not in message or not extra:
        return ""
    return f"{extra[0]} stands alone; name the model with --model {extra[0]}"


def _unknown_flag(error: Any) -> str:
    """Return the complaint in typer's words; of a flag that there is not, with the nearest that there is."""
    flag = getattr(error, "option_name", None)
    if flag is None or error.ctx is None or not hasattr(error, "possibilities"):
        return str(error.format_message()).rstrip(".")
    import difflib

    flags = [option for parameter in error.ctx.command.params for option in parameter.opts]
    near = difflib.get_close_matches(flag, flags, n=1, cutoff=0.6)
    return f"no option {flag}" + (f"; did you mean {near[0]}" if near else "")


def _flag_of_estimate(error: Any) -> str:
    """Return where to decide what `dsplan recommend` chooses; empty for any other complaint."""
    flag = getattr(error, "option_name", None)
    if flag is None or error.ctx is None or error.ctx.command.name != "recommend":
        return ""
    if not any(flag in parameter.opts for parameter in load_command("estimate").params):
        return ""
    return f"recommend chooses {flag} itself; `dsplan estimate` prices a plan of your own, and --out writes it"


def _instruction_for(parameter: Any) -> str:
    """Return what a flag takes, as an instruction; empty where its type does not tell."""
    choices = getattr(parameter.type, "choices", None)
    if choices:
        return f"give one of {', '.join(choices)}"
    least, most = getattr(parameter.type, "min", None), getattr(parameter.type, "max", None)
    if least is not None and most is not None:
        return f"give {Limit(least=least, most=most, fraction='float' in parameter.type.name)}"
    kinds = {"float": "give a number", "integer": "give a whole number", "int": "give a whole number"}
    return kinds.get(parameter.type.name, "")
