"""Words of `dsplan run --launcher kubernetes` and what it leaves on a cluster, with pods that only seem to train."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsplan.cli.app import run
from hardware_db.errors import DsplanError
from tests.strategies.launchers.api_schemas import problems_of, problems_of_change
from tests.strategies.launchers.stand_in_cluster import StandInCluster

pytest.importorskip("kubernetes", reason="needs the Kubernetes client (pip install 'dsplan[kubernetes]')")
pytest.importorskip("kubernetes_validate", reason="needs the API's schemas (pip install kubernetes-validate)")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TRAINS = """\
echo "$@"
trap 'echo saved; exit 75' TERM
if [ "$2" = --resume ]; then echo resumed; exit 0; fi
touch "$3/launch.json"
echo step 1
while [ ! -e enough ]; do sleep 0.05; done
"""


class Client:
    """The command in this process, with a cluster whose image has a `dsplan` that is a shell script."""

    def __init__(self, cluster: StandInCluster, capsys: pytest.CaptureFixture[str]) -> None:
        self.cluster, self._capsys = cluster, capsys

    def image_has(self, script: str) -> None:
        (self.cluster.directory / "bin" / "dsplan").write_text(f"#!/bin/sh\n{script}")

    def enough(self) -> None:
        """Let the pods complete."""
        (self.cluster.directory / "enough").touch()

    def submit(self, *words: str) -> tuple[int, str]:
        cluster_flags = ("--kube-image", self.cluster.image, "--kube-volume", f"runs:{self.cluster.directory}/volume")
        options = ("--kube-name", "trained", "--launcher-option", "cpu=1", "--nproc", "2")
        return self.run("run", *cluster_flags, *options, *words, "train.py")

    def run(self, command: str, *words: str) -> tuple[int, str]:
        """Exit status and output."""
        try:
            status = run((command, "--launcher", "kubernetes", *words))
        except DsplanError as error:
            return error.exit_code, str(error)
        captured = self._capsys.readouterr()
        return status, captured.out + captured.err


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Client]:
    with StandInCluster(tmp_path / "cluster", {}) as cluster:
        # The client reads KUBECONFIG once per process.
        monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(cluster.kubeconfig))
        new_client = Client(cluster, capsys)
        new_client.image_has(TRAINS)
        yield new_client
        assert not cluster.violations


def _later(client: Client, act: signal.Signals) -> threading.Thread:
    """Send this process a signal when the pod trains and its log is followed."""

    def send() -> None:
        deadline = time.monotonic() + 60
        while not any("/log?" in request for request in client.cluster.requests):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(os.getpid(), act)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.parametrize("kind", ["TrainJob", "PyTorchJob", "JobSet"])
def test_a_run_of_every_kind_is_detached_watched_and_described(kind: str, client: Client) -> None:
    status, out = client.submit("--kube-kind", kind, "--nodes", "2", "--detach")
    assert status == 0, out
    assert "watch it from anywhere: dsplan watch trained --launcher kubernetes --kube-namespace default" in out
    client.enough()
    status, out = client.run("watch", "trained")
    assert status == 0, out
    assert f"{kind} trained: completed" in out
    assert "--nodes 2 --rendezvous 127.0.0.1:" in out
    status, out = client.run("watch", "trained", "--json")
    document = json.loads(out)
    assert (document["kind"], document["state"], len(document["pods"])) == (kind, "completed", 2)
    status, out = client.run("watch", "trained", "--once")
    assert f"{kind} trained: completed" in out
    assert client.run("run", "--resume", "trained") == (
        2,
        "trained: the run completed, nothing is left to resume; start a new one",
    )


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
@pytest.mark.parametrize("options", [(), ("--kube-queue", "team")])
def test_a_stop_suspends_the_job_whose_pods_save(
    number: signal.Signals, status: int, options: tuple[str, ...], client: Client
) -> None:
    sender = _later(client, number)
    ended, out = client.submit(*options)
    sender.join()
    assert (ended, client.cluster.pods()) == (status, []), out
    assert not client.cluster.left()
    assert "saved" in out.splitlines()
    assert "resume it from anywhere: dsplan run --launcher kubernetes --kube-namespace default --resume trained" in out
    ended, out = client.run("run", "--resume", "trained")
    assert ended == 0, out
    assert "resumed" in out.splitlines()


def test_a_job_that_failed_is_resumed_as_a_new_one(client: Client) -> None:
    client.image_has('if [ "$2" = --resume ]; then exit 0; fi\ntouch "$3/launch.json"\nexit 1\n')
    client.cluster.backoff_limit = 0
    status, out = client.submit()
    assert status == 1, out
    assert "the job trained failed: jobset failed due to one or more job failures; pod " in out
    assert "ended with status 1" in out
    assert client.run("run", "--resume", "trained")[0] == 0


def test_what_no_repetition_mends_ends_the_job(client: Client) -> None:
    client.image_has("echo error: no model; exit 2\n")
    status, out = client.submit()
    assert status == 2, out
    assert "ended with status 2: dsplan run refuses it, as its last line above says; the job trained is deleted" in out
    assert "error: no model" in out
    (client.cluster.directory / "bin" / "dsplan").unlink()
    client.cluster.until_gone("trained")
    status, out = client.submit()
    assert status == 2, out
    assert "the image has no dsplan command" in out


def test_refusals_are_one_line_each(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = client.cluster

    def refused(*words: str) -> str:
        status, out = client.submit(*words)
        assert (status, "\n" in out) == (2, False), out
        return out

    assert "no such namespace in this cluster; name one with --kube-namespace" in refused("--kube-namespace", "nowhere")
    assert "has no PersistentVolumeClaim none; create it" in refused("--kube-volume", "none")
    cluster.served.pop("jobsets")
    assert "the cluster has no jobsets; install" in refused("--kube-kind", "JobSet")
    cluster.forbidden = {"create trainjobs"}
    assert "may not create trainjobs in namespace default (403)" in refused()
    cluster.forbidden = set()
    assert client.run("watch", "other")[1].startswith("namespace default has no job other; what it saved")
    assert "no cluster to submit to" in refused("--kube-context", "none")
    monkeypatch.setattr("strategies.launch.kubernetes.cluster.find_spec", lambda name: None)
    assert refused().endswith("pip install 'dsplan[kubernetes]', or leave out --launcher")


def test_an_image_that_cannot_be_had_is_named(client: Client) -> None:
    status, out = client.submit("--kube-image", "nowhere:1")
    assert status == 2, out
    assert "nowhere:1 may be another image tomorrow" in out
    assert "dsplan: Pod trained-node-0-0-00001: Failed: Error: ErrImagePull" in out
    assert (
        'no image (Back-off pulling image "nowhere:1"); name another with --kube-image; the job trained is deleted'
        in out
    )


def test_a_run_is_followed_without_its_events_where_they_are_forbidden(client: Client) -> None:
    client.cluster.forbidden = {"watch events"}
    client.enough()
    status, out = client.submit()
    assert status == 0, out
    assert "events are not shown: may not watch events" in out


def test_a_cluster_that_is_gone_for_a_while_is_asked_again(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.launch.kubernetes.submitted._SILENCE_SECONDS", 2.0)
    threading.Timer(1.5, lambda: setattr(client.cluster, "is_silent", True)).start()
    status, out = client.submit()
    assert status == 2
    assert "the job trained is not followed any more, and may go on" in out


def test_answers_are_measured_by_the_apis_document() -> None:
    metadata = {"name": "a", "namespace": "default"}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [{"name": "node"}]}}
    job = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": metadata, "spec": {"anything": 1}}
    assert problems_of(pod) == problems_of(job) == []
    unnamed = {**pod, "spec": {"containers": [{"image": "a", "unheard": 1}]}}
    lines = problems_of({"apiVersion": "v1", "kind": "PodList", "metadata": {}, "items": [pod, unnamed]})
    assert {line.partition(":")[0] for line in lines} == {"PodList.items[1].spec.containers[0]"}
    assert len(lines) == 2
    assert problems_of({**job, "metadata": {"labels": {"a": 1}}}) == [
        "PyTorchJob.metadata.labels.a: 1 is not of type 'string', 'null'"
    ]
    assert problems_of({"items": []}) == ['no apiVersion and kind: {"items": []}']
    assert problems_of_change({"type": "ADDED", "object": unnamed}) == problems_of(unnamed) != []
