"""`--model` and `--model-size`: from what people write to ModelFacts."""

from __future__ import annotations

import os
import re
from pathlib import Path

from planner.errors import BrokenFile, ContradictoryRequest, DsplanError
from planner.models.catalogue import find_model, knows_model
from planner.models.facts import ModelFacts

WAYS = "a name (`dsplan models` lists them), a config.json, package.module:factory, or --model-size 6.7B"
_FACTORY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")


def resolve_model(name: str | None, *, model_size: str | None = None) -> ModelFacts:
    """The model that `name` or `model_size` stands for.

    A path of a config.json or of a directory that holds one comes first, then the catalogue, then a size such as
    `6.7B`. `package.module:factory` is code: `any_model` beside the tracer runs it.

    Raises:
        ContradictoryRequest: both or neither are given.
        DsplanError: nothing answers to the name (the message offers the nearest), or the file or factory is broken.
    """
    if name is not None and model_size is not None:
        raise ContradictoryRequest(f"--model {name} and --model-size {model_size} are both given; drop one")
    if model_size is not None:
        return _sized(model_size)
    if name is None or not name.strip():
        raise DsplanError(f"no model is named; give --model {WAYS}")
    return _named(name.strip())


def config_file(name: str) -> Path | None:
    """Return the config.json that a name stands for, or None if it stands for something else."""
    path = Path(os.path.expanduser(name.strip()))
    if not _is_config(path):
        return None
    return path if path.suffix == ".json" else path / "config.json"


def is_factory(name: str) -> bool:
    """Whether a name stands for `package.module:factory`."""
    return config_file(name) is None and _FACTORY.fullmatch(name.strip()) is not None


def _named(name: str) -> ModelFacts:
    path = Path(os.path.expanduser(name))
    if _is_config(path) or (_exists(path) and not knows_model(name)) or path.suffix == ".json":
        return _from_file(path)
    if _FACTORY.fullmatch(name):
        raise DsplanError(f"{name} is code, which only dsplan itself runs; ask `import dsplan`, or name a config.json")
    if not knows_model(name):
        from planner.models.sizes import looks_like_a_size

        if looks_like_a_size(name):
            return _sized(name)
    return find_model(name)


def _is_config(path: Path) -> bool:
    try:
        return path.is_file() if path.suffix == ".json" else (path / "config.json").is_file()
    except OSError:  # a name too long for the file system, or a directory that may not be looked into
        return False


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False


def _from_file(path: Path) -> ModelFacts:
    from planner.models.from_hf.config import read_config

    if not _exists(path):
        raise BrokenFile(path, "does not exist", "name the config.json of a model, or a directory that holds one")
    if path.is_file() and path.suffix != ".json":
        raise BrokenFile(path, "is no config.json", f"--model takes {WAYS}")
    return read_config(path)


def _sized(size: str) -> ModelFacts:
    from planner.models.sizes import model_of_size

    return model_of_size(size)
