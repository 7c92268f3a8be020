"""`dsplan models`: the catalogue of architectures."""

from __future__ import annotations

from typing import Annotated

import typer

from dsplan.cli.flags import JsonFlag


def models(
    filter: Annotated[str, typer.Argument(help="Only models with this text in name, alias, family or kind.")] = "",
    json: JsonFlag = False,
) -> None:
    """Show the catalogue of model architectures."""
    from dsplan.render.catalogues import models_table, show_listing
    from planner.models.catalogue import every_model

    show_listing(every_model(), models_table, filter, json=json)


# `dsplan devices`: the catalogue of accelerators, links and node types.


def devices(
    filter: Annotated[str, typer.Argument(help="Only rows with this text in name, alias, vendor or family.")] = "",
    links: Annotated[bool, typer.Option("--links", help="List links instead.")] = False,
    nodes: Annotated[bool, typer.Option("--nodes", help="List machine types instead.")] = False,
    json: JsonFlag = False,
) -> None:
    """Show the catalogue of GPUs, links and machine types."""
    from dsplan.render.catalogues import devices_table, links_table, nodes_table, show_listing
    from hardware_db import datasheets
    from hardware_db.errors import DsplanError

    if links and nodes:
        raise DsplanError("--links and --nodes contradict each other; give one of them")
    if links:
        show_listing(datasheets.links(), links_table, filter, json=json)
    elif nodes:
        show_listing(datasheets.node_types(), nodes_table, filter, json=json)
    else:
        show_listing(datasheets.devices(), devices_table, filter, json=json)


# `dsplan probe`: what this machine has.


def probe(json: JsonFlag = False) -> None:
    """Show this machine: GPUs, links, host, software.

    With free memory, other processes on the GPUs, and what holds them back.
    """
    from dsplan.render import catalogues as render
    from dsplan.render.show import show, show_json
    from hardware_db.probe import probe as look

    machine = look()
    if json:
        show_json(render.as_json(machine))
    else:
        show(render.machine_blocks(machine))
