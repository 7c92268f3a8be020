"""Shared runs: nothing of them says whose they are, and those of strangers are trusted less."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from dsplan.__main__ import main
from hardware_db.files import canonical_json
from hardware_db.measurement import Measured
from hardware_db.store import MemoryStore, open_store
from hardware_db.store.transfer import is_shared, read_export
from tests.hardware_db.store.records import measurement, plan, rate

SECRET = "topsecret"


def run(number: int, model: dict[str, Any] | None = None, **workload: object) -> Any:
    """A run whose every text that a person may choose holds the secret."""
    document = plan()
    document["model"] = {
        "name": f"/home/{SECRET}/checkpoints/llama", "model_type": "llama", "kind": "decoder",
        "parameters": 1_000, "facts": {"name": SECRET, "hidden_size": 8}, **(model or {}),
    }  # fmt: skip
    document["cluster"]["assumed"] = f"as on {SECRET}"
    document["workload"] |= workload
    document |= {"notes": [SECRET], "alternatives": [{"strategy": "fsdp", "reason": SECRET}]}
    measured = Measured(step_seconds=0.5, first_loss=2.0, last_loss=1.0, steps=20)
    return measurement(number, plan_json=canonical_json(document), measured=measured)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's data directory with runs to share and runs to keep."""
    monkeypatch.setenv("DSPLAN_HOME", str(tmp_path / "home"))
    with open_store() as store:
        store.add(
            run(1),
            run(2, {"name": "facebook/opt-125m"}),
            run(3, {"kind": "custom", "model_type": ""}),
            run(4, code=f"{SECRET}/code.yaml"),
            run(5, train_only=f"{SECRET}.*"),
            run(6, lora_targets=f"{SECRET}_proj"),
            measurement(7, source="import"),
            rate(8),
        )
    return tmp_path


@pytest.fixture
def shared(home: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """Return what `dsplan db share` wrote."""
    path = home / "shared.jsonl"
    assert main(["db", "share", str(path)]) == 0
    assert capsys.readouterr().out.startswith(f"2 runs written to {path}, 4 left out")
    return path


def test_nothing_that_a_person_chose_is_in_a_shared_file(shared: Path) -> None:
    assert SECRET not in shared.read_text()
    first, second = (json.loads(line) for line in shared.read_text().splitlines())
    assert first["plan"]["model"]["name"] == "llama of 1000 parameters"
    assert second["plan"]["model"]["name"] == "facebook/opt-125m"
    assert first["id"] != f"{1:032x}"
    assert first["created_at"] == "2026-01-31T00:00:00.000000Z"
    assert first["measured"]["step_seconds"] == 0.5
    assert (first["measured"]["first_loss"], first["measured"]["last_loss"]) == (None, None)
    assert all(record.source == "shared" for record in read_export(shared))


@pytest.fixture
def address(shared: Path) -> Iterator[str]:
    """Return where a server publishes the file."""
    handler = partial(SimpleHTTPRequestHandler, directory=str(shared.parent))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_what_is_imported_keeps_its_origin_and_is_shared_no_further(
    shared: Path, address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DSPLAN_HOME", str(shared.parent / "another"))
    assert main(["db", "import", f"{address}/shared.jsonl"]) == 0
    assert main(["db", "import", str(shared)]) == 0
    with open_store() as store:
        sources = {record.source for record in store.list()}
    assert sources == {f"shared:{address}/shared.jsonl"}
    capsys.readouterr()
    assert main(["db", "share", str(shared.parent / "again.jsonl")]) == 0
    assert capsys.readouterr().out.startswith("0 runs")
    assert main(["db", "import", f"{address}/none.jsonl"]) == 2
    assert f"{address}/none.jsonl: cannot be fetched (File not found)" in capsys.readouterr().err


def test_a_file_names_itself_as_the_origin(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DSPLAN_HOME", str(shared.parent / "another"))
    assert main(["db", "import", str(shared)]) == 0
    with open_store() as store:
        assert {record.source for record in store.list()} == {"shared:shared.jsonl"}
        assert all(is_shared(record.source) for record in store.list())


def test_a_strangers_run_is_not_one_that_was_made_here() -> None:
    """Even on a machine with the same fingerprint."""
    from dataclasses import replace

    from planner.search.recall import recall_from
    from tests.planner.calibration.runs import HERE
    from tests.planner.search.questions import question

    request = question("gpt2", "a100-80gb", 8)
    request = replace(request, cluster=replace(request.cluster, machine=HERE))
    own, strange = MemoryStore(), MemoryStore()
    own_run = made_here(request)
    own.add(own_run)
    strange.add(replace(own_run, source="shared:somewhere"))
    assert recall_from(own, request).experience.known_runs
    assert not recall_from(strange, request).experience.known_runs


def made_here(request: Any) -> Any:
    """A run of the first plan of a request, on its machine."""
    from hardware_db.fingerprint import fingerprint
    from hardware_db.measurement import measure_run
    from planner.search.search import recommend
    from planner.types.plan_io import plan_to_dict

    document = plan_to_dict(recommend(request).plans[0])
    measured = Measured(step_seconds=1.0, steps=20)
    return measure_run(document, fingerprint(request.cluster.machine), outcome="completed", measured=measured)
