"""The source of a model to trace: known again without running its code, and new when its code changes."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from dsplan.exact import cache as versions
from dsplan.exact.cache import TraceCache
from dsplan.exact.source import ModelSource, model_source, source_files, unchanged
from hardware_db.errors import DsplanError
from hardware_db.from_json import from_json
from hardware_db.measurement import trace_record
from hardware_db.store import MemoryStore, open_store
from planner.errors import BrokenFile
from planner.models.catalogue import find_model, models
from planner.models.facts import ModelFacts

LAYERS = """
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.inner(x)
"""
FACTORY = """
from torch import nn

from trace_source_layers import Block


def make():
    open("ran", "a").write("x")
    return nn.Sequential(nn.Embedding(50, 8), nn.Sequential(*(Block() for _ in range(DEPTH))))
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a module of one's own in two files."""
    monkeypatch.chdir(tmp_path)
    # Files that change within a second keep their time, by which Python tells whether its bytecode is stale.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    write(tmp_path)
    return tmp_path


def write(directory: Path, width: int = 8, depth: int = 3) -> None:
    (directory / "trace_source_layers.py").write_text(LAYERS.replace("WIDTH", str(width)))
    (directory / "trace_source_model.py").write_text(FACTORY.replace("DEPTH", str(depth)))


def own_source() -> ModelSource:
    """The source as a new process sees it."""
    for name in ("trace_source_layers", "trace_source_model"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    return model_source("trace_source_model:make", None, TraceCache())


def runs(directory: Path) -> int:
    return len((directory / "ran").read_text())


def test_a_factory_runs_once(project: Path) -> None:
    first, second = own_source(), own_source()
    assert first == second
    assert first.facts.num_layers == 3
    assert runs(project) == 1


def test_a_factory_runs_again_when_a_file_it_uses_changes_and_not_when_it_changes_back(project: Path) -> None:
    first = own_source()
    write(project, depth=5)
    deeper = own_source()
    write(project, width=8, depth=3)
    again = own_source()
    (project / "trace_source_layers.py").write_text(LAYERS.replace("WIDTH", "8") + "# a remark\n")
    remarked = own_source()
    assert deeper.facts.num_layers == 5
    assert again == first
    assert runs(project) == 3
    identities = [json.dumps(dict(source.identity), sort_keys=True) for source in (first, deeper, remarked)]
    assert len(set(identities)) == 3


@pytest.mark.usefixtures("project")
def test_a_broken_database_is_no_reason_not_to_answer() -> None:
    def broken() -> MemoryStore:
        raise BrokenFile("dsplan.db", "the disk is full", "free some space")

    cache = TraceCache(broken)
    source = model_source("trace_source_model:make", None, cache)
    cache.keep(trace_record("0" * 32, "1" * 32, {}))
    assert source.facts.num_layers == 3
    assert cache.problem == "dsplan.db: the disk is full; free some space"


def test_what_is_kept_is_found_by_another_process() -> None:
    record = trace_record("0" * 32, "1" * 32, {"phases": {}})
    TraceCache().keep(record)
    assert TraceCache().find(record.key) == record
    assert TraceCache().series(record.series) == (record,)
    with open_store() as store:
        assert store.trace(record.key) == record


def test_names_do_not_change_what_is_built() -> None:
    by_name, by_hub_id = (model_source(name, None, TraceCache()) for name in ("opt-125m", "facebook/opt-125m"))
    assert by_name == by_hub_id
    assert model_source("opt-350m", None, TraceCache()).identity != by_name.identity
    assert model_source(None, "6.7B", TraceCache()).identity["facts"] != by_name.identity["facts"]


def test_a_config_is_known_by_all_that_it_says(tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 128}

    def source(**more: object) -> ModelSource:
        (tmp_path / "config.json").write_text(json.dumps({**config, **more}))
        return model_source(str(tmp_path), None, TraceCache())

    plain, other = source(), source(reorder_and_upcast_attn=True)
    assert plain.config == config
    assert plain.identity != other.identity


def test_every_model_of_the_catalogue_survives_json() -> None:
    for facts in models():
        assert from_json(ModelFacts, json.loads(json.dumps(asdict(facts)))) == facts


def test_a_document_of_another_version_is_refused() -> None:
    document = asdict(find_model("opt-125m"))
    with pytest.raises(DsplanError, match="wings is not a key; the keys are name, "):
        from_json(ModelFacts, {**document, "wings": 2})


def test_installed_packages_stand_for_themselves() -> None:
    here = Path(__file__)
    files = source_files([__name__])
    assert str(here) in files
    assert not any("site-packages" in path for path in files)
    assert any(path.endswith("dsplan/exact/source.py") for path in files)
    assert unchanged(files)
    assert not unchanged({**files, str(here): "0" * 64})


def test_every_file_of_the_tracer_counts_as_its_version() -> None:
    root = Path(versions.__file__).parents[2]
    counted = {path for pattern in versions._TRACER for path in root.glob(pattern)}
    tracing = root / "strategies" / "tracing"
    assert tracing / "storage_tracker.py" in counted
    assert {path for folder in ("step", "cuda", "to_hf") for path in (tracing / folder).rglob("*.py")} <= counted
