"""Help texts: flags by subject, then examples, as plain text that fits the terminal."""

from __future__ import annotations

import re
from typing import Any

from typer.core import TyperCommand

from dsplan.cli.flags import CommandGroup

_WIDEST = 80
_FLAG = 30
"""Columns for a flag; the text of a longer one begins in the next line."""
_ROOM = 56
"""Where fewer columns are left, the text of a long flag is below it."""
_CONTINUED = " \\\n"

# typer exports the class under no name of its own.
_Formatter: Any = TyperCommand.context_class.formatter_class


class HelpFormatter(_Formatter):  # type: ignore[misc]
    """Folds text between words: flags and names stay whole."""

    def __init__(self, **_: Any) -> None:
        from shutil import get_terminal_size

        super().__init__(width=min(get_terminal_size().columns, _WIDEST) - 2)

    def write_text(self, text: str) -> None:
        """Paragraphs, with empty lines between."""
        for number, paragraph in enumerate(re.split(r"\n\s*\n", text)):
            self.write("\n" * bool(number) + self._fold(paragraph, self.current_indent))

    def write_dl(self, rows: Any, col_max: int = _FLAG, col_spacing: int = 2) -> None:
        """Names with what they are, in two columns where there is room for them."""
        rows = list(rows)
        widest = max(len(name) for name, _ in rows)
        most = col_max if self.width >= _ROOM else self.width // 3
        column = min(widest, most) if self.width >= _ROOM or widest <= most else col_spacing
        indent = self.current_indent + column + col_spacing
        for name, text in rows:
            line = " " * self.current_indent + name
            if not text:
                self.write(f"{line}\n")
            elif len(line) + col_spacing <= indent:
                self.write(line.ljust(indent) + self._fold(text, indent).lstrip())
            else:
                self.write(self._fold(name, self.current_indent) + self._fold(text, indent))

    def write_command(self, line: str) -> None:
        """Return a command line, over several lines where it is longer than one, as a shell takes it."""
        parts = [""]
        for word in re.findall(r"--\S+ [^-\s]\S*|\S+", line):
            if len(parts[-1] + word) > self.width - self.current_indent - len(_CONTINUED) - 1:
                parts.append("  ")
            parts[-1] += word + " "
        space = " " * self.current_indent
        self.write(_CONTINUED.join(f"{space}{part.rstrip()}" for part in parts) + "\n")

    def _fold(self, text: str, indent: int) -> str:
        from textwrap import TextWrapper

        space, width = " " * indent, max(self.width, indent + 10)
        wrapper = TextWrapper(width, space, space, break_long_words=False, break_on_hyphens=False)
        return wrapper.fill(" ".join(text.split())) + "\n"


def help_text(command: Any, ctx: Any) -> str:
    """Return the whole help of a command, or of a group with the first sentence of each of its commands.

    A line of the epilog is an example.
    """
    formatter = HelpFormatter()
    command.format_usage(ctx, formatter)
    command.format_help_text(ctx, formatter)
    for title, records in _sections(command, ctx).items():
        with formatter.section(title):
            formatter.write_dl(records)
    if command.epilog:
        with formatter.section("Examples"):
            for line in command.epilog.splitlines():
                formatter.write_command(line)
    return str(formatter.getvalue()).rstrip("\n")


def _sections(command: Any, ctx: Any) -> dict[str, list[tuple[str, str]]]:
    sections: dict[str, list[tuple[str, str]]] = {}
    for parameter in command.get_params(ctx):
        record = parameter.get_help_record(ctx)
        if record is not None:
            plain = "Arguments" if parameter.param_type_name == "argument" else "Options"
            panel = getattr(parameter, "rich_help_panel", None) or plain
            flag, text = _add_choices(parameter, *record)
            sections.setdefault(panel, []).append((_without_range(flag), _without_range(text)))
    if isinstance(command, CommandGroup):
        sections["Commands"] = [*command.summaries().items()]
    return sections


_RANGE = re.compile(r"(?:; )?-?[0-9.]+<=?x(?:<=?[0-9.e+]+)?|(?:; )?x[<>]=?-?[0-9.e+]+")
"""Limits that keep nonsense out, which an error names where they are passed."""


def _without_range(text: str) -> str:
    """Return a help text without the range of numbers that the parser adds: `[default: 8; 1<=x<=1000000]`."""
    return _RANGE.sub("", text).replace("  []", "").replace("[; ", "[").replace(" []", "").rstrip()


def _add_choices(parameter: Any, flag: str, text: str) -> tuple[str, str]:
    """Return a flag with its choices behind what it is where they make it long."""
    choices = getattr(parameter.type, "choices", ())
    if not choices or len(flag) <= _FLAG:
        return flag, text
    name = flag.split()[0]
    sentence, extra, more = text.partition("  [")
    return f"{name} {name.rpartition('-')[2].upper()}", f"{sentence} One of {', '.join(choices)}.{extra}{more}"
