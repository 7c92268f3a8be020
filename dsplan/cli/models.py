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
    from dsplan.render.catalogues import models_table, show_listing
    from planner.models.catalogue import models as all_models

    show_listing(all_models(), models_table, filter, json=json)
