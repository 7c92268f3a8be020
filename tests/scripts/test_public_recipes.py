"""The public recipes: complete rows, in words that the command line knows."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from dsplan.cli.flags import ConfigurationFlags, WorkFlags
from hardware_db.datasheets.loader import find_device
from hardware_db.files import read_shipped_yaml
from planner import vocabulary as words
from planner.models.catalogue import knows_model

RECIPES: list[dict[str, Any]] = read_shipped_yaml(
    Path(__file__).parents[2] / "scripts" / "report" / "public_recipes.yaml"
)["recipes"]


def test_there_are_thirty_of_six_projects() -> None:
    assert len(RECIPES) >= 30
    assert len(Counter(recipe["source"].partition("@")[0] for recipe in RECIPES)) >= 6
    assert len({recipe["id"] for recipe in RECIPES}) == len(RECIPES)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe["id"])
def test_a_recipe_says_what_the_flags_can_say(recipe: dict[str, Any]) -> None:
    assert set(recipe) <= {"id", "source", "path", "model", "gpus", "gpu", "plan", "work", "published", "note"}
    assert recipe["model"] is None or knows_model(recipe["model"])
    assert recipe["gpu"] is None or find_device(recipe["gpu"])
    plan, work = recipe["plan"], recipe["work"]
    assert set(plan) <= {"global_batch", *(item.name for item in fields(ConfigurationFlags))}
    assert set(work) <= {item.name for item in fields(WorkFlags)}
    assert plan["strategy"] in words.STRATEGIES
    assert work["precision"] in words.PRECISIONS
    assert work.get("fp8_recipe") in (None, *words.FP8_RECIPES)
    gpus = recipe["gpus"]
    if gpus is None:
        return
    split = plan.get("tp", 1) * plan.get("pp", 1) * plan.get("cp", 1)
    assert gpus % split == 0
    if {"micro_batch", "global_batch"} <= set(plan):
        assert plan["global_batch"] % (gpus // split * plan["micro_batch"]) == 0
