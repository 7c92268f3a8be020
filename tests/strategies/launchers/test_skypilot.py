"""Runs as managed jobs of SkyPilot: spot nodes lost, announced, cancelled, resumed with an undisturbed run's losses.

SkyPilot's client and parser are the real ones; its server and clouds a stand-in on this machine (`stand_in_skypilot`).
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from tests.strategies.launchers.launched import PATIENCE_SECONDS, SCRIPT, Launched, launched
from tests.strategies.launchers.stand_in_skypilot import StandInSkyPilot

pytest.importorskip("sky", reason="needs SkyPilot (scripts/ci/launchers.sh installs it beside the environment)")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

STEPS = "12"
ON_CLOUD = ("--launcher", "skypilot")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses on two ranks that nobody disturbs, without a cloud."""
    with launched(tmp_path_factory.mktemp("local"), {"STEPS": STEPS}) as run:
        assert run.wait(run.start("--nproc", "2")) == 0, run.out
        return run.losses()


class CloudRun:
    """`dsplan run --launcher skypilot` of the training script, whose bucket is a directory beside the nodes."""

    def __init__(self, cloud: StandInSkyPilot, run: Launched) -> None:
        self.cloud, self.run, self.bucket = cloud, run, cloud.directory / "bucket"
        mount = {str(self.bucket): {"source": "s3://team-runs", "mode": "MOUNT"}}
        self.task = run.directory / "mine.yaml"
        self.task.write_text(yaml.safe_dump({"setup": "pip install train", "file_mounts": mount}))

    def submit(self, *options: str, saves_every: int = 1) -> subprocess.Popen[bytes]:
        where = ("--checkpoint-dir", str(self.bucket), "--sky-task", str(self.task), "--sky-spot")
        words = (*ON_CLOUD, *where, "--sky-name", "trained", "--launcher-option", "cpus=2+", *options)
        return self.run.dsplan("run", *words, "--checkpoint-steps", str(saves_every), str(SCRIPT))

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"waited for {what}:\n{self.run.out}"
            time.sleep(0.05)


@pytest.fixture
def on_cloud(tmp_path: Path) -> Iterator[CloudRun]:
    variables = {"LOSSES": str(tmp_path / "machine" / "losses"), "STEPS": STEPS, "PAUSE": "0.5"}
    with StandInSkyPilot(tmp_path / "cloud", variables) as cloud:
        with launched(tmp_path / "machine", cloud.client_variables) as run:
            yield CloudRun(cloud, run)
        assert not cloud.left()


def test_a_lost_spot_node_is_replaced_and_the_run_resumes_at_its_step(
    on_cloud: CloudRun, reference: list[float]
) -> None:
    run, cloud = on_cloud.run, on_cloud.cloud
    process = on_cloud.submit("--nodes", "2", "--nproc", "1")
    run.until_step(3)
    cloud.lose(1)
    on_cloud.until(lambda: cloud.jobs[-1].recoveries == 1, "the recovery")
    run.until_step(6)
    run.hurry()
    assert run.wait(process) == 0, run.out
    assert run.losses() == reference
    assert len(run.rows()) <= len(reference) + 1, f"more than the step of the loss was trained twice: {run.rows()}"
    for words in ("recovered once", "managed job 1, trained: SUCCEEDED", "resumed at step"):
        assert words in run.out, run.out


def test_an_announced_loss_saves_on_all_nodes(on_cloud: CloudRun, reference: list[float]) -> None:
    run, cloud = on_cloud.run, on_cloud.cloud
    process = on_cloud.submit("--nodes", "2", "--nproc", "1", saves_every=1000)
    run.until_step(3)
    cloud.warn(1)
    on_cloud.until(lambda: cloud.jobs[-1].recoveries == 1, "the recovery from exit status 75")
    run.hurry()
    assert run.wait(process) == 0, run.out
    assert run.losses() == reference
    assert len(run.rows()) == len(reference), f"a step was trained twice, so that nothing was saved: {run.rows()}"


def test_ctrl_c_saves_and_another_machine_resumes(on_cloud: CloudRun, reference: list[float], tmp_path: Path) -> None:
    run, cloud = on_cloud.run, on_cloud.cloud
    process = on_cloud.submit("--nproc", "2")
    run.until_step(3)
    process.send_signal(signal.SIGINT)
    assert run.wait(process) == 130, run.out
    assert "trained is cancelled; its nodes save and are taken down" in run.out, run.out
    assert "resume it from anywhere: dsplan run --launcher skypilot --resume trained" in run.out, run.out
    assert not cloud.left()
    with launched(tmp_path / "elsewhere", cloud.client_variables) as other:
        assert other.wait(other.dsplan("run", *ON_CLOUD, "--detach", "--resume", "trained")) == 0, other.out
        on_cloud.until(lambda: len(run.rows()) >= 5, "step 5")
        run.hurry()
        assert other.wait(other.dsplan("watch", "trained", *ON_CLOUD)) == 0, other.out
        assert "managed job 2, trained: SUCCEEDED" in other.out, other.out
        assert other.wait(other.dsplan("watch", "trained", *ON_CLOUD, "--json")) == 0, other.out
        document = json.loads(other.out[other.out.rindex("{\n") :])
        assert (document["number"], document["status"], document["recoveries"]) == (2, "SUCCEEDED", 0)
    assert run.losses() == reference
    assert len(run.rows()) == len(reference), f"a step was trained twice, so that nothing was saved: {run.rows()}"
