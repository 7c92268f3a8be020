"""fp8 and fp4: who has such products, what they keep, gather and cost, against published pairs of runs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hardware_db.datasheets import find_device
from planner import vocabulary as words
from planner.cost.code_bases import code_base, code_names
from planner.cost.combinations import why_refused
from planner.cost.memory import memory_estimate
from planner.cost.precision import MX, RECIPES_OF, recipe_of, scaled_products, usual_recipe, why_not_scaled
from planner.cost.timing import step_time, throughput
from planner.cost.timing.efficiency import ceilings, device_rates
from planner.errors import ContradictoryRequest
from planner.models.catalogue import find_model
from planner.search.request import WorkOptions, make_request
from planner.types.job import Job
from strategies.engine.registry import find_strategy
from strategies.errors import CannotRun
from tests.planner.cost.timing.cases import cluster, make_job

H100 = cluster(device="H100-SXM5-80GB", intra="nvlink4-h100", inter="ib-ndr")
B200 = cluster(device="B200-SXM-180GB", intra="nvlink5-b200", inter="ib-ndr")
LLAMA = "meta-llama/Meta-Llama-3-8B"


def job(precision: str, recipe: words.Fp8Recipe | None = None, *, where: Any = H100, **changes: Any) -> Job:
    """Llama-3 8B in torchtitan, compiled, unless `changes` name another code or other fields of Configuration."""
    code, compiled = changes.pop("code", "torchtitan"), changes.pop("compile", True)
    built = make_job(LLAMA, where, precision=precision, **{"strategy": "fsdp", "sequence_length": 8192, **changes})
    return replace(built, workload=replace(built.workload, code=code, compile=compiled, fp8_recipe=recipe))


def speed(job_: Job) -> float:
    return throughput(job_, step_time(job_)).tokens_per_second_per_gpu


@pytest.mark.parametrize(
    ("device", "precision", "recipe", "code", "reason"),
    [
        ("H100-SXM5-80GB", "fp8", None, "transformers", ""),
        ("RTX-4090", "fp8", "rowwise", "transformers", ""),
        ("MI300X", "fp8", "tensorwise", "torchtitan", ""),
        ("B200-SXM-180GB", "fp8", "mxfp8", "megatron", ""),
        ("GB300-288GB", "fp4", None, "nemo", ""),
        ("A100-SXM4-80GB", "bf16", None, "alpa", ""),
        ("A100-SXM4-80GB", "fp8", None, "torch", "A100-SXM4-80GB has no units for fp8 products; use --precision bf16"),
        ("RTX-4090", "fp8", "blockwise", "megatron", "RTX-4090 has no blockwise products; use --fp8-recipe tensorwise"),
        ("RTX-5090", "fp8", "mxfp8", "torch", "RTX-5090 has no mxfp8 products; use --fp8-recipe tensorwise"),
        ("H100-SXM5-80GB", "fp4", None, "torch", "H100-SXM5-80GB has no nvfp4 products; use --precision fp8"),
        ("MI300X", "fp8", "mxfp8", "torch", "MI300X has no mxfp8 products; use --fp8-recipe tensorwise"),
        ("B200-SXM-180GB", "fp8", "nvfp4", "torch", "--precision fp8 does not go with --fp8-recipe nvfp4"),
        ("B200-SXM-180GB", "fp4", "mxfp8", "torch", "--precision fp4 does not go with --fp8-recipe mxfp8"),
        ("B200-SXM-180GB", "fp8", "rowwise", "nemo", "Transformer Engine, which --code nemo uses, has no rowwise"),
        ("H100-SXM5-80GB", "fp8", "blockwise", "llm-foundry", "llm-foundry has no blockwise recipe"),
        ("H100-SXM5-80GB", "fp8", None, "alpa", "--code alpa has no fp8 products; use --precision bf16, or --code"),
        ("H100-SXM5-80GB", "bf16", "rowwise", "torch", "--fp8-recipe rowwise is for --precision fp8 or fp4, not bf16"),
    ],
)
def test_what_cannot_multiply_in_8_or_4_bits_is_refused(
    device: str, precision: words.Precision, recipe: words.Fp8Recipe | None, code: str, reason: str
) -> None:
    answer = why_not_scaled(find_device(device), precision, recipe, code)
    assert (answer or "").startswith(reason) if reason else answer is None
    options = WorkOptions(precision=precision, fp8_recipe=recipe, code=code)
    where = replace(H100, device=find_device(device))
    if reason:
        with pytest.raises(ContradictoryRequest, match=reason.split(";")[0]):
            make_request(find_model("gpt2"), where, options)
        return
    request = make_request(find_model("gpt2"), where, options)
    assert request.allow_unrunnable == (precision != "bf16" or not code_base(code).runs_here)
    assert request.workload.fp8_recipe == (
        None if precision == "bf16" else recipe or usual_recipe(where.device, precision)
    )


def test_every_library_has_numbers_for_its_recipes() -> None:
    for code in code_names():
        for recipe in words.FP8_RECIPES:
            precision = "fp4" if recipe == "nvfp4" else "fp8"
            if why_not_scaled(B200.device, precision, recipe, code):
                continue
            products = scaled_products(job(precision, recipe, where=B200, code=code))
            assert products is not None
            assert products.dtype == precision
    assert set(RECIPES_OF["torchao"]) == set(words.FP8_RECIPES)


def test_a_recipe_changes_what_is_gathered_and_kept_and_nothing_else() -> None:
    plain, tensorwise, rowwise = (
        recipe_of(job(*words_of)) for words_of in (("bf16",), ("fp8", "tensorwise"), ("fp8", "rowwise"))
    )
    assert replace(tensorwise, scaled=None, block_gather=None) == plain
    assert (plain.gather_of_blocks, tensorwise.gather_of_blocks, rowwise.gather_of_blocks) == (2, 1, 2)
    assert replace(rowwise, scaled=None) == plain
    # Transformer Engine's copies in 8 bits lie beside bf16 weights by blocks of 128, unless weights are sharded.
    blocked = recipe_of(job("fp8", "blockwise", code="megatron", strategy="zero1"))
    assert blocked.weight == recipe_of(job("bf16", code="megatron", strategy="zero1")).weight + 2
    assert recipe_of(job("fp8", "blockwise", code="llm-foundry")).weight == plain.weight


def test_fp8_all_gathers_take_half_of_the_blocks_bytes() -> None:
    waits = [
        step_time(job(*words_of)).communication_seconds
        for words_of in (("bf16",), ("fp8", "tensorwise"), ("fp8", "rowwise"))
    ]
    assert waits[0] == waits[2]
    gathers = waits[0] - waits[1]
    counts = job("bf16").counts
    # Two all-gathers of every block over eight NVLinked GPUs, one byte less each.
    assert gathers == pytest.approx(2 * counts.in_blocks * 7 / 8 / 480e9, rel=0.5)


def test_torchao_keeps_16_bit_inputs_and_transformer_engine_8_bit_ones() -> None:
    """torchao's table of Llama-3 8B on eight H100: 47.65 GB in bf16, 47.77 with float8."""
    bf16, ours = (memory_estimate(job(*shared)).activations_bytes for shared in (("bf16",), ("fp8", "rowwise")))
    assert ours == bf16
    shared = {"code": "megatron", "strategy": "zero1", "where": B200}
    plain, narrow = (memory_estimate(job(*given, **shared)) for given in (("bf16",), ("fp8", "mxfp8")))
    facts = find_model(LLAMA)
    # Two norms' outputs and the down projection's input, less attention's output, which is kept twice.
    each = (2 - MX) * (2 * facts.hidden_size + facts.intermediate_size) - MX * facts.hidden_size
    assert plain.activations_bytes - narrow.activations_bytes == pytest.approx(32 * 8192 * each, rel=0.01)


def _limited() -> Any:
    """The H100 of torchao's and torchtitan's tables: 2.4 TB/s, and 500 of 700 W, whose cube root the clock follows."""
    device, clock = H100.device, (500 / 700) ** (1 / 3)
    peaks = {name: peak * clock for name, peak in device.peak_tflops_dense.items() if peak}
    return replace(H100, device=replace(device, memory_bandwidth_gbs=2400, peak_tflops_dense=peaks))


def test_speeds_are_those_that_torchao_published() -> None:
    """Tokens/s of Llama-3 8B on eight H100 (torchao@36027d82 docs/source/workflows/training.md)."""
    published = {("bf16", None): 6150, ("fp8", "tensorwise"): 7689.5, ("fp8", "rowwise"): 6768}
    for (precision, recipe), measured in published.items():
        limited = job(precision, recipe, where=_limited(), activation_checkpointing="selective")
        assert speed(limited) == pytest.approx(measured, rel=0.08), recipe


def test_gains_are_those_that_torchtitan_published() -> None:
    """MXFP8 and NVFP4 over bf16, Llama-3 8B on four Blackwell GPUs of 184 GiB, compiled (torchtitan@b5bcd76c nvfp4.md:
    21,919, 28,084 and 30,040 tokens/s)."""
    where = cluster(4, device="GB200-186GB", intra="nvlink5-b200", inter="ib-ndr")
    changes = {"where": where, "activation_checkpointing": "selective", "sequence_length": 2048, "micro_batch_size": 32}
    plain = speed(job("bf16", **changes))
    assert speed(job("fp8", "mxfp8", **changes)) / plain == pytest.approx(28084 / 21919, rel=0.06)
    assert speed(job("fp4", "nvfp4", **changes)) / plain == pytest.approx(30040 / 21919, rel=0.06)


def test_small_models_and_eager_casts_gain_nothing() -> None:
    small = {"micro_batch_size": 1, "sequence_length": 128}
    assert speed(job("fp8", "rowwise", **small)) <= speed(job("bf16", **small)) * 1.02
    eager = [speed(job(*words_of, compile=False)) for words_of in (("bf16",), ("fp8", "tensorwise"))]
    compiled = [speed(job(*words_of)) for words_of in (("bf16",), ("fp8", "tensorwise"))]
    assert eager[1] / eager[0] < compiled[1] / compiled[0] - 0.05


def test_four_bits_run_at_most_twice_as_fast_as_eight() -> None:
    for name in ("GB200-186GB", "GB300-288GB"):
        where = replace(B200, device=find_device(name))
        eight, four = (
            device_rates(where, precision, scaled=scaled_products(job(precision, where=where))).scaled_flops
            for precision in ("fp8", "fp4")
        )
        assert four == 2 * eight
        assert eight == pytest.approx(where.device.peak_flops("fp8") * ceilings(where.device)[0])


def test_mfu_is_of_the_peak_of_the_products() -> None:
    fp8 = job("fp8", "tensorwise")
    rates = throughput(fp8, step_time(fp8))
    assert rates.mfu == pytest.approx(rates.tflops_per_gpu / 1979)


def test_nothing_here_runs_such_a_plan() -> None:
    configuration = job("fp8", "tensorwise").configuration
    assert str(why_refused(configuration)).startswith("dsplan run has no fp8 products; accelerate")
    with pytest.raises(CannotRun, match="the plan: dsplan run has no fp8 products; accelerate"):
        find_strategy(configuration, None)  # type: ignore[arg-type]
