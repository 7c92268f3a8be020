"""Training whose losses on cards are compared with those on the CPU."""

from __future__ import annotations

import os
from unittest import mock

from tests.strategies import parallel_bodies, training_bodies
from tests.strategies.parallel_bodies import Composition, Kind
from tests.strategies.training_bodies import Recipe


def losses(recipe: Recipe, directory: str) -> tuple[str, list[float]]:
    """The kind of device that a recipe was trained on, and its losses; states on a disk are below `directory`."""
    with mock.patch.dict(os.environ, DSPLAN_NVME_PATH=directory):
        engine = training_bodies.make_engine(recipe)
    return engine.device.type, [training_bodies.one_step(engine, step) for step in range(recipe.steps)]


def losses_of_split_model(kind: Kind, composition: Composition) -> tuple[str, list[float]]:
    """The same of a model that ranks split."""
    engine = parallel_bodies.make_engine(kind, composition)
    return engine.device.type, [parallel_bodies.one_step(engine, step) for step in range(composition.steps)]
