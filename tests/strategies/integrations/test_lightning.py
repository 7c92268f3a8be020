"""Lightning's Trainer over dsplan's engine: the same losses, weights and rates as under Lightning's own DDP."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")

from dsplan.diagnostics.bench.rank_pool import RankPool
from strategies.errors import BackendMissing
from strategies.integrations import lightning_shared
from tests.strategies.integrations import lightning_bodies as bodies

STRATEGIES = ("ddp", "fsdp", "zero1", "zero2", "zero3")
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    # 12 batches an epoch: the last step of each has two of them.
    "accumulated": ({"accumulate_grad_batches": 5, "gradient_clip_val": 0.3}, {"interval": "epoch"}),
    "clipped": ({"gradient_clip_val": 0.3}, {"interval": "step"}),
    "by hand": ({}, {"manual": 3}),
}
_IN_SUITE = {"ddp": "by hand", "zero3": "by hand"}


def arguments_of(strategy: str) -> dict[str, str]:
    return {"strategy": strategy, **({"backend": "native"} if strategy.startswith("zero") else {})}


@pytest.fixture(scope="module")
def reference(ranks: RankPool) -> Any:
    """Return what Lightning's own DDP leaves, by settings."""
    return cache(lambda settings: ranks.run(bodies.fit, None, *SETTINGS[settings]))


def require_same(expected: list[Any], others: list[Any], *, within: float = 1e-5) -> None:
    for own, other in zip(expected, others, strict=True):
        assert other["losses"] == pytest.approx(own["losses"], abs=within)
        assert other.get("rates") == own.get("rates")
        assert other.get("metrics", {}) == pytest.approx(own.get("metrics", {}), abs=10 * within)
        assert other["weights"].keys() == own["weights"].keys()
        for name, weight in own["weights"].items():
            assert (weight - other["weights"][name]).abs().max() <= within, name


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.sweep(every=2, suite={"fsdp-accumulated", "ddp-by hand", "zero2-accumulated"})
def test_trains_as_under_lightnings_ddp(ranks: RankPool, reference: Any, strategy: str, settings: str) -> None:
    require_same(reference(settings), ranks.run(bodies.fit, arguments_of(strategy), *SETTINGS[settings]))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [name for name in SETTINGS if name != "by hand"])
def test_trains_as_under_lightnings_ddp_with_deepspeed(
    deepspeed_ranks: RankPool, reference: Any, settings: str
) -> None:
    trained = deepspeed_ranks.run(bodies.fit, {"strategy": "zero2", "backend": "deepspeed"}, *SETTINGS[settings])
    require_same(reference(settings), trained)


@pytest.mark.slow
def test_deepspeed_is_told_which_backward_pass_is_the_last(deepspeed_ranks: RankPool, reference: Any) -> None:
    zero2 = {"strategy": "zero2", "backend": "deepspeed"}
    assert "toggle_model(sync_grad=False)" in deepspeed_ranks.run(bodies.refused, zero2, *SETTINGS["by hand"])[0]
    trained = deepspeed_ranks.run(bodies.fit, zero2, {}, {"manual": 3, "toggles": True})
    require_same(reference("by hand"), trained)


@pytest.mark.slow
def test_mixed_precision_is_the_engines(ranks: RankPool) -> None:
    options = {"precision": "bf16-mixed"}
    own = ranks.run(bodies.fit, None, options, {})
    require_same(own, ranks.run(bodies.fit, arguments_of("ddp"), options, {}))
    # ZeRO casts the weights where autocast casts products; losses here are 7 to 17.
    require_same(own, ranks.run(bodies.fit, arguments_of("zero2"), options, {}), within=0.05)


@pytest.mark.slow
def test_resumes_under_any_strategy_where_it_was(ranks: RankPool, tmp_path: Path) -> None:
    """In the midst of an epoch, with dropout and shuffled data: what is trained then is what would have been."""
    undisturbed = ranks.run(bodies.saved, arguments_of("zero2"), str(tmp_path), 3)
    path = undisturbed[0]["paths"]["whole"]
    for strategy in ("zero2", "fsdp", "ddp"):
        resumed = ranks.run(bodies.resumed, arguments_of(strategy), path, 6)
        for own, other in zip(undisturbed, resumed, strict=True):
            assert other["step"] == 6
            assert other["losses"] == pytest.approx(own["losses"][3:], abs=1e-5)
            assert all((own["weights"][name] - weight).abs().max() < 1e-5 for name, weight in other["weights"].items())


@pytest.mark.slow
def test_resumes_on_another_number_of_ranks(ranks: RankPool, one_rank: RankPool, tmp_path: Path) -> None:
    """One rank with batches as large as those of two together sees the same samples in each step."""
    first, second = ranks.run(bodies.saved, arguments_of("zero2"), str(tmp_path), 3, True)
    (alone,) = one_rank.run(bodies.resumed, arguments_of("single"), first["paths"]["whole"], 6, True)
    means = [(own + other) / 2 for own, other in zip(first["losses"], second["losses"], strict=True)]
    assert alone["step"] == 6
    assert alone["losses"] == pytest.approx(means[3:], abs=1e-5)
    assert all((weight - alone["weights"][name]).abs().max() < 1e-5 for name, weight in first["weights"].items())


@pytest.mark.slow
def test_evaluates_in_and_after_training_and_without_it(ranks: RankPool, tmp_path: Path) -> None:
    trained = ranks.run(bodies.saved, arguments_of("fsdp"), str(tmp_path), 3)
    for paths, tested in ((item["paths"], item["tested"]) for item in trained):
        evaluated = ranks.run(bodies.evaluated, paths["last"])[0]
        assert evaluated == {"tested": pytest.approx(tested, abs=1e-5), "predicted": 2}
    half = ranks.run(bodies.evaluated, trained[0]["paths"]["whole"])[0]
    assert half["tested"] == pytest.approx(trained[0]["validated"], abs=1e-5)


def test_weights_alone_are_a_file_that_lightning_reads(ranks: RankPool, tmp_path: Path) -> None:
    trained = ranks.run(bodies.saved, arguments_of("zero3"), str(tmp_path), 3)[0]
    weights = bodies.loaded(trained["paths"]["weights"])
    assert weights.keys() == trained["weights"].keys()
    assert all((weight - weights[name]).abs().max() == 0 for name, weight in trained["weights"].items())


@pytest.mark.slow
def test_the_norm_to_clip_to_may_be_the_modules_or_the_configs(ranks: RankPool) -> None:
    own = ranks.run(bodies.fit, None, {}, {"clips": 0.3})
    require_same(own, ranks.run(bodies.fit, arguments_of("zero1"), {}, {"clips": 0.3}))
    config = {"gradient_clipping": 0.3}
    require_same(own, ranks.run(bodies.fit, {**arguments_of("fsdp"), "config": config}, {}, {}))


@pytest.mark.parametrize(
    ("options", "module", "line"),
    [
        ({}, {"optimizers": 2, "manual": 1}, "Tiny.configure_optimizers returns 2 optimizers; dsplan trains with one"),
        ({}, {"optimizers": "lbfgs"}, "LBFGS evaluates the loss several times a step"),
        ({"precision": "64-true"}, {}, "precision='64-true' has no equal here"),
        ({"gradient_clip_val": 1, "gradient_clip_algorithm": "value"}, {}, "clipped by their norm alone"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    ranks: RankPool, options: dict[str, Any], module: dict[str, Any], line: str
) -> None:
    for message in ranks.run(bodies.refused, arguments_of("zero1"), options, module):
        assert line in message
        assert "\n" not in message


def test_a_config_that_contradicts_the_trainer_is_refused(ranks: RankPool) -> None:
    config = {"gradient_accumulation_steps": 4}
    text = ranks.run(bodies.refused, {**arguments_of("ddp"), "config": config}, {"accumulate_grad_batches": 2}, {})[0]
    assert text == (
        "config: gradient_accumulation_steps is 4 and Lightning accumulates 2 batches; leave it out of the config"
    )


def test_a_lightning_that_is_installed_and_broken_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(name: str) -> None:
        raise ImportError(f"no {name} here", name="torchmetrics" if name == "lightning.pytorch" else name)

    for name in lightning_shared.TRAINERS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(lightning_shared, "import_module", fail)
    with pytest.raises(BackendMissing, match="Lightning is not installed"):
        lightning_shared.package_in_use()
    printed = capsys.readouterr().err
    assert "lightning.pytorch is installed and cannot be imported: no lightning.pytorch here" in printed
    assert "pytorch_lightning" not in printed
