"""Precisions that DeepSpeed has not got on a device: planned without it, or refused in one line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hardware_db.errors import DsplanError
from hardware_db.probe.machine import Host, Machine, Software
from planner.cluster.probed import cpu_cluster
from planner.cluster.resolve import HardwareRequest, resolve_cluster
from planner.errors import ContradictoryRequest
from planner.models.catalogue import find_model
from planner.search.estimate import estimate
from planner.search.exact import ExactOptions, exact
from planner.search.request import Request, WorkOptions, make_request
from planner.search.search import recommend
from planner.types.plan_io import save_plan
from strategies.launch import prepare as prepare_module
from strategies.launch.prepare import RunRequest, prepare
from strategies.run_directory.request import PlanRequest

AVX2 = ("avx", "avx2", "fma")
WITH_FP16 = [(*AVX2, "avx512f", "avx512_fp16"), (*AVX2, "avx_ne_convert", "avx_vnni_int8")]
WITHOUT = [AVX2, (*AVX2, "avx512f", "avx512_bf16"), (*AVX2, "amx_bf16"), (*AVX2, "avx_ne_convert"), ()]
LACKS = "DeepSpeed has no fp16 on this processor (EPYC), which lacks AVX512-FP16"


def host(flags: tuple[str, ...]) -> Host:
    host: dict[str, Any] = {"cpu_model": "EPYC", "cpu_max_mhz": 3000.0, "physical_cores": 8, "usable_cores": 8}
    return Host(system="Linux", cpu_flags=frozenset(flags), memory_available_bytes=64 << 30, **host)


def request(flags: tuple[str, ...], precision: Any = "fp16", **ranking: Any) -> Request:
    options = WorkOptions(precision=precision, seq_len=128, global_batch=8)
    return make_request(find_model("gpt2"), cpu_cluster(host(flags), ranks=2), options, **ranking)


@pytest.mark.parametrize("flags", WITHOUT)
def test_zero_is_our_own_where_deepspeed_has_no_fp16(flags: tuple[str, ...]) -> None:
    answer = recommend(request(flags))
    assert {plan.configuration.backend for plan in answer.plans} == {"torch", "native"}
    assert f"ZeRO by backend native, since {LACKS} (--backend)" in answer.request.defaults


@pytest.mark.parametrize(("flags", "precision"), [*((flags, "fp16") for flags in WITH_FP16), (AVX2, "bf16")])
def test_zero_is_deepspeeds_elsewhere(flags: tuple[str, ...], precision: str) -> None:
    answer = recommend(request(flags, precision))
    assert {plan.configuration.backend for plan in answer.plans} == {"torch", "deepspeed"}
    assert not any("native" in sentence for sentence in answer.request.defaults)


def test_deepspeed_by_name_is_refused_where_it_has_no_fp16() -> None:
    with pytest.raises(ContradictoryRequest) as caught:
        request(AVX2, zero_backend="deepspeed")
    assert str(caught.value) == f"{LACKS}; use backend native, whose ZeRO shards the same, or precision fp32 or bf16"


def test_one_configuration_follows_the_same_rule() -> None:
    question, configuration = exact(request(AVX2), ExactOptions(strategy="zero2"))
    assert configuration.backend == "native"
    assert estimate(question, configuration).configuration == configuration
    with pytest.raises(ContradictoryRequest, match="use backend native"):
        estimate(question, replace(configuration, backend="deepspeed"))


@pytest.mark.parametrize(("gpu", "backend"), [("P100-PCIE-16GB", "native"), ("V100-SXM2-16GB", "deepspeed")])
def test_deepspeed_has_fp16_from_volta_on(gpu: str, backend: str) -> None:
    cluster = resolve_cluster(HardwareRequest(gpu=gpu, gpus=4))
    assert make_request(find_model("gpt2"), cluster, WorkOptions(precision="fp16")).zero_backend == backend


@pytest.mark.parametrize("backend", ["deepspeed", "native"])
def test_a_plan_is_refused_before_its_ranks_start(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan was made for processors with AVX512-FP16, and this machine has none."""
    planned = recommend(request(WITH_FP16[0], zero_backend=backend, strategies=("zero2",))).plans[0]
    save_plan(planned, tmp_path / "plan.yaml")
    (tmp_path / "train.py").write_text("import dsplan\ndsplan.initialize(None)")
    monkeypatch.setattr(prepare_module, "probe", lambda: Machine(host=host(AVX2), software=Software(python="3.11")))
    requested = PlanRequest(plan_file=str(tmp_path / "plan.yaml"))
    run_request = RunRequest(script=tmp_path / "train.py", plan=requested, run_directory=tmp_path / "run")
    if backend == "native":
        assert prepare(run_request).plan == planned
        return
    with pytest.raises(DsplanError) as caught:
        prepare(run_request)
    assert str(caught.value).startswith(f"{tmp_path / 'plan.yaml'}: {LACKS}; plan again: use backend native")
    assert not (tmp_path / "run").exists()
