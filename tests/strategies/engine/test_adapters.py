"""Adapters beside frozen weights under every strategy: parity, what is optimized, checkpoints and exports."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from dsplan.diagnostics.bench.rank_pool import RankError, RankPool
from strategies.checkpoint.export import export_checkpoint
from strategies.config.read import read_config
from strategies.errors import BackendMissing, CannotRun, DsplanError
from strategies.modules.adapters import TrainingMethod, apply_method, read_method, require_trainable, wide_adapters
from strategies.modules.precision import cast_model
from strategies.variables import REQUEST
from tests.strategies import adapter_bodies as bodies
from tests.strategies.conftest import PoolOf
from tests.strategies.training_bodies import Recipe, TinyModel

pytest.importorskip("peft")


def _recipe(strategy: str, backend: str = "", **options: Any) -> Recipe:
    return Recipe(strategy=strategy, backend=backend, world_size=2, **options)


WAYS = [
    pytest.param(_recipe("ddp"), "own", id="ddp, adapters of the script's"),
    pytest.param(_recipe("ddp", accumulation=2, checkpointing="full"), "dora", id="ddp, dora, recomputed"),
    pytest.param(_recipe("fsdp", checkpointing="full"), "lora", id="fsdp, recomputed"),
    pytest.param(_recipe("fsdp-grad-op"), "dora", id="fsdp-grad-op, dora", marks=pytest.mark.slow),
    pytest.param(_recipe("zero1", "native"), "lora", id="native zero1", marks=pytest.mark.slow),
    pytest.param(_recipe("zero2", "native"), "lora", id="native zero2"),
    pytest.param(_recipe("zero3", "native", accumulation=2), "dora", id="native zero3, dora"),
    pytest.param(_recipe("zero1"), "lora", id="deepspeed zero1", marks=pytest.mark.slow),
    pytest.param(_recipe("zero2"), "lora", id="deepspeed zero2", marks=pytest.mark.slow),
    pytest.param(_recipe("zero3"), "dora", id="deepspeed zero3, dora", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("recipe", "method"), WAYS)
@pytest.mark.sweep(every=4)
def test_adapters_learn_as_in_one_process(recipe: Recipe, method: str, pool_of: PoolOf, one_rank: RankPool) -> None:
    expected = one_rank.run(bodies.adapters_after, Recipe(), method)[0]
    pool = pool_of("" if recipe.backend == "native" else recipe.strategy)
    trained_rank = pool.run(bodies.adapters_after, recipe, method)[0]
    assert trained_rank.losses == pytest.approx(expected.losses, abs=1e-5)
    for name, adapter in expected.adapters.items():
        torch.testing.assert_close(trained_rank.adapters[name], adapter, atol=1e-5, rtol=0)
    assert trained_rank.frozen_changed == []
    assert trained_rank.gradients_of_frozen == 0
    trained = sum(adapter.numel() for adapter in expected.adapters.values())
    assert expected.optimized == trained
    if recipe.backend == "native":
        assert trained_rank.optimized == trained // 2  # a rank's part
    elif recipe.strategy in ("ddp", "fsdp", "fsdp-grad-op"):
        assert trained_rank.optimized == trained


@pytest.mark.parametrize("method", ["lora", pytest.param("own", marks=pytest.mark.slow)])
def test_adapters_follow_the_split_of_their_layers(method: str, ranks: RankPool, one_rank: RankPool) -> None:
    expected = one_rank.run(bodies.adapters_after, Recipe(), method)[0]
    trained = ranks.run(bodies.adapters_after, _recipe("fsdp"), method, 2)[0]
    assert trained.losses == pytest.approx(expected.losses, abs=1e-5)
    for name, adapter in expected.adapters.items():
        torch.testing.assert_close(trained.adapters[name], adapter, atol=1e-5, rtol=0)
    assert trained.frozen_changed == []
    with pytest.raises(RankError, match=r"tensor parallelism \(tp 2\) splits LoRA's adapters and no other kind"):
        ranks.run(bodies.adapters_after, _recipe("fsdp"), "dora", 2)


@pytest.mark.slow
def test_split_adapters_are_saved_and_exported_whole(ranks: RankPool, one_rank: RankPool, tmp_path: Path) -> None:
    expected, exported = ranks.run(bodies.saved_and_exported, _recipe("ddp"), "lora", tmp_path, 2)[0]
    assert one_rank.run(bodies.resumed, Recipe(), "lora", tmp_path)[0] == pytest.approx(expected, abs=1e-5)
    assert one_rank.run(bodies.losses_of_exports, tmp_path)[0] == pytest.approx((exported, exported), abs=1e-5)


@pytest.mark.slow
def test_the_adapters_of_all_stages_are_exported(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(bodies.exported_from_stages, tmp_path)
    exported = export_checkpoint(tmp_path / "saved", tmp_path / "again")
    for path in (tmp_path / "adapter" / "adapter_model.safetensors", exported[0]):
        adapters = load_file(path)
        assert len(adapters) == 2 * 2 * 3  # A and B beside three products of two blocks
        assert {name.split(".layers.")[1][0] for name in adapters} == {"0", "1"}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2", "zero3"])
@pytest.mark.sweep(every=2)
def test_adapters_learn_in_bf16(strategy: str, ranks: RankPool, one_rank: RankPool) -> None:
    expected = one_rank.run(bodies.adapters_after, Recipe(precision="bf16"), "lora")[0]
    backend = "native" if strategy.startswith("zero") else ""
    trained = ranks.run(bodies.adapters_after, _recipe(strategy, backend, precision="bf16"), "lora")[0]
    assert trained.losses == pytest.approx(expected.losses, abs=2e-2)
    for name, adapter in expected.adapters.items():
        torch.testing.assert_close(trained.adapters[name].float(), adapter, atol=2e-2, rtol=0)
    assert trained.frozen_changed == []


def test_adapters_alone_are_saved_over_their_base_and_exported(
    ranks: RankPool, one_rank: RankPool, tmp_path: Path
) -> None:
    expected, exported = ranks.run(bodies.saved_and_exported, _recipe("fsdp"), "dora", tmp_path)[0]
    (checkpoint,) = tmp_path.glob("step-*")
    assert "embed_tokens" not in (checkpoint / "tensors.json").read_text()
    losses = ranks.run(bodies.resumed, _recipe("zero2", "native"), "dora", tmp_path)[0]
    assert losses == pytest.approx(expected, abs=1e-5)
    assert one_rank.run(bodies.losses_of_exports, tmp_path)[0] == pytest.approx((exported, exported), abs=1e-5)
    with pytest.raises(RankError, match="was trained beside other frozen weights than this model's"):
        ranks.run(bodies.resumed, _recipe("ddp"), "dora", tmp_path, 0.01)


def test_a_checkpoint_of_adapters_has_no_whole_model_to_export(one_rank: RankPool, tmp_path: Path) -> None:
    from strategies.checkpoint.export import export_checkpoint

    one_rank.run(bodies.saved_and_exported, Recipe(), "lora", tmp_path)
    written = export_checkpoint(tmp_path, tmp_path / "again")
    assert [path.name for path in written] == ["adapter_model.safetensors", "adapter_config.json"]
    assert written[0].read_bytes() == (tmp_path / "adapter/adapter_model.safetensors").read_bytes()
    with pytest.raises(CannotRun, match="holds trained weights only"):
        export_checkpoint(tmp_path, tmp_path / "whole", merged=True)


def _names(model: nn.Module) -> set[str]:
    return {name for name, weight in model.named_parameters() if weight.requires_grad}


@pytest.mark.parametrize(
    ("targets", "layers"),
    [("all-linear", {"up", "down"}), ("up", {"up"}), (r"blocks\.[01]\.down", {"down"})],
)
def test_targets_are_linear_layers_of_blocks(targets: str, layers: set[str]) -> None:
    model = TinyModel()
    description = apply_method(model, TrainingMethod(method="lora", rank=2, targets=targets))
    trained = _names(model)
    assert {name.split(".")[2] for name in trained} == layers
    assert all("lora_" in name for name in trained)
    assert description.startswith("lora adapters of rank 2 beside ")
    assert apply_method(model, TrainingMethod(method="lora")) is None  # it has some


@pytest.mark.parametrize(("strategy", "width"), [("ddp", torch.float32), ("fsdp", torch.bfloat16)])
def test_adapters_stay_fp32_beside_16_bit_weights_that_nothing_shards(strategy: Any, width: torch.dtype) -> None:
    model = TinyModel()
    apply_method(model, TrainingMethod(method="lora", precision="bf16-pure"))
    plan = _recipe(strategy, precision="bf16-pure").plan().configuration
    cast_model(model, plan.precision, wide_adapters(model, plan))
    for weight in model.parameters():
        assert weight.dtype == (width if weight.requires_grad else torch.bfloat16)


def test_a_mistyped_target_gets_the_near_one() -> None:
    with pytest.raises(CannotRun, match=r"lora targets 'dwon' mean no linear layer of TinyModel; did you mean down\?"):
        apply_method(TinyModel(), TrainingMethod(method="lora", targets="dwon"))


def test_a_pattern_leaves_the_rest_frozen() -> None:
    model = TinyModel()
    description = apply_method(model, TrainingMethod(train_only=r"blocks\.2\."))
    assert all(name.startswith("blocks.2.") for name in _names(model))
    assert description.startswith("weights that match")
    with pytest.raises(CannotRun, match="train_only 'layers' matches no weight of TinyModel; names are like"):
        apply_method(TinyModel(), TrainingMethod(train_only="layers"))


def test_the_config_and_the_plan_name_one_method() -> None:
    config = read_config({"lora": {"rank": 16, "targets": "attention"}})
    assert read_method(config, {}, "bf16").rank == 16
    assert read_method(config, {"method": "lora", "lora_rank": 4}, "bf16").rank == 16
    with pytest.raises(CannotRun, match="the plan is for method full and the script's config asks for lora"):
        read_method(config, {"method": "full"}, "bf16")
    planned = read_method(read_config({}), {"method": "dora", "lora_rank": 4, "load_dtype": "bf16"}, "bf16")
    assert (planned.method, planned.rank, planned.load_dtype) == ("dora", 4, "bf16")


def test_the_command_line_comes_before_the_config(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REQUEST, '{"method": {"method": "dora", "lora_targets": "up"}}')
    method = read_method(read_config({"lora": {"rank": 16}}), {}, None)
    assert (method.method, method.targets) == ("dora", "up")


@pytest.mark.parametrize(
    ("section", "line"),
    [
        ({"rank": 0}, "lora.rank is 0; it must be a whole number of at least 1"),
        ({"method": "prefix"}, "lora.method is 'prefix'; it must be one of lora, dora, qlora"),
        ({"rnak": 8}, "lora.rnak is not known; did you mean rank?"),
    ],
)
def test_a_wrong_section_is_named(section: dict[str, Any], line: str) -> None:
    with pytest.raises(DsplanError) as refused:
        read_config({"lora": section})
    assert line in str(refused.value)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "backend"), [("ddp", ""), ("fsdp", ""), ("zero2", "native"), ("zero3", "native")])
def test_adapters_learn_beside_weights_in_four_bits(
    strategy: str, backend: str, ranks: RankPool, one_rank: RankPool
) -> None:
    pytest.importorskip("bitsandbytes")
    expected = one_rank.run(bodies.adapters_after, Recipe(), "qlora")[0]
    trained = ranks.run(bodies.adapters_after, _recipe(strategy, backend), "qlora")[0]
    assert trained.losses == pytest.approx(expected.losses, abs=1e-5)
    for name, adapter in expected.adapters.items():
        torch.testing.assert_close(trained.adapters[name], adapter, atol=1e-5, rtol=0)


def test_four_bits_need_their_library_and_survive_no_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(BackendMissing, match="method qlora needs bitsandbytes, which stores weights in 4 bits; pip"):
        apply_method(TinyModel(), TrainingMethod(method="qlora"))

    class Linear4bit(nn.Linear):
        """A layer of the library's, as far as it is recognized."""

    with pytest.raises(CannotRun, match="DeepSpeed's zero2 casts weights, which 4-bit ones do not survive"):
        require_trainable(
            nn.Sequential(Linear4bit(2, 2)), Recipe(strategy="zero2", backend="deepspeed").plan().configuration
        )
