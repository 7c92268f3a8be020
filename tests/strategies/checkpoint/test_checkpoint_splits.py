"""Checkpoints, norms and whole weights of a model that ranks split: what any composition writes, any other reads."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dsplan.diagnostics.bench.rank_pool import RankPool
from strategies.checkpoint.parts import PartOfTensor
from strategies.checkpoint.states import Inventory, together
from strategies.parallel.split import Split, even_split
from tests.strategies import split_bodies
from tests.strategies.checkpoint_bodies import tensors_of
from tests.strategies.split_bodies import Composition

SINGLE = Composition(strategy="single")
WRITERS = (
    Composition(strategy="fsdp", dp=2, tp=2),
    Composition(strategy="zero2", dp=2, tp=2),
    Composition(strategy="ddp", tp=2, pp=2),
    Composition(strategy="zero1", dp=2, pp=2),
    Composition(strategy="zero2", dp=4, ep=2),
)
READERS = (Composition(strategy="fsdp", dp=3), Composition(strategy="zero3", dp=2, tp=2), WRITERS[2], WRITERS[4])
ALL = slice(None)
Norms = list[float]


@pytest.fixture(scope="module")
def four_ranks(new_pool: Any) -> Iterator[RankPool]:
    """Four ranks over gloo."""
    with new_pool(4) as pool:
        yield pool


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Norms]:
    """Return what one process writes after two steps, and the norms of these and of the next two."""
    folder = tmp_path_factory.mktemp("single")
    return folder, split_bodies.save_after(SINGLE, str(folder))


@pytest.fixture(scope="module")
def written(four_ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> dict[Composition, tuple[Path, Any]]:
    """The same of each composition."""
    folders = {writer: tmp_path_factory.mktemp("written") for writer in WRITERS}
    return {
        writer: (folder, four_ranks.run(split_bodies.save_after, writer, str(folder)))
        for writer, folder in folders.items()
    }


def state_of(folder: Path) -> dict[str, Any]:
    state: dict[str, Any] = json.loads((folder / (folder / "latest").read_text().strip() / "state.json").read_text())
    return state


def require_same(folder: Path, other: Path) -> None:
    tensors, expected = tensors_of(folder), tensors_of(other)
    assert tensors.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(tensors[name].double(), value.double(), rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.sweep(every=3)
def test_what_ranks_split_is_written_as_one_process_writes_it(
    writer: Composition, single: tuple[Path, Norms], written: dict[Composition, tuple[Path, Any]]
) -> None:
    """Clipped by the norm over all parts, each element counted once, two steps leave the same weights and states."""
    folder, norms = written[writer]
    assert norms == [pytest.approx(single[1], rel=1e-5)] * 4
    require_same(folder, single[0])
    here, there = state_of(folder), state_of(single[0])
    for key in ("optimizer", "aliases", "extra", "client_state"):
        assert here[key] == there[key], key


@pytest.mark.parametrize(
    ("reader", "which"),
    [*((reader, ALL) for reader in READERS), (READERS[0], slice(0, None, 2)), (READERS[2], slice(1, None, 2))],
)
@pytest.mark.sweep(suite=lambda which: which == slice(0, None, 2))
def test_every_composition_resumes_from_every_other(
    reader: Composition,
    which: slice,
    request: pytest.FixtureRequest,
    single: tuple[Path, Norms],
    written: dict[Composition, tuple[Path, Any]],
    tmp_path: Path,
) -> None:
    """The next norms are the same, and so are the whole weights that every rank gathers after them."""
    pool = request.getfixturevalue("three_ranks" if reader.world_size == 3 else "four_ranks")
    folders = [single[0], *(folder for folder, _ in written.values())][which]
    of_ranks = pool.run(split_bodies.resume_each, reader, [str(folder) for folder in folders], str(tmp_path))
    expected = split_bodies.resume_each(SINGLE, [str(single[0])], "")[0]
    for norms, weights in (pair for rank in of_ranks for pair in rank):
        assert norms == pytest.approx(single[1][2:], rel=1e-5)
        assert weights.keys() == expected[1].keys()
        for name, value in expected[1].items():
            assert torch.allclose(weights[name], value, rtol=1e-5, atol=1e-6), name
    for folder in folders:
        require_same(tmp_path / folder.name, folder)


def test_masters_of_split_weights_stay_in_fp32(four_ranks: RankPool, tmp_path: Path) -> None:
    composition = Composition(strategy="zero2", dp=2, tp=2, precision="bf16")
    norms = four_ranks.run(split_bodies.save_after, composition, str(tmp_path))
    assert norms == [pytest.approx(norms[0])] * 4
    saved = tensors_of(tmp_path)
    names = [name for name, value in saved.items() if value.dtype != torch.float32 and "step" not in name]
    assert names == [f"model/blocks.{index}.scales" for index in range(split_bodies.BLOCKS)], "buffers have no master"
    whole = saved["model/blocks.0.qkv.weight"]
    assert not torch.equal(whole, whole.bfloat16().float())


def test_what_is_not_finite_on_one_rank_is_skipped_on_all(four_ranks: RankPool) -> None:
    for composition in (WRITERS[0], WRITERS[1], WRITERS[2], WRITERS[3]):
        assert four_ranks.run(split_bodies.overflow, composition) == [(1, True)] * 4, composition


def test_partial_gradients_are_summed_before_the_norm(four_ranks: RankPool, tmp_path: Path, single: Any) -> None:
    """Between sequence-parallel borders a norm's weight has a part of its gradient on each tp rank."""
    norms = four_ranks.run(split_bodies.save_after, WRITERS[1], str(tmp_path), True)
    assert norms == [pytest.approx(single[1], rel=1e-5)] * 4
    require_same(tmp_path, single[0])


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_gradients_travel_in_8_bits_between_data_parallel_ranks_alone(four_ranks: RankPool, strategy: str) -> None:
    """Rounding leaves something out of each sum, the same on all ranks that have the same part."""
    composition = Composition(strategy=strategy, dp=2, tp=2)
    exact, rounded = (
        [rank[0] for rank in four_ranks.run(split_bodies.norms_with, composition, name)] for name in ("none", "int8")
    )
    assert rounded == [rounded[0]] * 4
    assert rounded[0] != exact[0]
    assert rounded[0] == pytest.approx(exact[0], rel=1e-2)


def test_an_export_is_the_whole_model(four_ranks: RankPool, written: Any, tmp_path: Path) -> None:
    four_ranks.run(split_bodies.export_from, WRITERS[2], str(written[WRITERS[2]][0]), str(tmp_path / "pipeline"))
    exported = load_file(tmp_path / "pipeline" / "model.safetensors")
    saved = tensors_of(written[WRITERS[2]][0])
    assert {f"model/{name}" for name in exported} == {name for name in saved if name.startswith("model/")}
    for name, value in exported.items():
        assert torch.equal(value, saved[f"model/{name}"]), name


def test_a_weight_that_one_stage_misses_is_named_on_every_rank(
    four_ranks: RankPool, single: tuple[Path, Norms], tmp_path: Path
) -> None:
    refusals = four_ranks.run(split_bodies.refusal_of, WRITERS[2], str(single[0]), "blocks.3.gate")
    assert len(set(refusals)) == 1
    assert "has no weight blocks.3.gate" in refusals[0]


def brute(part: torch.Tensor, split: Split) -> dict[tuple[int, ...], float]:
    """Return where each element of a part is in the whole."""
    places = [index for first, end in split.pieces for index in range(first, end)]
    return {
        (*where[: split.dim], places[where[split.dim]], *where[split.dim + 1 :]): float(part[where])
        for where in (tuple(int(i) for i in index) for index in torch.ones(part.shape).nonzero())
    }


@pytest.mark.parametrize("shape", [(12,), (12, 3), (3, 12), (2, 12, 2)])
@pytest.mark.parametrize("fused", [1, 3])
def test_any_run_of_any_part_lands_where_it_is_in_the_whole(shape: tuple[int, ...], fused: int) -> None:
    split = even_split(shape, shape.index(12), rank=1, ranks=2, fused=fused)
    size = math.prod(split.local_shape)
    numbers = torch.arange(size, dtype=torch.float32)
    expected = brute(numbers.view(split.local_shape), split)
    for start, stop in [(0, size), (1, size - 1), (size // 3, size // 2), (5, 6)]:
        part = PartOfTensor.of_run(numbers[start:stop], shape, start, split=split)
        whole = torch.full(shape, -1.0)
        for item in part.__create_write_items__("w", part):
            assert item.tensor_data is not None
            chunk = item.tensor_data.chunk
            box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            assert bool((whole[box] == -1).all()), "no element twice"
            whole[box] = part.__get_tensor_shard__(item.index)
        held = {where: value for where, value in brute_whole(whole).items() if value >= 0}
        assert held == {where: value for where, value in expected.items() if start <= value < stop}


def brute_whole(whole: torch.Tensor) -> dict[tuple[int, ...], float]:
    return {where: float(whole[where]) for where in (tuple(map(int, i)) for i in torch.ones(whole.shape).nonzero())}


def test_stages_of_an_interleaved_pipeline_are_described_in_the_models_order() -> None:
    def stage(names: list[str], *blocks: range) -> Inventory:
        optimizer = {"class": "AdamW", "groups": [{"parameters": names, "options": {"lr": 1.0}}], "numbers": []}
        return Inventory(names=tuple(names), aliases={}, extra={}, optimizer=optimizer, blocks=blocks)

    first = stage(["embedding.weight", "layers.0.up", "layers.0.down", "layers.2.up"], range(1), range(2, 3))
    last = stage(["layers.1.up", "layers.3.up", "norm.weight"], range(1, 2), range(3, 4))
    order = ["embedding.weight", "layers.0.up", "layers.0.down", "layers.1.up", "layers.2.up", "layers.3.up"]
    joined = together([first, last])
    assert list(joined.names) == [*order, "norm.weight"]
    assert joined.optimizer["groups"] == [{"parameters": [*order, "norm.weight"], "options": {"lr": 1.0}}]
