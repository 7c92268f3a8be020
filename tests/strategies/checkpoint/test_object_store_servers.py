"""Checkpoints on real servers (moto's of S3, Azurite), over a network that is cut and slow, from ranks that are killed.

`scripts/ci/object_store.sh` installs the servers and runs these.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from dsplan.diagnostics.bench.rank_pool import RankError, RankPool
from strategies.run_directory.journal import read_journal
from tests.strategies import object_store_bodies
from tests.strategies.object_store_bodies import Network, Server
from tests.strategies.training_bodies import Recipe

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("OBJECT_STORE_KILLS", "20"))
"""Per way of saving."""
TWO_RANKS = Recipe(strategy="zero2", backend="native", world_size=2)
NewPool = Callable[..., RankPool]
ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "tests" / "strategies" / "faults" / "ledger_script.py"


@pytest.fixture(scope="module", params=["s3", "az"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    needs = {"s3": ("moto", "s3fs"), "az": ("adlfs",)}[request.param]
    missing = [name for name in needs if importlib.util.find_spec(name) is None]
    if request.param == "az" and shutil.which(object_store_bodies.AZURITE[0]) is None:
        missing.append("azurite")
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}, as scripts/ci/object_store.sh installs them")
    serve = {"s3": object_store_bodies.serve_s3, "az": object_store_bodies.serve_azure}[request.param]
    with serve(tmp_path_factory.mktemp(f"server-{request.param}")) as port:
        yield Server(request.param, port)


@pytest.fixture
def reader(server: Server, new_pool: NewPool, tmp_path: Path) -> Iterator[RankPool]:
    """A rank with a staging folder of its own."""
    with new_pool(1, variables=server.variables(tmp_path / "elsewhere")) as pool:
        yield pool


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_killed_at_random_moments_the_last_complete_checkpoint_loads(
    server: Server, reader: RankPool, new_pool: NewPool, tmp_path: Path, asynchronous: bool
) -> None:
    chance = random.Random(29 + asynchronous)
    bucket = server.address(f"kills-{asynchronous:d}")
    reader.run(object_store_bodies.make_bucket, bucket)
    address, notes = f"{bucket}/team/run", tmp_path / "notes"
    network = Network(server.port)
    environment = server.variables(tmp_path / "staging", network.port)
    environment |= {"DSPLAN_STAGING_GB": "0.0004"}  # so that a rank has several files
    kinds, seen, halves = Counter[str](), [0], 0
    try:
        with new_pool(2, variables=environment, timeout_seconds=900) as ranks:
            for _ in range(KILLS):
                body = object_store_bodies.save_for_ever
                save = (body, TWO_RANKS, address, seen[-1], str(notes))
                begun = len(object_store_bodies.lines_of(notes, "begins"))
                working = threading.Thread(target=_until_killed, args=(ranks, save, asynchronous))
                working.start()
                awaited = begun + chance.randint(1, 3)
                object_store_bodies.wait_until(
                    lambda least=awaited: len(object_store_bodies.lines_of(notes, "begins")) >= least, 300
                )
                kinds[object_store_bodies.after_a_while(network, chance, 1.5)] += 1
                for process in chance.sample(ranks.process_ids, 2):
                    os.kill(process, signal.SIGKILL)
                working.join(60)
                network.mend()
                step, _, published, half = reader.run(object_store_bodies.read_back, Recipe(), address)[0]
                complete = object_store_bodies.lines_of(notes, "complete")
                assert step >= max([seen[-1], *complete]), "no checkpoint that was complete is lost"
                assert step <= max([0, *object_store_bodies.lines_of(notes, "begins")])
                assert published <= 3, "keep_last=2, and one more where it was killed before it removed"
                halves += half > 0
                seen.append(step)
    finally:
        network.close()
    print(f"{KILLS} kills, {dict(kinds)}, {halves} with a half checkpoint left, steps {seen}")
    assert halves >= KILLS // 4, "the kills came while something was being sent"
    assert seen[-1] >= KILLS // 2
    assert not object_store_bodies.credentials_in(tmp_path)


def _until_killed(ranks: RankPool, save: tuple[object, ...], asynchronous: bool) -> None:
    body, *arguments = save
    with suppress(RankError):
        ranks.run(_with_way, body, asynchronous, *arguments)


def _with_way(body: Callable[..., None], asynchronous: bool, *arguments: object) -> None:
    body(*arguments, asynchronous=asynchronous)


@pytest.mark.timeout(1800)
def test_a_run_resumes_on_another_machine_at_the_exact_step_with_equal_losses(
    server: Server, reader: RankPool, tmp_path: Path
) -> None:
    address = server.address("resumes/team/run")
    reader.run(object_store_bodies.make_bucket, server.address("resumes"))
    flags = ("--nproc", "2", "--checkpoint-minutes", "0", "--checkpoint-steps", "2")
    undisturbed = _Command(tmp_path / "undisturbed", server)
    assert undisturbed("--run-dir", undisturbed.run, *flags, SCRIPT) == 0, undisturbed.out()
    first = _Command(tmp_path / "first", server, faults=[{"kind": "raise", "rank": 1, "step": 8}])
    store = ("--checkpoint-dir", address, "--retries", "0")
    assert first("--run-dir", first.run, *flags, *store, SCRIPT) == 1, first.out()
    second = _Command(tmp_path / "second", server)
    shutil.copytree(first.run, second.run)
    shutil.rmtree(first.folder)
    assert second("--resume", second.run) == 0, second.out()
    assert list(second.losses()) == list(range(7, 13)), "the checkpoint of step 6 was the last complete one"
    assert second.losses() == {step: loss for step, loss in undisturbed.losses().items() if step > 6}
    step, path, published, halves = reader.run(object_store_bodies.newest_of, address)[0]
    assert (step, path[-13:], published, halves) == (12, "step-00000012", 2, 0), "the run keeps its newest two"
    journal = (second.run / "run.jsonl").read_text()
    assert journal.count('"event": "saved"') >= 4, "the launcher has seen what is complete in the store"
    assert not object_store_bodies.credentials_in(tmp_path)


@pytest.mark.timeout(1800)
def test_a_run_that_was_killed_whole_is_resumed_by_the_address_alone(
    server: Server, reader: RankPool, tmp_path: Path
) -> None:
    address = server.address("whole/team/run")
    reader.run(object_store_bodies.make_bucket, server.address("whole"))
    flags = ("--nproc", "2", "--checkpoint-minutes", "0", "--checkpoint-steps", "2")
    undisturbed = _Command(tmp_path / "undisturbed", server)
    assert undisturbed("--run-dir", undisturbed.run, *flags, SCRIPT) == 0, undisturbed.out()
    first = _Command(tmp_path / "first", server, pause=0.5)
    process = first.start("--run-dir", first.run, *flags, "--checkpoint-dir", address, SCRIPT)
    first.until_step(8, process)
    object_store_bodies.kill_whole(process.pid)
    last = max(first.losses())
    shutil.rmtree(first.folder)
    second = _Command(tmp_path / "second", server)
    assert second("--resume", address) == 0, second.out()
    (run,) = (second.home / "runs").iterdir()
    begun = min(second.losses())
    assert 1 < begun <= last + 1
    assert second.losses() == {step: loss for step, loss in undisturbed.losses().items() if step >= begun}
    journal = read_journal(run)
    assert [row["attempt"] for row in journal if row["event"] == "attempt"] == [0, 1]
    plans = [row["plan"]["plan"] for row in journal if row["event"] == "plan"]
    assert plans[0] == plans[-1]
    print(f"killed behind step {last}, resumed at step {begun}; {len(plans)} plans in the journal")
    assert second("--resume", address) == 2
    assert "the run completed, nothing is left to resume" in second.out().splitlines()[-1]
    assert not object_store_bodies.credentials_in(tmp_path)
    text = reader.run(object_store_bodies.texts_in, f"{address}/runs")[0]
    assert "run.jsonl" in text
    assert not any(secret in text for secret in object_store_bodies.SECRETS)


@pytest.mark.timeout(1800)
def test_of_two_machines_at_one_address_one_trains(server: Server, reader: RankPool, tmp_path: Path) -> None:
    address = server.address("two-machines/team/run")
    reader.run(object_store_bodies.make_bucket, server.address("two-machines"))
    flags = ("--nproc", "2", "--checkpoint-minutes", "0", "--checkpoint-steps", "2")
    first = _Command(tmp_path / "first", server, pause=1.0, machine="first")
    process = first.start("--run-dir", first.run, *flags, "--checkpoint-dir", address, SCRIPT)
    first.until_step(4, process)
    second = _Command(tmp_path / "second", server, machine="second")
    assert second("--resume", address) == 2, second.out()
    assert "is at work on this run; stop it there first" in second.out().splitlines()[-1]
    stopped = object_store_bodies.stop_whole(process.pid)
    assert second("--resume", address) == 0, second.out()
    assert "was at work on this run" in second.out()
    assert max(second.losses()) == 12
    for each in stopped:
        os.kill(each, signal.SIGCONT)
    assert process.wait(120) == 2, first.out()
    assert "has resumed this run" in first.out()
    assert max(first.losses()) < 12


@pytest.mark.timeout(600)
def test_what_is_wrong_with_a_store_is_one_line_before_the_run_begins(
    server: Server, reader: RankPool, tmp_path: Path
) -> None:
    reader.run(object_store_bodies.make_bucket, server.address("errors"))
    lines, there = {}, server.address("errors/run")
    elsewhere = server.variables(tmp_path / "staging", object_store_bodies.free_port())
    wrong = replace(server, key=b64encode(b"another").decode()).variables(tmp_path / "staging")
    is_s3 = server.scheme == "s3"
    none = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AZURE_STORAGE_CONNECTION_STRING": ""}
    for name, variables, address in (
        ("bucket", {}, server.address("nowhere/run")),
        ("credentials", none, there),
        ("unreachable", elsewhere, there),
        ("secret", {}, server.address(f"{object_store_bodies.KEY}:{object_store_bodies.SECRET}@errors/run")),
        ("package", {}, "gs://errors/run"),
        *([] if is_s3 else [("denied", wrong, there)]),  # moto believes every key
    ):
        command = _Command(tmp_path / name, server, variables=variables)
        assert command("--run-dir", command.run, "--nproc", "1", "--checkpoint-dir", address, SCRIPT) == 2
        (lines[name],) = command.out().splitlines()
        assert object_store_bodies.SECRET not in lines[name]
        assert not command.run.exists()
    assert "there is no bucket nowhere; make it, or name another" in lines["bucket"]
    by = "AWS_PROFILE" if is_s3 else "AZURE_STORAGE_CONNECTION_STRING"
    assert f"no credentials for the object store; give them by {by}" in lines["credentials"]
    silent = "EndpointConnectionError" if is_s3 else "ServiceRequestError"
    assert f"the object store does not answer ({silent})" in lines["unreachable"]
    assert is_s3 or "the object store denies access (AuthorizationFailure)" in lines["denied"]
    assert "an address has no passwords" in lines["secret"]
    assert "needs gcsfs, which is not installed; pip install 'dsplan[gs]'" in lines["package"]


@pytest.mark.timeout(600)
def test_ranks_read_their_own_parts(server: Server, reader: RankPool, new_pool: NewPool, tmp_path: Path) -> None:
    address = server.address("parts/run")
    reader.run(object_store_bodies.make_bucket, server.address("parts"))
    with new_pool(2, variables=server.variables(tmp_path / "staging")) as ranks:
        ranks.run(object_store_bodies.save_large, address)
        answers = ranks.run(object_store_bodies.bytes_read, address)
    for read, own, whole in answers:
        checks = whole / 2  # every file is read once against its checksum, the ranks sharing the work
        print(f"read {read:,} of {whole:,} bytes; own {own:,}")
        assert own < 0.6 * whole
        assert read < 1.15 * (own + checks)


_ON_A_MACHINE = """
import sys
from strategies.launch import run_hold
run_hold._machine, run_hold.RENEWAL_SECONDS, run_hold.LOST_SECONDS = (lambda name=sys.argv[1]: name), 0.5, 4.0
from dsplan.__main__ import main
sys.argv[1:] = sys.argv[2:]
sys.exit(main())
"""
"""`dsplan` on a machine of a name, whose silence is noticed sooner."""


class _Command:
    """`dsplan run` of the script that writes its losses down, in a folder of its own, with a server."""

    def __init__(
        self,
        folder: Path,
        server: Server,
        *,
        faults: Sequence[Mapping[str, object]] = (),
        variables: Mapping[str, str] | None = None,
        pause: float = 0,
        machine: str = "",
    ) -> None:
        self.folder, self.run, self.ledger, self.home = folder, folder / "run", folder / "ledger", folder / "home"
        self.ledger.mkdir(parents=True)
        settings = {"width": 64, "dropout": 0.1, "steps": 12, "samples": 96, "batch": 8, "strategy": "ddp"}
        self._program = ["-c", _ON_A_MACHINE, machine] if machine else ["-m", "dsplan"]
        self._environment = {
            **os.environ,
            **server.variables(folder / "staging"),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
            "OMP_NUM_THREADS": "1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "LEDGER": str(self.ledger),
            "CHECKPOINTS": str(self.run / "checkpoints"),
            "SETTINGS": json.dumps({**settings, "pause": pause}),
            "HOME": str(self.home),
            "DSPLAN_HOME": str(self.home),
            "FAULTS": json.dumps(list(faults)),
            **(variables or {}),
        }

    def __call__(self, *arguments: str | Path) -> int:
        """Run `dsplan run` and return its exit status."""
        return self.start(*arguments).wait()

    def start(self, *arguments: str | Path) -> subprocess.Popen[bytes]:
        """Start `dsplan run`."""
        with (self.folder / "out.txt").open("ab") as out:
            command = [sys.executable, *self._program, "run", *map(str, arguments)]
            return subprocess.Popen(command, cwd=self.folder, env=self._environment, stdout=out, stderr=out)

    def until_step(self, step: int, process: subprocess.Popen[bytes]) -> None:
        """Wait until rank 0 has written a step's loss down."""

        def has_come() -> bool:
            assert process.poll() is None, self.out()
            return max(self.losses(), default=0) >= step

        object_store_bodies.wait_until(has_come, 600)

    def out(self) -> str:
        """Return all that it has printed."""
        return (self.folder / "out.txt").read_text()

    def losses(self) -> dict[int, float]:
        """Return rank 0's losses by step."""
        path = self.ledger / "rank0.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        rows = [json.loads(line) for line in lines if line.endswith("\n")]
        return {row["step"]: row["loss"] for row in rows if "loss" in row}
