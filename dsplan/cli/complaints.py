"""Error messages for flags that cannot be used, each with the problem, the place and the remedy."""

from __future__ import annotations

from typing import Any

from planner.limits import Limit


def complaint(error: Any) -> str:
    """One line for a usage error of typer, which exports its class under no name."""
    where = error.ctx.command_path if error.ctx else "dsplan"
    return f"{_problem(error)}; see {where} --help"


def _problem(error: Any) -> str:
    parameter = getattr(error, "param", None)
    if parameter is None:
        return _model_without_flag(error) or str(error.format_message()).rstrip(".")
    flag = max(parameter.opts, key=len) if parameter.param_type_name == "option" else parameter.human_readable_name
    if not error.message:
        return f"{flag} is missing; give it a value"
    given, separator, _ = str(error.message).partition(" is not ")
    wanted = _wanted(parameter)
    if not separator or not wanted or ";" in error.message:
        return f"{flag}: {str(error.message).rstrip('.')}"
    return f"{flag} is {given}; {wanted}"


def _model_without_flag(error: Any) -> str:
    """What to write in place of `dsplan recommend opt-6.7b`; empty for any other complaint."""
    message = str(error.format_message())
    extra = message.rpartition(" (")[2].rstrip(").").split()
    takes_model = error.ctx is not None and any(known.name == "model" for known in error.ctx.command.params)
    if not takes_model or "unexpected extra argument" not in message or not extra:
        return ""
    return f"{extra[0]} stands alone; name the model with --model {extra[0]}"


def _wanted(parameter: Any) -> str:
    """What a flag takes, as an instruction; empty where its type does not tell."""
    choices = getattr(parameter.type, "choices", None)
    if choices:
        return f"give one of {', '.join(choices)}"
    least, most = getattr(parameter.type, "min", None), getattr(parameter.type, "max", None)
    if least is not None and most is not None:
        return f"give {Limit(least=least, most=most, fraction='float' in parameter.type.name)}"
    kinds = {"float": "give a number", "integer": "give a whole number", "int": "give a whole number"}
    return kinds.get(parameter.type.name, "")
