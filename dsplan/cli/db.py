"""`dsplan db`: the runs that dsplan remembers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dsplan.cli.flags import CommandGroup, GroupedCommand

app = typer.Typer(
    cls=CommandGroup,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List, show, forget, export, share and import measured runs, and learn from them.",
)

_HOW_TO_FILL = "`dsplan run train.py` stores every run, `dsplan db import FILE` adds those of others."

Json = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]


@app.command("list", cls=GroupedCommand)
def list_measurements(
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Only runs of this model.")] = None,
    strategy: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only runs of this strategy, or unplanned ones.")
    ] = None,
    limit: Annotated[
        int, typer.Option(min=1, max=1_000_000, metavar="N", help="How many of the newest runs to show.")
    ] = 20,
    json: Json = False,
) -> None:
    """Show the newest runs: memory, time, and the predictions' errors."""
    from dsplan.diagnostics.recorded_runs import UNPLANNED
    from dsplan.render.db_view import measurement_table
    from dsplan.render.show import Text, show, show_json
    from hardware_db.errors import UnknownName
    from hardware_db.files import database_address, database_path
    from hardware_db.store import open_store
    from hardware_db.store.repair import set_aside_files
    from hardware_db.store.transfer import SCHEMA_VERSION, to_document
    from planner.vocabulary import STRATEGIES

    strategies = (*STRATEGIES, UNPLANNED)
    if strategy is not None and strategy not in strategies:
        raise UnknownName("strategy", strategy, strategies, hint=f"the strategies are {', '.join(strategies)}")
    with open_store(thorough=True) as store:
        total = store.count()
        # One more than asked for, to know whether there are older ones.
        measurements = store.list(model=model, strategy=strategy, limit=limit + 1)
    aside = () if database_address() else set_aside_files(database_path())
    shown = measurements[:limit]
    notes = [Text(text=_aside_text(aside), style="faint")] if aside else []
    if json:
        show_json(
            {"schema_version": SCHEMA_VERSION, "measurements": [to_document(measurement) for measurement in shown]}
        )
    elif not total:
        show([Text(text=f"The database is empty: {_HOW_TO_FILL}"), *notes])
    elif not shown:
        show([Text(text=f"None of the {total} stored runs matches; `dsplan db list` shows all."), *notes])
    else:
        has_more = len(measurements) > limit
        older = [Text(text="There are older ones; --limit shows more.", style="faint")] if has_more else []
        show([measurement_table(shown), *older, *notes])


def _aside_text(aside: tuple[Path, ...]) -> str:
    """Return where the damaged databases are that were set aside, however long ago that was said."""
    others = f" and {len(aside) - 1} more" if len(aside) > 1 else ""
    return f"A damaged database was set aside as {aside[-1]}{others}; delete it when you miss no run."


@app.command("show", cls=GroupedCommand)
def show_measurement(
    id: Annotated[str, typer.Argument(help="The id of a run, or enough of its first digits.")], json: Json = False
) -> None:
    """One run: plan, machine, predicted and measured figures."""
    from dsplan.render.db_view import measurement_blocks
    from dsplan.render.show import Text, show, show_json
    from hardware_db.store import open_store
    from hardware_db.store.transfer import to_document

    with open_store(thorough=True) as store:
        measurement = store.get(id)
        origin = store.origin(measurement.id)
    if json:
        show_json(to_document(measurement))
    else:
        added = [Text(text=f"added by {origin.user or 'somebody'} on {origin.host}", style="faint")] if origin else []
        show([*measurement_blocks(measurement), *added])


@app.command("forget", cls=GroupedCommand)
def forget_measurement(
    id: Annotated[str, typer.Argument(help="The id of a run, or enough of its first digits.")],
) -> None:
    """Remove one run, so that nothing is learnt from it and a plan that ran out of memory may be proposed again."""
    from dsplan.render.show import say
    from hardware_db.store import open_store

    with open_store(thorough=True) as store:
        forgotten = store.forget(id)
    day = forgotten.created_at[:10]
    say(f"forgotten: {forgotten.id[:8]}, {forgotten.model} under {forgotten.strategy} on {day}")


@app.command("export", cls=GroupedCommand)
def export_database(
    file: Annotated[Path | None, typer.Argument(help="The file to write; the terminal or pipe without one.")] = None,
) -> None:
    """All runs and machine rates as JSON lines."""
    from dsplan.render.show import say, show_file
    from hardware_db.files import replace_text
    from hardware_db.store import open_store
    from hardware_db.store.transfer import export_text

    with open_store(thorough=True) as store:
        text = export_text(store)
    if file is None:
        show_file(text)
    else:
        replace_text(file, text)
        say(f"{text.count(chr(10))} records written to {file}")


@app.command("share", cls=GroupedCommand)
def share(file: Annotated[Path, typer.Argument(help="The file to write, for a public collection.")]) -> None:
    """Write this database's own runs without names, paths, hosts, times of day and losses."""
    from dsplan.render.show import say
    from hardware_db.files import replace_text
    from hardware_db.store import open_store
    from hardware_db.store.shared import shared_runs
    from hardware_db.store.transfer import to_lines
    from planner.models.catalogue import public_name

    with open_store(thorough=True) as store:
        runs, kept_back = shared_runs(store, public_name)
    replace_text(file, to_lines(runs))
    say(f"{len(runs)} runs written to {file}, {kept_back} left out: of models, code or names of your own")


@app.command("import", cls=GroupedCommand)
def import_database(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE|URL",
            help="A file that `dsplan db export` or `dsplan db share` wrote, where one is published, or a run directory"
            " of `dsplan run`.",
        ),
    ],
) -> None:
    """Add the records of an export, or the rows that a run directory keeps, all or none.

    Shared runs, and all from a URL, are strangers': they are learnt from with doubt, and stand for no run made here.
    """
    from dsplan.render.show import say
    from hardware_db.store import open_store
    from hardware_db.store.shared import import_address, published_at
    from hardware_db.store.transfer import import_file, import_records

    address = published_at(file)
    with open_store(thorough=True) as store:
        if address is not None:
            count = import_address(store, address)
        elif file.is_dir():
            from dsplan.diagnostics.recorded_runs import recorded_runs

            count = import_records(store, recorded_runs(file))
        else:
            count = import_file(store, file)
    say(f"{count.added} records imported, {count.skipped} were there already")


@app.command("push", cls=GroupedCommand)
def push() -> None:
    """Send what this user's own file holds to the team's database that DSPLAN_DATABASE names."""
    _copy(sends=True)


@app.command("pull", cls=GroupedCommand)
def pull() -> None:
    """Bring what the team's database holds into this user's own file, for work without a network."""
    _copy(sends=False)


def _copy(*, sends: bool) -> None:
    from dsplan.render.show import say
    from hardware_db.errors import DsplanError
    from hardware_db.files import DATABASE, database_address, database_name, database_path
    from hardware_db.store import open_own_store, open_store
    from hardware_db.store.transfer import copy_records

    if database_address() is None:
        raise DsplanError(f"{DATABASE} names no shared database; set it to postgresql://user@host/name")
    with open_store() as shared, open_own_store() as own:
        count = copy_records(own, shared) if sends else copy_records(shared, own)
    target = database_name() if sends else database_path()
    say(f"{count.added} records added to {target}, {count.skipped} were there already")


@app.command("calibrate", cls=GroupedCommand)
def calibrate(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be learnt, and store nothing.")] = False,
    json: Json = False,
) -> None:
    """Learn from the stored runs: few factors per kind of hardware, tried on runs that they were not fitted to."""
    from dsplan.render.db_view import calibration_blocks, calibration_json
    from dsplan.render.show import Text, show, show_json
    from hardware_db.probe import probe_hardware
    from hardware_db.store import open_store
    from planner.calibration.learn import refresh

    with open_store(thorough=True) as store:
        refreshed = refresh(store, probe_hardware(), keep=not dry_run)
    if json:
        show_json(calibration_json(refreshed, stored=not dry_run))
    elif refreshed.kinds or refreshed.skipped:
        show(calibration_blocks(refreshed, stored=not dry_run))
    else:
        show([Text(text=f"There is nothing to learn from: {_HOW_TO_FILL}")])
