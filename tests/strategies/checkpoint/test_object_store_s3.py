"""Checkpoints on a real S3 server (moto's), over a network that is cut and slow, from ranks that are killed.

`scripts/ci/object_store.sh` installs the server and runs these.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from dsplan.diagnostics.bench.rank_pool import RankError, RankPool
from tests.strategies import object_store_bodies
from tests.strategies.object_store_bodies import Network
from tests.strategies.training_bodies import Recipe

pytest.importorskip("moto", reason="needs moto[server] and s3fs, as scripts/ci/object_store.sh installs them")
pytest.importorskip("s3fs", reason="needs moto[server] and s3fs, as scripts/ci/object_store.sh installs them")
pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("OBJECT_STORE_KILLS", "20"))
"""Per way of saving."""
TWO_RANKS = Recipe(strategy="zero2", backend="native", world_size=2)
NewPool = Callable[..., RankPool]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with object_store_bodies.serve_s3(tmp_path_factory.mktemp("server")) as port:
        yield port


@pytest.fixture
def reader(server: int, new_pool: NewPool, tmp_path: Path) -> Iterator[RankPool]:
    """A rank with a staging folder of its own."""
    with new_pool(1, variables=object_store_bodies.variables(server, tmp_path / "elsewhere")) as pool:
        yield pool


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("asynchronous", [False, True])
def test_killed_at_random_moments_the_last_complete_checkpoint_loads(
    server: int, reader: RankPool, new_pool: NewPool, tmp_path: Path, asynchronous: bool
) -> None:
    chance = random.Random(29 + asynchronous)
    bucket = f"kills-{asynchronous:d}"
    reader.run(object_store_bodies.make_bucket, bucket)
    address, notes = f"s3://{bucket}/team/run", tmp_path / "notes"
    network = Network(server)
    environment = object_store_bodies.variables(network.port, tmp_path / "staging")
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
