"""Compressed gradients and inputs that wait on the host, as the planner prices them."""

from __future__ import annotations

import pytest

from planner.cluster.resolve import HardwareRequest, resolve_cluster
from planner.errors import ContradictoryRequest
from planner.models.catalogue import find_model
from planner.search.estimate import estimate
from planner.search.exact import ExactOptions, exact
from planner.search.request import WorkOptions, make_request
from planner.search.search import recommend
from planner.types.plan import Plan

GPUS, SAMPLES, LENGTH, WIDTH, BLOCKS = 4, 16, 1024, 768, 12


def plan_of(gpu: str = "a100-80gb", **options: object) -> Plan:
    cluster = resolve_cluster(HardwareRequest(gpus=GPUS, gpu=gpu))
    request = make_request(find_model("gpt2"), cluster, WorkOptions(seq_len=LENGTH, precision="bf16"))
    chosen = {"strategy": "zero2", "backend": "native", "micro_batch": SAMPLES, **options}
    return estimate(*exact(request, ExactOptions(**chosen)))  # type: ignore[arg-type]


@pytest.mark.parametrize(("strategy", "backend", "share"), [("zero1", "native", 3 / 4), ("ddp", None, 1.0)])
def test_errors_are_remembered_in_two_bytes(strategy: str, backend: str | None, share: float) -> None:
    plain, compressed = (
        plan_of(strategy=strategy, backend=backend, gradient_compression=codec) for codec in ("none", "int8")
    )
    added = compressed.memory.phases["loss"] - plain.memory.phases["loss"]
    assert added == pytest.approx(2 * share * find_model("gpt2").parameters, rel=0.001)


@pytest.mark.parametrize(("strategy", "backend", "width"), [("zero2", "native", 2), ("ddp", None, 4)])
def test_less_is_sent(strategy: str, backend: str | None, width: int) -> None:
    """Over slow links time follows bytes: here of all-reduces, which the reductions of ZeRO-2 share with a gather."""
    seconds = {
        codec: plan_of("t4", strategy=strategy, backend=backend, gradient_compression=codec).time.communication_seconds
        for codec in ("none", "bf16", "int8")
    }
    assert seconds["bf16"] == pytest.approx(seconds["none"]) if width == 2 else seconds["bf16"] < seconds["none"]
    assert seconds["int8"] < seconds["bf16"]


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_inputs_on_the_host_are_on_no_device(kind: str) -> None:
    here, moved = (plan_of(checkpointing=kind, activations_on_host=on_host) for on_host in (False, True))
    one = 2 * SAMPLES * LENGTH * WIDTH
    saved = here.memory.phases["loss"] - moved.memory.phases["loss"]
    assert saved == pytest.approx(BLOCKS * one)
    assert moved.memory.phases["forward"] == pytest.approx(here.memory.phases["forward"] - (BLOCKS - 2) * one)
    assert moved.memory.host_bytes_per_node - here.memory.host_bytes_per_node >= GPUS * BLOCKS * one
    assert moved.time.offload_seconds > here.time.offload_seconds == 0


def test_what_no_strategy_can_do_is_refused() -> None:
    with pytest.raises(ContradictoryRequest, match="int8 is for ddp, and zero1-3 with backend native"):
        plan_of(strategy="fsdp", backend=None, gradient_compression="int8")
    with pytest.raises(ContradictoryRequest, match="are those that checkpointing keeps; choose full or selective"):
        plan_of(activations_on_host=True)


def test_the_search_keeps_to_what_was_asked() -> None:
    cluster = resolve_cluster(HardwareRequest(gpus=GPUS, gpu="a100-80gb"))
    ranking = {"gradient_compression": "int8", "activations_on_host": True, "checkpointings": ("full",)}
    request = make_request(find_model("gpt2"), cluster, WorkOptions(), top=50, **ranking)
    configurations = [plan.configuration for plan in recommend(request).plans]
    assert configurations
    assert {configuration.strategy for configuration in configurations} <= {"single", "ddp"}, (
        "DeepSpeed and FSDP2 have no 8 bits"
    )
    assert {
        (configuration.gradient_compression, configuration.activation_checkpointing, configuration.activations_on_host)
        for configuration in configurations
    } == {("int8", "full", True)}
