"""From the flags of `dsplan estimate` to one configuration whose numbers agree."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cluster.resolve import HardwareRequest, resolve_cluster
from planner.errors import ContradictoryRequest
from planner.models.catalogue import find_model
from planner.search.estimate import estimate
from planner.search.exact import ExactOptions, exact
from planner.search.request import Request, WorkOptions, make_request
from planner.types.plan import Configuration
from planner.vocabulary import Strategy

DIVISORS = st.sampled_from([1, 2, 4, 8])


def request(gpus: int = 8, nodes: int | None = None, global_batch: int | None = None) -> Request:
    cluster = resolve_cluster(HardwareRequest(gpus=gpus, nodes=nodes, gpu="A100-SXM4-80GB"))
    return make_request(find_model("opt-125m"), cluster, WorkOptions(global_batch=global_batch))


def configuration(options: ExactOptions, **of_request: int) -> Configuration:
    return exact(request(**of_request, global_batch=options.global_batch), options)[1]


@settings(deadline=None)
@given(tp=DIVISORS, pp=DIVISORS, micro=st.integers(1, 64), accumulation=st.integers(1, 64))
def test_the_degrees_use_every_gpu_and_the_batch_is_their_product(
    tp: int, pp: int, micro: int, accumulation: int
) -> None:
    options = ExactOptions(strategy="fsdp", tp=tp, pp=pp, micro_batch=micro, grad_accum=accumulation)
    chosen_request, chosen = exact(request(gpus=64), options)
    assert chosen.world_size == 64
    assert chosen.dims.data_parallel == 64 // (tp * pp)
    assert chosen.global_batch_size == micro * accumulation * 64 // (tp * pp)
    assert chosen_request.workload.global_batch_size == chosen.global_batch_size
    assert not any("--global-batch" in text for text in chosen_request.defaults)


@pytest.mark.parametrize(
    ("options", "micro", "accumulation"),
    [
        (ExactOptions(), 1, 1),
        (ExactOptions(micro_batch=4), 4, 1),
        (ExactOptions(global_batch=64), 1, 8),
        (ExactOptions(global_batch=64, micro_batch=4), 4, 2),
        (ExactOptions(global_batch=64, grad_accum=4), 2, 4),
        (ExactOptions(global_batch=64, micro_batch=8, grad_accum=1), 8, 1),
    ],
)
def test_what_was_not_said_follows(options: ExactOptions, micro: int, accumulation: int) -> None:
    chosen = configuration(options)
    assert (chosen.micro_batch_size, chosen.gradient_accumulation_steps) == (micro, accumulation)


def test_strategies_place_the_ranks() -> None:
    degrees = {
        strategy: (chosen.dp_replicate, chosen.dp_shard)
        for strategy in ("ddp", "zero1", "zero3", "fsdp", "hsdp")
        for chosen in [configuration(ExactOptions(strategy=strategy), gpus=16, nodes=2)]
    }
    assert degrees == {"ddp": (16, 1), "zero1": (1, 16), "zero3": (1, 16), "fsdp": (1, 16), "hsdp": (2, 8)}
    assert configuration(ExactOptions(), gpus=1).strategy == "single"
    assert configuration(ExactOptions()).strategy == "ddp"


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "fsdp", "fsdp-grad-op", "hsdp"])
def test_so_many_ranks_as_one_says_share_the_states(strategy: Strategy) -> None:
    chosen = configuration(ExactOptions(strategy=strategy, shard=4), gpus=16, nodes=2)
    assert (chosen.strategy, chosen.dp_replicate, chosen.dp_shard) == (strategy, 4, 4)
    assert chosen.backend == ("native" if strategy.startswith("zero") else "torch")
    # The ranks of one sample are among those that share.
    spread = configuration(ExactOptions(strategy=strategy, shard=8, cp=2, tp=2), gpus=64, nodes=8)
    assert (spread.dp_replicate, spread.dp_shard, spread.state_shards) == (4, 4, 8)
    assert configuration(ExactOptions(strategy=strategy, shard=8)).dp_replicate == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (ExactOptions(strategy="zero2", shard=3), "shard 3 does not divide 8 data-parallel ranks; use 2, 4, 8"),
        (ExactOptions(strategy="fsdp", shard=3, cp=2), "shard 3 does not divide 4 data-parallel ranks x cp 2; use 2,"),
        (ExactOptions(strategy="ddp", shard=2), "ddp shards nothing, and shard is 2"),
        (ExactOptions(strategy="zero1", shard=1), "keeps whole states on every rank; use ddp, or shard 2"),
        (ExactOptions(tp=3), "--tp 3 x --pp 1 = 3 does not divide 8 GPUs"),
        (ExactOptions(strategy="hsdp"), "hsdp copies the model over nodes"),
        (ExactOptions(global_batch=60), "not a multiple of 8; the nearest that is: 56 or 64"),
        (ExactOptions(global_batch=4), "not a multiple of 8; the nearest that is: 8"),
        (ExactOptions(global_batch=64, micro_batch=4, grad_accum=3), "= 96; leave one out"),
        (ExactOptions(checkpointing="full", checkpoint_every=13), "--checkpoint-every 13 is more than the model's 12"),
        (ExactOptions(checkpointing="none", checkpoint_every=2), "recomputed by full checkpointing; choose full"),
    ],
)
def test_contradictions_name_the_numbers(options: ExactOptions, message: str) -> None:
    with pytest.raises(ContradictoryRequest, match=message.replace("(", r"\(")):
        configuration(options)


@settings(deadline=None)
@given(strategy=st.sampled_from(["ddp", "fsdp", "zero2", "zero3"]), micro=st.integers(1, 64))
def test_the_memory_figures_add_up_to_the_byte(strategy: Strategy, micro: int) -> None:
    memory = estimate(*exact(request(), ExactOptions(strategy=strategy, micro_batch=micro))).memory
    categories = (memory.parameters_bytes, memory.gradients_bytes, memory.optimizer_bytes)
    assert sum(categories) + memory.activations_bytes + memory.buffers_bytes + memory.temporaries_bytes == (
        memory.peak_allocated_bytes
    )
    assert memory.peak_reserved_bytes + memory.device_overhead_bytes == memory.device_used_bytes


@pytest.mark.parametrize(
    ("code", "tp", "setting", "split"),
    [
        ("megatron", 2, None, True),
        ("megatron", 2, False, False),
        ("megatron", 1, None, False),
        ("megatron-deepspeed", 2, None, False),
        ("transformers", 2, True, True),
    ],
)
def test_tp_ranks_split_the_sequence_where_the_code_does_it(
    code: str, tp: int, setting: bool | None, split: bool
) -> None:
    cluster = resolve_cluster(HardwareRequest(gpus=8, gpu="A100-SXM4-80GB"))
    request = make_request(find_model("llama-2-7b"), cluster, WorkOptions(code=code))
    _, chosen = exact(request, ExactOptions(strategy="zero1", tp=tp, sequence_parallel=setting))
    assert chosen.sequence_parallel is split
