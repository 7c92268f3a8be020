"""`dsplan models`: the catalogue of architectures."""

from __future__ import annotations

from typing import Annotated

import typer

from dsplan.cli.flags import JsonFlag


def models(
    filter: Annotated[str, typer.Argument(help="Only models with this text in name, alias, family or kind.")] = "",
    json: JsonFlag = False,
) -> None:
    """The catalogue of model architectures."""
    from dsplan.render import catalogues
    from dsplan.render.show import show, show_json
    from planner.models import catalogue

    found = catalogues.matching(catalogue.models(), filter)
    if json:
        show_json(catalogues.as_json(found))
    else:
        show(catalogues.models_table(found))
