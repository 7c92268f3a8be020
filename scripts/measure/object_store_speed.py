"""Measures how fast a checkpoint comes to an S3 server, beside fsspec's plain copy of the same files.

    python -m scripts.measure.object_store_speed [--megabytes 640] [--rounds 5] [--pace MB/s]

The server is moto's, on this machine; `scripts/ci/object_store.sh` installs it. In turns, a folder that holds a
checkpoint is copied with `fs.put(folder, address, recursive=True)`, and the same tensors are saved to the store:
written to the staging folder, summed up, sent, listed and made complete, in the foreground. With `--pace` the way to
the server carries no more than that in each connection. Prints for each round bytes per second and processor seconds
of this process, and the median of the ratios.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import fsspec
import torch

from strategies.checkpoint.content import Content, text_of
from strategies.checkpoint.object_store import location, remove_all
from strategies.checkpoint.saving import Saved, SaveOptions, Saver
from strategies.distributed.environment import Environment
from tests.strategies.object_store_bodies import Network, serve_s3, variables

TENSOR_BYTES = 2**24


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Return seconds and processor seconds of some work."""
    began, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - used


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=640)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pace", type=float, help="MB/s of one connection")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, serve_s3(Path(folder)) as port:
        network = Network(port)
        network.bytes_per_second = options.pace and 1e6 * options.pace
        os.environ |= variables(network.port if options.pace else port, Path(folder, "staging"))
        ratios = measure(Path(folder), options.megabytes * 1_000_000 // TENSOR_BYTES, options.rounds)
        network.close()
    print(
        f"median of {options.rounds} ratios: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    )


def measure(folder: Path, tensors: int, rounds: int) -> list[float]:
    """Return for each round the seconds of a plain copy over those of a save."""
    store = fsspec.filesystem("s3", use_listings_cache=False)
    store.mkdir("s3://speed")
    values = {f"model/{number}": torch.randn(TENSOR_BYTES // 4) for number in range(tensors)}
    environment = Environment(rank=0, local_rank=0, world_size=1, local_world_size=1, device=torch.device("cpu"))
    saver, text = Saver(environment), text_of(Content(progress={}, client_state={}))
    what = Saved(step=1, tensors=lambda: values, state=lambda: text)
    local = saver.write(folder / "local", what, SaveOptions())
    size = sum(path.stat().st_size for path in local.iterdir())
    plain, ours, ratios = "s3://speed/plain", location("s3://speed/ours"), []
    for number in range(rounds):
        copy = timed(lambda: store.put(f"{local}/", f"{plain}/", recursive=True))
        save = timed(lambda: saver.write(ours, what, SaveOptions()))
        for address in (location(plain), ours):
            remove_all(address)
        ratios.append(copy[0] / save[0])
        words = (
            f"{name} {size / 1e6 / took:.1f} MB/s, {used:.2f} s of a processor"
            for name, (took, used) in (("copy", copy), ("save", save))
        )
        print(f"{number}: {'; '.join(words)}; ratio {ratios[-1]:.2f}", flush=True)
    shutil.rmtree(local)
    return ratios


if __name__ == "__main__":
    main()
