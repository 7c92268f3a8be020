"""Runs on a cluster: submitted, followed, killed, evicted, stopped and resumed with the losses of an undisturbed run.

The cluster is a stand-in that runs pods as processes of this machine (`stand_in_cluster`), the client the official one.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.strategies.launchers.launched import PATIENCE_SECONDS, SCRIPT, Launched, launched
from tests.strategies.launchers.stand_in_cluster import StandInCluster

pytest.importorskip("kubernetes", reason="needs the Kubernetes client (pip install 'dsplan[kubernetes]')")
pytest.importorskip("kubernetes_validate", reason="needs the API's schemas (pip install kubernetes-validate)")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

STEPS = "12"
ON_CLUSTER = ("--launcher", "kubernetes")


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses on two ranks that nobody disturbs, without a cluster."""
    with launched(tmp_path_factory.mktemp("local"), {"STEPS": STEPS}) as run:
        assert run.wait(run.start("--nproc", "2")) == 0, run.out
        return run.losses()


class ClusterRun:
    """`dsplan run --launcher kubernetes` of the training script on a stand-in cluster."""

    def __init__(self, cluster: StandInCluster, run: Launched) -> None:
        self.cluster, self.run = cluster, run

    def submit(self, *options: str) -> subprocess.Popen[bytes]:
        cluster_flags = ("--kube-image", self.cluster.image, "--kube-volume", f"runs:{self.cluster.directory}/volume")
        words = (*ON_CLUSTER, *cluster_flags, "--kube-name", "trained", "--launcher-option", "cpu=1", *options)
        return self.run.dsplan("run", *words, "--checkpoint-steps", "1", str(SCRIPT))

    def attempts(self, node: int = 0) -> list[str]:
        """Return how the attempts of a node's `dsplan run` ended, and the last one's outcome."""
        text = (self.cluster.directory / "volume" / "trained" / f"node{node}" / "run.jsonl").read_text()
        rows = [json.loads(line) for line in text.splitlines()]
        return [row.get("kind") or row["outcome"] for row in rows if row["event"] in ("ending", "end")]

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"waited for {what}:\n{self.run.out}"
            time.sleep(0.05)


@pytest.fixture
def on_cluster(tmp_path: Path) -> Iterator[ClusterRun]:
    losses = str(tmp_path / "machine" / "losses")
    variables = {"LOSSES": losses, "STEPS": STEPS, "PAUSE": "0.5"}
    with StandInCluster(tmp_path / "cluster", variables) as cluster:
        with launched(tmp_path / "machine", {"KUBECONFIG": str(cluster.kubeconfig)}) as run:
            yield ClusterRun(cluster, run)
        cluster_left = [pod.name for pod in cluster.pods() if pod.is_live]
        assert not cluster_left
        assert not cluster.left()
        assert not cluster.violations


def test_a_pod_killed_is_resumed_at_its_step(on_cluster: ClusterRun, reference: list[float]) -> None:
    run, cluster = on_cluster.run, on_cluster.cluster
    process = on_cluster.submit("--nproc", "2")
    run.until_step(3)
    cluster.kill(0)
    run.until_step(5)
    run.hurry()
    assert run.wait(process) == 0, run.out
    assert run.losses() == reference
    assert len(run.rows()) <= len(reference) + 1, f"more than the step of the kill was trained twice: {run.rows()}"
    for words in ("restarted once", "dsplan: Pod trained-node-0-0-00001: BackOff", "TrainJob trained: completed"):
        assert words in run.out, run.out
    assert "completed: 12 steps, 2 attempts" in run.out, run.out


def test_an_evicted_pod_saves_with_the_others(on_cluster: ClusterRun, reference: list[float]) -> None:
    run, cluster = on_cluster.run, on_cluster.cluster
    process = on_cluster.submit("--kube-kind", "JobSet", "--nodes", "2", "--nproc", "1")
    run.until_step(3)
    cluster.evict(1)
    on_cluster.until(lambda: "preempted" in on_cluster.attempts(node=1), "the save of the evicted pod")
    run.until_step(5)
    run.hurry()
    assert run.wait(process) == 0, run.out
    assert run.losses() == reference
    assert len(run.rows()) == len(reference), f"a step was trained twice, so that nothing was saved: {run.rows()}"
    assert "dsplan: Pod trained-node-0-1-00002: Evicted: the machine is drained" in run.out, run.out


def test_ctrl_c_saves_and_another_machine_resumes(
    on_cluster: ClusterRun, reference: list[float], tmp_path: Path
) -> None:
    run, cluster = on_cluster.run, on_cluster.cluster
    process = on_cluster.submit("--nproc", "2")
    run.until_step(3)
    process.send_signal(signal.SIGINT)
    assert run.wait(process) == 130, run.out
    assert "trained is suspended; its pods save and end" in run.out, run.out
    assert not cluster.pods()
    assert not cluster.left()
    assert on_cluster.attempts() == ["preempted", "preempted"]
    with launched(tmp_path / "elsewhere", {"KUBECONFIG": str(cluster.kubeconfig)}) as other:
        assert other.wait(other.dsplan("run", *ON_CLUSTER, "--detach", "--resume", "trained")) == 0, other.out
        on_cluster.until(lambda: len(run.rows()) >= 5, "step 5")
        run.hurry()
        assert other.wait(other.dsplan("watch", "trained", *ON_CLUSTER)) == 0, other.out
        assert "TrainJob trained: completed" in other.out, other.out
    assert run.losses() == reference
    assert len(run.rows()) == len(reference), f"a step was trained twice, so that nothing was saved: {run.rows()}"
