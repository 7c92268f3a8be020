"""A training on a real Ray cluster: ranks, Ray's own processes and nodes are lost, and its losses stay the same."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hardware_db.errors import DsplanError
from planner.errors import ContradictoryRequest
from strategies.launch.launchers import ray as launcher
from strategies.launch.options import DEFAULT_SUPERVISION, RequestedPlacement
from strategies.launch.prepare import check_placement
from strategies.run_directory.files import pid_path
from strategies.run_directory.spec import LaunchSpec, Placement
from tests.strategies.launchers.launched import Launched, launched
from tests.strategies.launchers.ray_cluster import RayCluster, missing, ray_cluster

STEPS = {"STEPS": "24", "PAUSE": "0.5", "DSPLAN_RENDEZVOUS_SECONDS": "200"}
on_a_cluster = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(missing()), reason=missing() or "-"),
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses on two ranks that torch elastic starts."""
    with launched(tmp_path_factory.mktemp("local"), {**STEPS, "PAUSE": "0"}) as run:
        assert run.wait(run.start("--nproc", "2")) == 0, run.out
        return run.losses()


@contextlib.contextmanager
def on(cluster: RayCluster, directory: Path, variables: dict[str, str] | None = None) -> Iterator[Launched]:
    with launched(directory, {**STEPS, **cluster.variables, **(variables or {})}) as run:
        yield run


def endings(run: Launched) -> list[dict[str, object]]:
    rows = [json.loads(line) for line in (run.run_directory / "run.jsonl").read_text().splitlines()]
    return [row for row in rows if row["event"] == "ending"]


def rank_process(run: Launched, rank: int) -> int:
    return int(pid_path(run.run_directory, rank).read_text())


def parent_of(process_id: int) -> int:
    return int(Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[1])


def node_of(process_id: int) -> str:
    """Ray's number of the node that a rank runs on: its actor's process is the raylet's child."""
    raylet = Path(f"/proc/{parent_of(parent_of(process_id))}/cmdline").read_text().split("\0")
    return next(word for word in raylet if word.startswith("--node_id=")).partition("=")[2]


def processes_of(run: Launched) -> list[str]:
    """Command lines of what works for the run."""
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            command = path.read_bytes().decode(errors="replace").replace("\0", " ")
            if str(run.run_directory) in command and int(path.parent.name) != os.getpid():
                commands.append(command)
    return commands


def assert_nothing_is_left(run: Launched) -> None:
    deadline = time.monotonic() + 30
    while left := processes_of(run):
        assert time.monotonic() < deadline, left
        time.sleep(0.2)


class TestOnACluster:
    pytestmark = on_a_cluster

    def test_a_rank_a_process_of_ray_and_a_node_are_lost(self, reference: list[float], tmp_path: Path) -> None:
        with ray_cluster(2) as cluster, on(cluster, tmp_path) as run:
            process = run.start(*cluster.options, "--nodes", "2", "--checkpoint-steps", "1")
            run.until_step(3)
            os.kill(rank_process(run, 1), signal.SIGKILL)
            run.until_step(8)
            os.kill(parent_of(rank_process(run, 0)), signal.SIGKILL)
            run.until_step(13)
            cluster.remove()
            cluster.add()
            run.hurry()
            assert run.wait(process) == 0, run.out
            assert [row["kind"] for row in endings(run)] == ["killed", "killed", "lost"]
            assert [row["rank"] for row in endings(run)] == [1, None, None]
            # What was saved last is at most the step before: no other is trained twice.
            assert len(run.rows()) <= len(reference) + 2 * 3
            assert run.losses() == reference
            assert_nothing_is_left(run)

    def test_asked_to_stop_it_saves_and_is_resumed(self, reference: list[float], tmp_path: Path) -> None:
        with ray_cluster(2) as cluster, on(cluster, tmp_path) as run:
            process = run.start(*cluster.options, "--nodes", "2")
            run.until_step(2)
            process.send_signal(signal.SIGTERM)
            assert run.wait(process) == 75, run.out
            assert [row["kind"] for row in endings(run)] == ["preempted"]
            assert_nothing_is_left(run)
            stopped_after = len(run.rows())
            process = run.resume()
            run.until_step(stopped_after + 2)
            process.kill()  # the nodes are free again for another
            process.wait()
            assert_nothing_is_left(run)
            run.hurry()
            assert run.wait(run.resume()) == 0, run.out
            assert [row["step"] for row in endings(run)] == [stopped_after]
            assert run.losses() == reference

    def test_a_node_that_is_about_to_go_is_left(self, reference: list[float], tmp_path: Path) -> None:
        with ray_cluster(3) as cluster, on(cluster, tmp_path, {"PAUSE": "8"}) as run:
            process = run.start(*cluster.options, "--nodes", "2")
            run.until_step(1)
            leaving = node_of(rank_process(run, 1))
            cluster.drain(leaving)
            deadline = time.monotonic() + 200
            while not endings(run):
                assert time.monotonic() < deadline, run.out
                time.sleep(0.2)
            stopped_after = len(run.rows())
            run.until_step(stopped_after + 1)
            assert leaving not in {node_of(rank_process(run, rank)) for rank in (0, 1)}
            run.hurry()
            assert run.wait(process) == 0, run.out
            assert [(row["kind"], row["step"]) for row in endings(run)] == [("regrouped", stopped_after)]
            assert run.losses() == reference

    def test_nodes_come_and_go(self, tmp_path: Path) -> None:
        variables = {"STEPS": "200", "BATCH": "24", "STRATEGY": ""}  # 24 is divisible by 1, 2 and 3 ranks
        with launched(tmp_path / "alone", {**STEPS, **variables, "PAUSE": "0"}) as alone:
            assert alone.wait(alone.start("--nproc", "2")) == 0, alone.out
        with ray_cluster(3) as cluster, on(cluster, tmp_path / "nodes", variables) as run:
            process = run.start(*cluster.options, "--nodes", "1:3", "--checkpoint-steps", "3")
            run.until_step_on(4, ranks=3)
            cluster.remove()
            run.until_step_on(4, ranks=2)
            cluster.add()
            run.until_step_on(4, ranks=3)
            run.hurry()
            assert run.wait(process) == 0, run.out
            assert [row["kind"] for row in endings(run)] == ["lost", "regrouped"]
            assert "dsplan: 1 node came; the ranks save and start again" in run.out
            assert run.losses() == pytest.approx(alone.losses(), rel=1e-4)

    def test_a_cluster_that_is_too_small(self, tmp_path: Path) -> None:
        with ray_cluster(1) as cluster, on(cluster, tmp_path, {"DSPLAN_RENDEZVOUS_SECONDS": "5"}) as run:
            assert run.wait(run.start(*cluster.options, "--nodes", "2")) == 2, run.out
            has = f"the Ray cluster at {cluster.address} has 1 of the 2 nodes with 1 CPU each that the run needs"
            assert f"dsplan: {has}; waiting up to 5 s for more" in run.out
            assert f"{has} (waited 5 s); add nodes or wait for them" in run.out

    def test_a_ray_of_this_machine(self, reference: list[float], tmp_path: Path) -> None:
        with ray_cluster(0) as cluster, on(cluster, tmp_path, {"PAUSE": "0"}) as run:
            assert run.wait(run.start("--launcher", "ray", "--nproc", "2")) == 0, run.out
            assert run.losses() == reference
            assert_nothing_is_left(run)


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("ray://head:10001", "Ray's client starts no ranks"),
        ("head", "is no address; write auto, or HOST:PORT"),
        ("127.0.0.1:1", "no Ray answers there (Connection refused)"),
        ("no-such-host.invalid:6379", "no Ray answers there ("),
    ],
)
def test_an_address_at_which_no_ray_is(address: str, says: str) -> None:
    with pytest.raises(DsplanError, match="--ray-address") as refusal:
        launcher.check_address(address)
    assert says in str(refusal.value)


def test_a_web_server_is_no_ray() -> None:
    with http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            with pytest.raises(DsplanError, match="a web server answers there"):
                launcher.check_address(f"127.0.0.1:{server.server_address[1]}")
        finally:
            server.shutdown()


def test_an_option_is_a_resource_of_every_node() -> None:
    placement = Placement(launcher="ray", options=("CPU=32", "accelerator_type:H100=0.001"))
    assert launcher.node_resources(placement, 8) == {"CPU": 32.0, "accelerator_type:H100": 0.001}
    with pytest.raises(DsplanError, match="'--partition=gpu' is no resource of Ray"):
        launcher.node_resources(Placement(launcher="ray", options=("--partition=gpu",)), 8)


def test_without_ray_one_line_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "find_spec", lambda name: None)
    placement = Placement(launcher="ray")
    spec = LaunchSpec(
        script="train.py",
        processes=2,
        run_directory=str(tmp_path),
        placement=placement,
        supervision=DEFAULT_SUPERVISION,
    )
    with pytest.raises(DsplanError, match=r"pip install 'dsplan\[ray\]'"):
        launcher.RayLauncher(spec).command()


def test_several_nodes_need_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    requested = RequestedPlacement(launcher="ray", nodes="2")
    with pytest.raises(ContradictoryRequest, match="name the address of a cluster"):
        check_placement(requested.over(Placement()), DEFAULT_SUPERVISION)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    check_placement(requested.over(Placement()), DEFAULT_SUPERVISION)
    with pytest.raises(ContradictoryRequest, match="--ray-address is for --launcher ray"):
        check_placement(Placement(launcher="slurm", ray_address="auto"), DEFAULT_SUPERVISION)
