"""`dsplan run --launcher skypilot` at SkyPilot: its words, and its jobs, with nodes that only seem to train."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from dsplan.cli.app import run
from hardware_db.errors import DsplanError
from tests.strategies.launchers.stand_in_skypilot import StandInSkyPilot

pytest.importorskip("sky", reason="needs SkyPilot (scripts/ci/launchers.sh installs it beside the environment)")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

TRAINS = """\
# dsplan run
echo "$@"
trap 'echo saved; touch "$BUCKET/saved"; exit 75' TERM
echo step 1
while [ ! -e "$BUCKET/enough" ]; do sleep 0.05; done
"""


class Client:
    """The command in this process, with nodes whose `dsplan` is a shell script."""

    def __init__(self, cloud: StandInSkyPilot, directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.cloud, self.bucket, self._capsys = cloud, cloud.directory / "bucket", capsys
        self.bucket.mkdir()
        self.task = directory / "mine.yaml"
        mount = {str(self.bucket): {"source": "s3://team-runs", "mode": "MOUNT"}}
        self.task.write_text(yaml.safe_dump({"setup": "pip install train", "workdir": ".", "file_mounts": mount}))

    def nodes_have(self, script: str) -> None:
        (self.cloud.directory / "bin" / "dsplan").write_text(f"#!/bin/bash\nBUCKET={self.bucket}\n{script}")

    def submit(self, *words: str) -> tuple[int, str]:
        where = ("--checkpoint-dir", str(self.bucket), "--sky-task", str(self.task))
        options = ("--sky-name", "trained", "--launcher-option", "cpus=2+", "--nproc", "2")
        return self.run("run", *where, *options, *words, "train.py")

    def run(self, command: str, *words: str) -> tuple[int, str]:
        """Exit status and output."""
        try:
            status = run((command, "--launcher", "skypilot", *words))
        except DsplanError as error:
            return error.exit_code, str(error)
        captured = self._capsys.readouterr()
        return status, captured.out + captured.err


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Client]:
    work = tmp_path / "work"
    work.mkdir()
    (work / "train.py").touch()
    monkeypatch.chdir(work)
    with StandInSkyPilot(tmp_path / "cloud", {}) as cloud:
        for name, value in cloud.client_variables.items():
            monkeypatch.setenv(name, value)
        _forget_the_server()
        client = Client(cloud, tmp_path, capsys)
        client.nodes_have(TRAINS)
        yield client


def _forget_the_server() -> None:
    """Have SkyPilot's client look again who its server is, which it does once per process."""
    from sky.server import common

    common.get_api_server_status_response.cache_clear()
    common.get_server_url.cache_clear()
    common.is_api_server_local.cache_clear()


def _later(client: Client, act: signal.Signals) -> threading.Thread:
    """Send this process a signal when the nodes train and their log is followed."""

    def send() -> None:
        deadline = time.monotonic() + 60
        while not client.cloud.jobs or not any("step 1" in line for line in client.cloud.jobs[-1].log):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1.5)
        os.kill(os.getpid(), act)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def test_a_run_is_detached_watched_and_described(client: Client) -> None:
    status, output = client.submit("--nodes", "2", "--detach")
    assert status == 0, output
    assert "watch it from anywhere: dsplan watch trained --launcher skypilot" in output
    assert "managed job 1, trained: 2 nodes" in output
    refused = client.submit("--nodes", "2")
    assert refused[0] == 2
    assert refused[1].startswith("managed job 1 of the name trained is at work (RUNNING); watch it with dsplan watch")
    (client.bucket / "enough").touch()
    status, output = client.run("watch", "trained")
    assert status == 0, output
    assert "managed job 1, trained: SUCCEEDED on 2x(directory) of Stand-in (here)" in output
    assert "--nodes 2 --rendezvous 127.0.0.1:29400" in output
    status, output = client.run("watch", "trained", "--json")
    document = json.loads(output)
    assert (document["status"], document["number"], document["exit_code"]) == ("SUCCEEDED", 1, None)
    assert client.run("watch", "trained", "--once")[1].startswith("managed job 1, trained: SUCCEEDED")
    assert client.run("run", "--resume", "trained") == (
        2,
        "trained: the run completed, nothing is left to resume; start a new one",
    )


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_stop_cancels_the_job_whose_nodes_save(number: signal.Signals, status: int, client: Client) -> None:
    sender = _later(client, number)
    ended, output = client.submit()
    sender.join()
    assert ended == status, output
    assert (client.bucket / "saved").exists()
    assert not client.cloud.left()
    assert "resume it from anywhere: dsplan run --launcher skypilot --resume trained" in output
    (client.bucket / "enough").touch()
    ended, output = client.run("run", "--resume", "trained")
    assert ended == 0, output
    assert "managed job 2 resumes trained" in output


def test_what_no_repetition_mends_is_named(client: Client) -> None:
    client.nodes_have("echo error: no model; exit 2\n")
    status, output = client.submit()
    assert status == 2, output
    assert "managed job 1 of trained ended as FAILED: dsplan run refuses it, as its last line above says" in output
    assert "error: no model" in output
    (client.cloud.directory / "bin" / "dsplan").unlink()
    status, output = client.submit()
    assert (status, "the nodes' setup has no dsplan command; install dsplan in it" in output) == (2, True), output


def test_a_failure_is_resumed_as_a_new_job(client: Client) -> None:
    client.nodes_have('if [ -e "$BUCKET/once" ]; then exit 0; fi\ntouch "$BUCKET/once"\nexit 1\n')
    status, output = client.submit()
    assert status == 1, output
    assert "managed job 1 of trained ended as FAILED: Job exited with exit code 1" in output
    assert client.run("run", "--resume", "trained")[0] == 0


def test_refusals_are_one_line_each(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*words: str) -> str:
        status, output = client.submit(*words)
        assert (status, "\n" in output) == (2, False), output
        return output

    assert "SkyPilot does not take the task: " in refused("--launcher-option", "acelerators=H100:8")
    assert "SkyPilot lists no managed job other of yours; what it saved" in client.run("watch", "other")[1]
    client.cloud.refuses = "the company's policy allows no spot nodes"
    assert refused() == "SkyPilot does not launch trained: the company's policy allows no spot nodes"
    client.cloud.refuses = ""
    assert client.submit("--detach")[0] == 0
    client.cloud.jobs[-1].text = "secrets: {TOKEN: <redacted>}\nrun: x"
    client.cloud.jobs[-1].is_cancelled = True
    client.cloud.jobs[-1].thread.join()
    assert "its task has secrets, which SkyPilot does not keep" in client.run("run", "--resume", "trained")[1]
    client.cloud.jobs[-1].text = "workdir: /nowhere\nrun: x"
    assert "its directory /nowhere is not on this machine" in client.run("run", "--resume", "trained")[1]


def test_a_server_that_is_gone_for_a_while_is_asked_again(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    assert client.submit("--detach")[0] == 0
    monkeypatch.setattr("strategies.launch.submitted_runs._SILENCE_SECONDS", 2.0)
    monkeypatch.setenv(
        "SKYPILOT_API_SERVER_ENDPOINT", f"http://127.0.0.1:{os.environ['SKYPILOT_API_SERVER_LOCAL_PORT']}"
    )
    monkeypatch.setenv("SKYPILOT_API_SERVER_LOCAL_PORT", "1")  # a team's server, which the client does not start again
    _forget_the_server()
    threading.Timer(3.0, lambda: setattr(client.cloud, "is_silent", True)).start()
    status, output = client.run("watch", "trained")
    assert status == 2, output
    assert "the job trained is not followed any more, and may go on" in output
