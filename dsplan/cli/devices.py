"""`dsplan devices`: the catalogue of accelerators, links and node types."""

from __future__ import annotations

from typing import Annotated

import typer

from dsplan.cli.flags import JsonFlag


def devices(
    filter: Annotated[str, typer.Argument(help="Only rows with this text in name, alias, vendor or family.")] = "",
    links: Annotated[bool, typer.Option("--links", help="List links instead.")] = False,
    nodes: Annotated[bool, typer.Option("--nodes", help="List machine types instead.")] = False,
    json: JsonFlag = False,
) -> None:
    """The catalogue of GPUs, links and machine types."""
    from dsplan.render import catalogues
    from dsplan.render.show import show, show_json
    from hardware_db import datasheets
    from hardware_db.errors import DsplanError

    if links and nodes:
        raise DsplanError("--links and --nodes contradict each other; give one of them")
    rows = datasheets.links() if links else datasheets.node_types() if nodes else datasheets.devices()
    found = catalogues.matching(rows, filter)
    if json:
        show_json(catalogues.as_json(found))
    else:
        table = catalogues.links_table if links else catalogues.nodes_table if nodes else catalogues.devices_table
        show(table(found))
