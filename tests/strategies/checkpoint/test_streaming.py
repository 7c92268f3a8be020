"""Weights that ranks read from files: the same training as with a model that has them, under every strategy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import dsplan
from dsplan.diagnostics.bench.rank_pool import RankPool
from strategies.checkpoint.weights import open_weights, without_adapters
from strategies.engine.initialize import initialize
from strategies.errors import BrokenFile, CannotRun
from tests.strategies import stream_bodies, training_bodies
from tests.strategies.conftest import PoolOf
from tests.strategies.parallel_bodies import Composition, Kind
from tests.strategies.training_bodies import Recipe

TORCH = ("ddp", "fsdp", "fsdp-grad-op")
ZERO = ("zero1", "zero2", "zero3")
ENGINES = [*((name, "torch") for name in TORCH), *((name, "native") for name in ZERO)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The model that recipes begin with, in one file."""
    folder = tmp_path_factory.mktemp("tiny")
    stream_bodies.write_tiny(folder)
    return str(folder)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(("strategy", "backend"), ENGINES)
@pytest.mark.sweep(
    every=2,
    suite=lambda strategy, backend, precision: (
        (strategy, precision) in (("ddp", "fp32"), ("fsdp", "fp32")) or (backend == "native" and precision == "bf16")
    ),
)
def test_data_parallel_ranks_train_as_with_a_model_that_has_them(
    strategy: str, backend: str, precision: str, ranks: RankPool, tiny: str
) -> None:
    """Tied weights are one, and masters are what the files have, not that rounded to what is computed in."""
    recipe = Recipe(strategy=strategy, backend=backend, world_size=2, precision=precision, steps=2)
    losses, weights = ranks.run(stream_bodies.train_tiny, recipe, tiny)[0]
    had = ranks.run(training_bodies.train, recipe)[0]
    assert losses == pytest.approx(had.losses, rel=1e-6)
    assert weights.keys() == had.parameters.keys()
    for name, value in had.parameters.items():
        torch.testing.assert_close(weights[name], value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("offload", ["optimizer", "all"])
def test_what_lies_on_the_host_is_read_there(offload: str, ranks: RankPool, tiny: str) -> None:
    recipe = Recipe(strategy="zero3", backend="native", world_size=2, offload=offload, steps=2)
    losses, _ = ranks.run(stream_bodies.train_tiny, recipe, tiny)[0]
    assert losses == pytest.approx(training_bodies.reference(recipe).losses, rel=1e-6)


@pytest.mark.parametrize("strategy", ZERO)
@pytest.mark.slow
def test_deepspeed_is_given_them_too(strategy: str, pool_of: PoolOf, tiny: str) -> None:
    recipe = Recipe(strategy=strategy, backend="deepspeed", world_size=2, steps=2)
    losses, _ = pool_of(strategy).run(stream_bodies.train_tiny, recipe, tiny)[0]
    assert losses == pytest.approx(training_bodies.reference(recipe).losses, rel=1e-5)


@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize(
    ("strategy", "backend"), [("ddp", "torch"), ("fsdp", "torch"), ("zero2", "native"), ("zero3", "native")]
)
@pytest.mark.sweep(suite=lambda strategy, backend, method: strategy == "fsdp")
def test_adapters_lie_beside_weights_that_are_read(
    strategy: str, backend: str, method: str, ranks: RankPool, tiny: str
) -> None:
    """QLoRA's codes are those of the whole weight, of which a rank keeps its part."""
    pytest.importorskip("peft")
    if method == "qlora":
        pytest.importorskip("bitsandbytes")
    recipe = Recipe(strategy=strategy, backend=backend, world_size=2, steps=3)
    for read, had in ranks.run(stream_bodies.train_adapted, recipe, tiny, method):
        assert read == pytest.approx(had, rel=1e-6)
        assert read[-1] != read[0]


def test_dora_needs_the_weights_first(tiny: str) -> None:
    pytest.importorskip("peft")
    with pytest.raises(CannotRun, match="method dora begins from the lengths of the weights"):
        initialize(_empty(), plan=_plan(), config={"weights": tiny, "lora": {"method": "dora"}})


KINDS: tuple[Kind, ...] = ("llama", "qwen3", "gpt2", "mixtral", "gpt")
TWO = (
    Composition(strategy="fsdp", dp_shard=2, steps=2),
    Composition(strategy="ddp", tp=2, steps=2),
    Composition(strategy="ddp", pp=2, steps=2),
    Composition(strategy="fsdp", dp_shard=2, ep=2, steps=2),
    Composition(strategy="zero2", dp_shard=2, ep=2, steps=2),
    Composition(strategy="ddp", cp=2, steps=2),
)
CHOSEN = {("qwen3", 2), ("gpt", 1), ("mixtral", 3)}
"""Tied weights on two stages, layers that a rule splits, and experts that lie one by one in the files."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[Kind, str]:
    """Every kind of model as the Hub has it."""
    folders: dict[Kind, str] = {}
    for kind in KINDS:
        folders[kind] = str(tmp_path_factory.mktemp(kind))
        stream_bodies.write(kind, Path(folders[kind]))
    return folders


@pytest.mark.parametrize("number", range(len(TWO)))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sweep(every=3, suite=lambda kind, number: (kind, number) in CHOSEN)
def test_ranks_that_split_a_model_read_their_parts(
    kind: Kind, number: int, ranks: RankPool, written: dict[Kind, str]
) -> None:
    if TWO[number].ep > 1 and kind != "mixtral":
        pytest.skip("has no experts")
    for difference in ranks.run(stream_bodies.train, kind, TWO[number], written[kind]):
        assert difference.loss < 2e-6
        assert difference.parameter < 1e-6, difference.where


FOUR = (
    Composition(strategy="fsdp", dp_shard=2, tp=2, steps=2),
    Composition(strategy="hsdp", dp_replicate=2, dp_shard=2, steps=2),
    Composition(strategy="zero3", dp_shard=2, tp=2, steps=2),
    Composition(strategy="zero1", dp_shard=2, pp=2, steps=2),
    Composition(strategy="ddp", tp=2, pp=2, steps=2),
)


@pytest.mark.parametrize("number", range(len(FOUR)))
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
@pytest.mark.slow
def test_four_ranks_read_their_parts_of_parts(
    kind: Kind, number: int, four_ranks: RankPool, written: dict[Kind, str]
) -> None:
    for difference in four_ranks.run(stream_bodies.train, kind, FOUR[number], written[kind]):
        assert difference.loss < 2e-6
        assert difference.parameter < 1e-6, difference.where


def test_a_checkpoint_and_an_export_of_ours_are_read(ranks: RankPool, tmp_path: Path) -> None:
    """One run's weights, sharded over two ranks and bf16 on the way, begin another's."""
    recipe = Recipe(strategy="zero3", backend="native", world_size=2, steps=2)
    expected, goes_on = ranks.run(stream_bodies.save_and_export, recipe, str(tmp_path))[0]
    for folder, tolerance in (("checkpoint", 1e-6), ("export", 1e-2)):
        read, weights = ranks.run(stream_bodies.train_tiny, recipe, str(tmp_path / folder))[0]
        assert read[0] == pytest.approx(goes_on, rel=tolerance)
        assert weights.keys() == expected.keys()


def test_no_rank_has_the_whole_model(ranks: RankPool, tmp_path: Path) -> None:
    """A rank of two that shards 192 MB takes under two shards and one tensor, with what it has read of files."""
    for strategy in ("fsdp", "zero3"):
        peaks = ranks.run(stream_bodies.host_peak, strategy, str(tmp_path))
        shard, tensor = 96 << 20, 4 << 20
        for peak in peaks:
            assert shard < peak < 2 * shard + tensor, strategy


# One process.


def _plan() -> Any:
    return Recipe(steps=1).plan()


def _empty() -> torch.nn.Module:
    with dsplan.empty_weights():
        return training_bodies.TinyModel()


def test_one_process_reads_the_whole_model(tiny: str) -> None:
    losses, weights = stream_bodies.train_tiny(Recipe(steps=1), f"{tiny}/model.safetensors")
    assert losses == pytest.approx(training_bodies.reference(Recipe(steps=1)).losses)
    assert weights["embedding.weight"].shape == (training_bodies.VOCABULARY, training_bodies.WIDTH)


def test_an_optimizer_that_holds_the_parameters_goes_on_holding_them(tiny: str) -> None:
    model = _empty()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    engine, returned, *_ = initialize(model, optimizer=optimizer, plan=_plan(), weights=tiny)
    assert returned is optimizer
    losses = [training_bodies.one_step(engine, step) for step in range(2)]
    assert losses == pytest.approx(training_bodies.reference(Recipe(steps=2)).losses)


def test_a_new_head_is_drawn_and_what_else_is_missing_is_refused(tiny: str, tmp_path: Path, capsys: Any) -> None:
    """A classifier's head has no weights in a pretrained model's files; a block of it does."""
    weights = load_file(f"{tiny}/model.safetensors")
    save_file({name: value for name, value in weights.items() if "blocks.1.up" not in name}, tmp_path / "a.safetensors")
    with pytest.raises(BrokenFile, match=r"has no weight blocks\.1\.up\.bias and 1 more \(nearest: blocks"):
        initialize(_empty(), plan=_plan(), weights=tmp_path)
    with dsplan.empty_weights():
        model = training_bodies.TinyModel()
        model.head = torch.nn.Linear(training_bodies.WIDTH, training_bodies.VOCABULARY, bias=False)
    torch.manual_seed(0)
    engine, *_ = initialize(model, plan=_plan(), weights=tiny)
    assert "has no head.weight: a new head starts from random values" in capsys.readouterr().err
    head = engine.module.get_parameter("head.weight")
    assert 0.1 < head.std() * training_bodies.WIDTH**0.5 < 2
    torch.testing.assert_close(engine.module.get_parameter("positions").cpu(), weights["positions"])


def test_buffers_that_files_have_are_read(tmp_path: Path) -> None:
    """A norm's running mean is a buffer, and a table that the constructor computes is not in the files."""

    class WithBuffers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)
            self.register_buffer("table", torch.arange(4.0), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = (self.norm(self.layer(x)) * self.get_buffer("table")).square().mean()
            return loss

    whole = WithBuffers()
    whole.norm.running_mean.copy_(torch.arange(4) + 0.5)  # type: ignore[union-attr]
    save_file(whole.state_dict(), tmp_path / "model.safetensors")
    with dsplan.empty_weights():
        model = WithBuffers()
    engine, *_ = initialize(model, plan=_plan(), weights=tmp_path)
    assert engine.module.get_buffer("norm.running_mean").tolist() == [0.5, 1.5, 2.5, 3.5]
    assert engine.module.get_buffer("table").tolist() == [0, 1, 2, 3]
    with torch.device("meta"):
        on_meta = WithBuffers()
    with pytest.raises(CannotRun, match="table is a buffer on the meta device"):
        initialize(on_meta, plan=_plan(), weights=tmp_path)


def test_mistakes_are_one_line(tiny: str, tmp_path: Path) -> None:
    with pytest.raises(CannotRun, match="positions is on the meta device and has no values"):
        initialize(_empty(), plan=_plan())
    with pytest.raises(BrokenFile, match="is not there"):
        initialize(_empty(), plan=_plan(), weights=tmp_path / "absent")
    with pytest.raises(BrokenFile, match="has no safetensors files"):
        initialize(_empty(), plan=_plan(), weights=tmp_path)
    wrong = {"positions": torch.zeros(3, 3)}
    save_file({**load_file(f"{tiny}/model.safetensors"), **wrong}, tmp_path / "model.safetensors")
    with pytest.raises(BrokenFile, match=r"has positions as \[3, 3\] and the model as \[6, 16\]"):
        initialize(_empty(), plan=_plan(), weights=tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(BrokenFile, match="holds weights quantised by 'fp8'"):
        initialize(_empty(), plan=_plan(), weights=tmp_path)
    (tmp_path / "config.json").unlink()
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"positions": "../x"}}))
    with pytest.raises(BrokenFile, match="which does not lie beside it"):
        open_weights(tmp_path)


def test_files_of_a_cache_are_links(tiny: str, tmp_path: Path) -> None:
    """The Hub's cache has names that lead to blobs elsewhere."""
    (tmp_path / "model.safetensors").symlink_to(f"{tiny}/model.safetensors")
    engine, *_ = initialize(_empty(), plan=_plan(), weights=tmp_path)
    expected = load_file(f"{tiny}/model.safetensors")["positions"]
    torch.testing.assert_close(engine.module.get_parameter("positions").cpu(), expected)


@pytest.mark.parametrize(
    ("live", "before"),
    [
        ("model.layers.0.q_proj.base_layer.weight", "model.layers.0.q_proj.weight"),
        ("score.modules_to_save.default.weight", "score.weight"),
        ("score.original_module.weight", "score.weight"),
        ("base_layer.weight", "base_layer.weight"),
    ],
)
def test_adapters_change_no_name_in_the_files(live: str, before: str) -> None:
    assert without_adapters(live) == before
