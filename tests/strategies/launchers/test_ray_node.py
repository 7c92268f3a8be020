"""The ranks of one node, as an actor of Ray would start them; no Ray runs."""

from __future__ import annotations

import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hardware_db.errors import DsplanError
from strategies.launch.launchers import ray_node
from strategies.launch.launchers.ray_node import NodeAddress, NodeRanks, NodeStart
from strategies.launch.options import DEFAULT_SUPERVISION
from strategies.run_directory.spec import STOPPED, LaunchSpec
from tests.strategies.launchers.ray_cluster import missing

PLACE = NodeAddress(node_id="a", host="n0", address="10.0.0.1", port=29400)


def spec_in(directory: Path) -> LaunchSpec:
    spec = LaunchSpec(script="train.py", processes=2, run_directory=str(directory), supervision=DEFAULT_SUPERVISION)
    spec.save()
    return spec


def start_of(spec: LaunchSpec, **more: Any) -> NodeStart:
    given = {"first_rank": 2, "world_size": 4, "meeting_point": PLACE, "has_gpus": False, "directory": "/", **more}
    return NodeStart(spec_path=str(spec.path), **given)


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what every rank runs: Python, with the program that the test appends."""
    command = [sys.executable, "-S", "-c"]
    monkeypatch.setattr(ray_node, "rank_command", lambda spec: command)
    return command


@pytest.mark.parametrize(("codes", "ended"), [("0", {2: 0, 3: 0}), (str(STOPPED), {2: 75, 3: 75})])
def test_ranks_that_end_as_they_should_are_waited_for(
    codes: str, ended: dict[int, int], program: list[str], tmp_path: Path
) -> None:
    program.append(f"import os, time; time.sleep(0.2 * (os.environ['LOCAL_RANK'] == '1')); os._exit({codes})")
    assert NodeRanks().run(start_of(spec_in(tmp_path))) == ended


def test_the_first_that_fails_is_told_and_the_others_are_ended(program: list[str], tmp_path: Path) -> None:
    program.append("import os, time; time.sleep(60 * (os.environ['RANK'] == '2')); os._exit(3)")
    node = NodeRanks()
    assert node.run(start_of(spec_in(tmp_path))) == {3: 3}
    began = time.monotonic()
    assert node.end(0.1) == {3: 3}, "the status of a rank that was killed here is not the rank's own"
    assert time.monotonic() - began < 5


def test_a_signal_reaches_every_rank(program: list[str], tmp_path: Path) -> None:
    touch = f"open({str(tmp_path)!r} + '/ready' + os.environ['RANK'], 'w')"
    program.append(f"import os, signal; signal.pthread_sigmask(signal.SIG_BLOCK, [10]); {touch}; signal.sigwait([10])")
    node = NodeRanks()
    statuses: list[dict[int, int]] = []
    running = threading.Thread(target=lambda: statuses.append(node.run(start_of(spec_in(tmp_path)))))
    running.start()
    while len(list(tmp_path.glob("ready*"))) < 2:
        time.sleep(0.01)
    node.signal(signal.SIGUSR1)
    running.join(30)
    assert statuses == [{2: 0, 3: 0}]


def test_the_gpus_are_those_that_ray_reserved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    spec, handed = spec_in(tmp_path), {"CUDA_VISIBLE_DEVICES": "", "RAY_ADDRESS": "auto", "HF_HOME": "/models"}
    variables = ray_node.rank_variables(start_of(spec, has_gpus=True, variables=handed), 2, 1)
    assert variables["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert (variables["HF_HOME"], "RAY_ADDRESS" in variables) == ("/models", False)
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [variables[name] for name in names] == ["3", "4", "1", "2", "10.0.0.1", "29400"]
    hidden = ray_node.rank_variables(start_of(spec, variables=handed), 2, 1)
    assert hidden["CUDA_VISIBLE_DEVICES"] == ""


def test_a_run_directory_that_a_node_does_not_see(tmp_path: Path) -> None:
    spec = LaunchSpec(
        script="train.py", processes=2, run_directory=str(tmp_path / "elsewhere"), supervision=DEFAULT_SUPERVISION
    )
    with pytest.raises(DsplanError, match="name a --run-dir on a file system that all nodes share"):
        NodeRanks().run(start_of(spec))


@pytest.mark.slow
@pytest.mark.skipif(bool(missing()), reason=missing() or "-")
def test_gpus_are_reserved_where_the_cluster_has_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from strategies.launch.launchers.ray_driver import bundle_of

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    spec = spec_in(tmp_path)
    alone = {"Alive": True, "Resources": {"CPU": 8.0}}
    equipped = {"Alive": True, "Resources": {"CPU": 64.0, "GPU": 8.0}}
    bundle = bundle_of(spec, [alone, equipped])
    assert bundle.resources == {"GPU": 2.0, "CPU": 2.0}
    assert str(bundle) == "2 GPU and 2 CPU"
    assert [bundle.fits(node) for node in (alone, equipped, {**equipped, "Alive": False})] == [False, True, False]
    assert bundle_of(spec, [alone, {**equipped, "Alive": False}]).resources == {"CPU": 2.0}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert bundle_of(spec, [alone, equipped]).resources == {"CPU": 2.0}
