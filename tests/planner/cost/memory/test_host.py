"""Host memory: pinned buffers one by one, models while they load, what a save collects, and verdicts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planner.cluster.resolve import HardwareRequest, resolve_cluster
from planner.cost.memory.host import pinned_bytes
from planner.models.catalogue import find_model
from planner.search.estimate import Priced, estimate, price
from planner.search.exact import ExactOptions, exact
from planner.search.request import Request, WorkOptions, make_request
from planner.vocabulary import Offload, Save, Strategy

PSI = 8_030_261_248  # Llama-3-8B
PROCESS = 335 << 20


def ask(model: str = "llama-3-8b", gpus: int = 8, host_gb: float | None = None) -> Request:
    cluster = resolve_cluster(HardwareRequest(gpu="h100", gpus=gpus))
    options = WorkOptions(seq_len=2048, precision="bf16", host_memory_gb=host_gb)
    return make_request(find_model(model), cluster, options)


def priced(request: Request, strategy: Strategy, offload: Offload = "none") -> Priced:
    return price(*exact(request, ExactOptions(strategy=strategy, offload=offload)))


def test_a_pinned_buffer_takes_the_next_power_of_two() -> None:
    gib = 1 << 30
    assert pinned_bytes(2.25 * gib) == 4 * gib
    assert pinned_bytes(4 * gib) == 4 * gib
    assert pinned_bytes(1) == 1


def test_zero_offload_pins_buffer_by_buffer() -> None:
    """Of a billion parameters per rank 4 GB of master weights take 4 GiB; moments are not pinned."""
    part = PSI / 8
    buffers = 2 * pinned_bytes(4 * part) + pinned_bytes(2 * part) + pinned_bytes(2 * 128256 * 4096)
    expected = 8 * (PROCESS + buffers + 8 * part)
    assert priced(ask(), "zero2", "optimizer").memory.host_bytes_per_node == pytest.approx(expected, rel=1e-3)


def test_fsdp_offload_pins_tensor_by_tensor() -> None:
    """A table of 128256 x 4096 over 8 ranks is 262 MB in fp32 and takes 2^28 bytes, its moments what they are."""
    memory = priced(ask(), "fsdp", "all").memory
    states = 16 * PSI
    assert states < memory.host_bytes_per_node - 8 * PROCESS < 1.5 * states


def test_frozen_weights_on_the_host_have_neither_gradients_nor_moments() -> None:
    """The bytes of 4-bit weights, and for 42 million adapters' 16 bytes each; all of them pinned to powers of two."""
    cluster = resolve_cluster(HardwareRequest(gpu="h100", gpus=8))
    options = WorkOptions(seq_len=2048, precision="bf16", method="qlora", lora_rank=16)
    request = make_request(find_model("llama-3-8b"), cluster, options)
    held = priced(request, "fsdp", "all").memory.host_bytes_per_node - 8 * PROCESS
    frozen = PSI / 2 + 2 * 2 * 128256 * 4096  # the head and the embedding stay in 16 bit
    assert 0.8 * frozen < held < 2.2 * frozen + 8 * 16 * 41_943_040


def test_every_process_makes_a_whole_model_unless_the_node_has_no_room() -> None:
    roomy = priced(ask(), "zero3").memory
    assert roomy.host_load_bytes_per_node == pytest.approx(8 * (4 * PSI + PROCESS), rel=1e-3)
    small = ask(host_gb=100)
    assert priced(small, "zero3").memory.host_load_bytes_per_node == pytest.approx(4 * PSI + 8 * PROCESS, rel=1e-3)
    (note,) = estimate(*exact(small, ExactOptions(strategy="fsdp"))).notes
    assert note.startswith("a node has no room to load 8 copies of the model, 29.9 GiB each: counted for one")


def test_weights_stream_where_a_node_has_no_room_for_one_copy() -> None:
    """ZeRO-1 has no way to make the model once; of a node of 30 GB no strategy has room for 32 GB of weights."""
    read = 8 * (32 << 20)
    for host_gb, strategy in ((100, "zero1"), (30, "fsdp"), (30, "ddp")):
        small = ask(host_gb=host_gb)
        memory = priced(small, strategy).memory
        assert memory.host_load_bytes_per_node == pytest.approx(8 * PROCESS + read, rel=1e-6)
        (note,) = [note for note in estimate(*exact(small, ExactOptions(strategy=strategy))).notes if "room" in note]
        assert note.endswith("every rank reads its own parts of the files, by dsplan.initialize(weights=DIRECTORY)")


def test_other_trainers_and_dora_do_not_stream() -> None:
    dora = make_request(
        find_model("llama-3-8b"),
        resolve_cluster(HardwareRequest(gpu="h100", gpus=8)),
        WorkOptions(seq_len=2048, precision="bf16", host_memory_gb=10, method="dora"),
    )
    replica = priced(dora, "ddp")
    assert replica.judgement.verdict == "does_not_fit"
    assert "of host memory to load the model" in replica.judgement.reason


def test_quantised_weights_go_to_the_card_tensor_by_tensor() -> None:
    """QLoRA of 14B on an L4 whose host has 16 GB; files are mapped, and the table of tokens is the largest tensor."""
    cluster = resolve_cluster(HardwareRequest(gpu="l4", gpus=1))
    options = WorkOptions(seq_len=1024, precision="bf16", host_memory_gb=16, method="qlora", lora_rank=16)
    memory = price(
        *exact(
            make_request(find_model("qwen2.5-14b"), cluster, options),
            ExactOptions(strategy="single", micro_batch=1, checkpointing="full"),
        )
    )
    table = 152064 * 5120
    assert memory.memory.host_load_bytes_per_node == pytest.approx(PROCESS + 2 * table, rel=1e-6)
    assert memory.judgement.verdict != "does_not_fit"


@pytest.mark.parametrize(("save", "more"), [("full", 4 * PSI), ("sharded", 4 * 128256 * 4096)])
def test_a_save_collects_in_host_memory(save: Save, more: int) -> None:
    request, configuration = exact(ask(), ExactOptions(strategy="fsdp"))
    saving = replace(request, workload=replace(request.workload, save=save))
    without, memory = (price(question, configuration).memory for question in (request, saving))
    assert memory.host_bytes_per_node - without.host_bytes_per_node == pytest.approx(more, rel=1e-3)
    assert without.phases.keys() ^ memory.phases.keys() == {"save"}
    gathered = 2 * 4 * 128256 * 4096 if save == "full" else 0  # DTensor copies what it gathered
    assert memory.phases["save"] == pytest.approx(8 * 1.5 * PSI / 8 + gathered, rel=0.01)
