"""`dsplan check`: a trainer's own config or script, read, priced and put right."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dsplan.cli.flags import GroupedCommand, HardwareFlags, JsonFlag, among, number, with_flags
from planner import limits

if TYPE_CHECKING:
    from dsplan.checking import Checked
    from dsplan.report.page import Page

SEPARATOR = "--"


class FilesAndCommand(GroupedCommand):
    """A command whose words behind `--` are a command of their own."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep the first `--` as a word, which click would swallow."""
        if SEPARATOR in args:
            position = args.index(SEPARATOR)
            args = [*args[:position], SEPARATOR, *args[position:]]
        return list(super().parse_args(ctx, args))


check = typer.Typer(add_completion=False, rich_markup_mode=None)


@check.command("check", cls=FilesAndCommand)
@with_flags
def check_config(
    files: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FILE… [-- COMMAND …]",
            help="Config, script, or a folder of them; several files are one training. A command stands behind --.",
        ),
    ] = None,
    *,
    hardware: HardwareFlags,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model, where no file names one that is known.")
    ] = None,
    seq_len: Annotated[int | None, number(limits.TOKENS, "Tokens per sample, in place of the file's.")] = None,
    max_memory_gb: Annotated[
        float | None, number(limits.GIGABYTES, "Memory one GPU may use, in 1e9 bytes.", "GB")
    ] = None,
    format: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="The config's format, where its content does not tell.",
            autocompletion=among("planner.read.recognise:FORMATS"),
        ),
    ] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Print the better plan as a diff of the file.")] = False,
    each: Annotated[
        bool, typer.Option("--each", help="Several files are as many trainings: a line for each, as of a folder.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the changed file there; the file itself stays.")
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(metavar="PAGE", help="Write it as an HTML page that needs no network (extra report)."),
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Read a trainer's own config or script: does it fit, how fast is it, what is wrong with it.

    Nothing in it is run. Exit status 0 if it fits, 1 if it does not or has an error, 2 if it cannot be read.
    """
    from dsplan.checking import check_files
    from dsplan.render.check_view import check_blocks, check_to_dict
    from dsplan.render.show import show, show_json
    from hardware_db.notices import notice
    from planner.errors import ContradictoryRequest

    paths, command = _split(files or [])
    if not paths and not command:
        raise ContradictoryRequest("no file is named; give a config or a script, or a command behind --")
    options = {**asdict(hardware), "max_memory_gb": max_memory_gb}
    is_folder = len(paths) == 1 and os.path.isdir(paths[0]) and not command  # False for names that no file can have
    if is_folder or each:
        _check_each([Path(path) for path in paths], options, is_folder=is_folder, json=json, report=report)
    checked = check_files(
        [Path(path) for path in paths], command, format=format, hardware=options, model=model, seq_len=seq_len
    )
    if fix or out is not None:
        _write(checked, out, prints=fix and not json)
    if report is not None:
        from dsplan.cli.report import typed_command
        from dsplan.report.make import check_page

        _write_page(check_page(checked, typed_command()), report)
    if json:
        show_json(check_to_dict(checked))
    elif not fix and out is None and report is None:
        show(check_blocks(checked))
    if checked.status == 2:
        notice(f"no estimate: {checked.audit.why}")
    raise typer.Exit(checked.status)


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the files and the command behind `--`, which `dsplan.cli.app` keeps as a word of its own."""
    if SEPARATOR not in words:
        return list(words), []
    position = list(words).index(SEPARATOR)
    return list(words[:position]), list(words[position + 1 :])


def _write(checked: Checked, out: Path | None, *, prints: bool) -> None:
    """Print the change as a diff, write the changed file, or both.

    Raises:
        ContradictoryRequest: there is nothing to change, or the files have no keys for it.
    """
    from dsplan.render.show import say, show_file
    from hardware_db.files import replace_text
    from planner.errors import ContradictoryRequest

    better = checked.audit.better
    if better is None or not better.texts:
        fits = checked.status == 0
        why = (
            "nothing to change: no plan of the trainer is clearly faster, or has more room where the files' is tight"
            if fits
            else "no change of the file makes it fit and run"
        )
        if better is not None:
            why = "the better plan has no keys in this file; `dsplan check` without --fix shows it"
        say(why, stderr=True)
        return
    for finding in better.left:
        say(f"an error that stays: {finding.message}", stderr=True)
    if prints:
        show_file(better.diff)
    if out is not None:
        if len(better.texts) > 1:
            raise ContradictoryRequest(f"--out names one file, and {len(better.texts)} change; use --fix for the diff")
        replace_text(out, next(iter(better.texts.values()))[1])


def _write_page(page: Page, out: Path) -> None:
    """Write a page and say so, on the other stream than what is printed of the check itself.

    Raises:
        DsplanError: plotly is not installed, or the file cannot be written.
    """
    from dsplan.render.show import say
    from dsplan.report.page import page_html
    from hardware_db.files import replace_text

    replace_text(out, page_html(page))
    say(f"{out}: {page.title}", stderr=True)


def _check_each(
    paths: list[Path], options: dict[str, Any], *, is_folder: bool, json: bool, report: Path | None
) -> None:
    """Check files, or every config and script below a folder, by themselves; end with 1 where any is not fit to run."""
    from dsplan.checking import check_each, check_folder
    from dsplan.render.check_view import check_to_dict, folder_blocks
    from dsplan.render.show import show, show_json

    rows = check_folder(paths[0], options) if is_folder else check_each(paths, options)
    if report is not None:
        from dsplan.report.make import folder_page

        _write_page(folder_page(rows, str(paths[0]) if is_folder else f"{len(rows)} configs"), report)
    if json:
        show_json(
            [
                {"file": path, "why": outcome} if isinstance(outcome, str) else {"file": path, **check_to_dict(outcome)}
                for path, outcome in rows
            ]
        )
    elif report is None:
        show(folder_blocks(rows))
    raise typer.Exit(any(not isinstance(outcome, str) and outcome.status == 1 for _, outcome in rows))
