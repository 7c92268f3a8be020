"""Models that are cut into pipeline stages train as one process does; what cannot be cut, or would hang, is refused."""

from __future__ import annotations

import copy
import importlib
import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch
from torch import nn

from dsplan.diagnostics.bench.rank_pool import RankPool
from planner.cost.split import micro_batches_in_flight
from planner.vocabulary import Schedule
from strategies.errors import CannotRun
from strategies.parallel.model import Partition, SplitOptions
from strategies.parallel.pipeline import Action, _StageOutput, order_of, require_end, with_messages
from strategies.parallel.split import ModelParts, even_split, hold_part, stand_in
from strategies.parallel.stages import Stages, cut_stages, stages_of, without_elsewhere
from tests.strategies import parallel_bodies
from tests.strategies.parallel_bodies import VOCABULARY, Composition, Difference, Kind, batch_of

PP = Composition(pp=2, accumulation=4, clipping=0.5)
INTERLEAVED = replace(PP, schedule="interleaved", virtual_stages=2)
UNEVEN = replace(PP, layers="1x3,1x1")


def _worst(differences: list[Difference]) -> Difference:
    return max(differences, key=lambda difference: max(difference.loss, difference.parameter))


# Over ranks, against one process.


@pytest.mark.parametrize(
    ("kind", "composition"),
    [
        ("gpt2", PP),
        ("numbered", PP),
        ("llama", replace(INTERLEAVED, checkpointing="selective")),
        ("mixtral", replace(PP, schedule="gpipe", checkpointing="full")),
        ("gpt", replace(PP, schedule="zero-bubble")),
        ("gpt2", replace(PP, precision="bf16")),
        ("llama", replace(PP, strategy="zero1", precision="bf16")),
    ],
)
@pytest.mark.sweep(every=8)
def test_two_stages_train_as_one_process(ranks: RankPool, kind: Kind, composition: Composition) -> None:
    worst = _worst(ranks.run(parallel_bodies.train, kind, composition))
    assert max(worst.loss, worst.parameter) < (2e-2 if composition.precision == "bf16" else 1e-5), worst
    assert composition.precision == "bf16" or worst.norm < 1e-5
    assert worst.share < 0.6


@pytest.mark.parametrize("strategy", ["ddp", "zero1"])
@pytest.mark.sweep(suite=lambda strategy: strategy == "ddp")
def test_stages_of_unlike_numbers_of_blocks_train_as_one_process(four_ranks: RankPool, strategy: str) -> None:
    """Three of the four blocks are on the first stage; the table and the head are one weight on both."""
    degrees = {"dp_replicate": 2} if strategy == "ddp" else {"dp_shard": 2}
    each = four_ranks.run(parallel_bodies.train, "qwen3", replace(UNEVEN, strategy=strategy, **degrees))
    worst = _worst(each)
    assert max(worst.loss, worst.parameter, worst.norm) < 1e-5, worst
    assert min(rank.share for rank in each) < 0.6 < max(rank.share for rank in each)


@pytest.mark.slow
def test_stages_of_one_rank_hand_on_split_sequences(four_ranks: RankPool) -> None:
    composition = replace(INTERLEAVED, tp=2, sequence_parallel=True, steps=2)
    worst = _worst(four_ranks.run(parallel_bodies.train, "llama", composition))
    assert max(worst.loss, worst.parameter, worst.norm) < 1e-5, worst


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "gpt"])
@pytest.mark.parametrize(
    "composition",
    [
        replace(PP, strategy="fsdp", dp_shard=2),
        replace(PP, strategy="fsdp", dp_shard=2, checkpointing="selective"),
        replace(INTERLEAVED, strategy="fsdp", dp_shard=2, checkpointing="full"),
        replace(PP, strategy="fsdp", dp_shard=2, precision="bf16"),
        replace(PP, strategy="fsdp-grad-op", dp_shard=2),
        replace(PP, strategy="hsdp", dp_replicate=2),
        replace(PP, strategy="zero1", dp_shard=2),
        replace(INTERLEAVED, strategy="zero2", dp_shard=2),
        replace(PP, strategy="zero2", dp_shard=2, schedule="zero-bubble"),
        replace(INTERLEAVED, dp_replicate=2),
        replace(PP, pp=4, accumulation=8),
        replace(PP, pp=4, accumulation=2),
        replace(PP, pp=4, accumulation=8, schedule="zero-bubble"),
        replace(PP, tp=2),
        replace(UNEVEN, strategy="fsdp", dp_shard=2, checkpointing="full"),
        replace(UNEVEN, strategy="zero1", dp_shard=2),
    ],
)
def test_four_ranks_train_as_one_process(four_ranks: RankPool, kind: Kind, composition: Composition) -> None:
    worst = _worst(four_ranks.run(parallel_bodies.train, kind, composition))
    assert max(worst.loss, worst.parameter) < (2e-2 if composition.precision == "bf16" else 1e-5), worst


def test_evaluation_and_what_is_refused(ranks: RankPool) -> None:
    for answer in ranks.run(parallel_bodies.evaluated_in_stages, PP):
        assert abs(answer.loss - answer.expected) < 1e-6
        assert answer.is_training
        assert "call engine.train_batch(batch)" in answer.called
        assert "the batch has 3 samples, and this rank's share of a step is 4 micro-batches of 2" in answer.short
        assert answer.stale == 0  # elements of other stages' weights that somebody still holds
        assert answer.groups == 2


def test_a_step_of_stages_is_one_call_that_all_ranks_make_alike(four_ranks: RankPool) -> None:
    calls = four_ranks.run(parallel_bodies.meetings_of_a_step, replace(PP, strategy="fsdp", dp_shard=2, accumulation=2))
    assert calls == 4 * [[("train_batch", 1), ("step", 2), ("eval_batch", 3)]]


def test_what_a_rank_has_done_before_does_not_count(ranks: RankPool) -> None:
    compositions = [Composition(strategy=name, dp_shard=2, steps=2) for name in ("fsdp", "zero3")]
    for differences in ranks.run(parallel_bodies.train_after_other_meetings, "gpt", compositions):
        assert max(max(each.loss, each.parameter) for each in differences) < 1e-5


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero2"])
@pytest.mark.sweep(every=2)
def test_train_batch_is_the_loop_of_calls(ranks: RankPool, strategy: str) -> None:
    parts = {"dp_replicate": 2} if strategy == "ddp" else {"dp_shard": 2}
    for losses in ranks.run(
        parallel_bodies.train_batch_and_loop, Composition(strategy=strategy, accumulation=2, **parts)
    ):
        assert losses[0] == pytest.approx(losses[1], abs=1e-6)
        assert losses[2] == 3


# Schedules, without a rank.


def _lies_on(ranks: int) -> Callable[[int], int]:
    return lambda stage: stage % ranks


@pytest.mark.parametrize(("ranks", "micro_batches"), [*itertools.product((2, 3, 4, 8), (1, 2, 8, 16, 24))])
@pytest.mark.parametrize("schedule", get_args(Schedule))
@pytest.mark.sweep(every=3)
def test_schedules_end(schedule: Schedule, ranks: int, micro_batches: int) -> None:
    virtual = 2 if schedule == "interleaved" else 1
    if schedule in ("interleaved", "zero-bubble") and micro_batches % ranks:
        pytest.skip("the table of what does not go together refuses it")
    order = order_of(schedule, ranks=ranks, virtual_stages=virtual, micro_batches=micro_batches)
    complete = with_messages(order, _lies_on(ranks), ranks * virtual)
    require_end(complete, _lies_on(ranks), ranks * virtual)
    for rank, actions in order.items():
        forward = [action for action in actions if action.kind == "forward"]
        assert sorted(forward) == sorted(
            Action("forward", stage, index)
            for stage in range(rank, ranks * virtual, ranks)
            for index in range(micro_batches)
        )


@pytest.mark.parametrize("schedule", get_args(Schedule))
def test_no_more_micro_batches_are_held_than_the_estimate_counts(schedule: Schedule) -> None:
    virtual = 2 if schedule == "interleaved" else 1
    composition = replace(PP, pp=4, accumulation=8, schedule=schedule, virtual_stages=virtual)
    order = order_of(schedule, ranks=4, virtual_stages=virtual, micro_batches=8)
    for rank, actions in order.items():
        held = most = 0
        for action in actions:
            held += {"forward": 1, "backward": -1, "backward_input": -1}.get(action.kind, 0)
            most = max(most, held)
        assert most / virtual == micro_batches_in_flight(composition.plan().configuration, rank)


def test_a_schedule_that_never_ends_is_found() -> None:
    order = with_messages(order_of("1f1b", ranks=2, virtual_stages=1, micro_batches=2), _lies_on(2), 2)
    index = order[1].index(Action("receive_forward", 1, 1))
    order[1][index - 1], order[1][index] = order[1][index], order[1][index - 1]
    sends = [index for index, action in enumerate(order[0]) if action.kind == "send_forward"]
    order[0][sends[0]], order[0][sends[1]] = order[0][sends[1]], order[0][sends[0]]
    with pytest.raises(CannotRun, match="rank 0 of the pipeline waits for ever at send_forward of stage 0"):
        require_end(order, _lies_on(2), 2)
    with pytest.raises(CannotRun, match="rank 1 of the pipeline waits for ever for backward of stage 1, micro-batch 5"):
        with_messages({0: [], 1: [Action("backward", 1, 5)]}, _lies_on(2), 2)


# Cuts, without a rank.


def cut(
    model: nn.Module, rank: int, ranks: int = 2, partition: Partition = "uniform", layers: str = ""
) -> tuple[Stages, ModelParts]:
    """This rank's stages of a model, as a job of `ranks` would leave them."""
    mesh: Any = SimpleNamespace(rank=lambda _: rank, environment=SimpleNamespace(device=torch.device("cpu")))
    configuration = Composition(pp=ranks, accumulation=ranks, layers=layers).plan().configuration
    parts = ModelParts()
    cut_stages(model, mesh, SplitOptions(configuration=configuration, partition=partition), parts)
    stages = stages_of(model)
    assert stages is not None
    return stages, parts


SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
HEADS = {**SIZES, "num_attention_heads": 4}
FEW_KEYS = {**HEADS, "num_key_value_heads": 2}
OLD = {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "Gemma3ForCausalLM/Gemma3TextConfig": {**FEW_KEYS, "head_dim": 8, "sliding_window": 8},
    "OPTForCausalLM/OPTConfig": {**HEADS, "ffn_dim": 48, "word_embed_proj_dim": 16, "dropout": 0.0},
    "MistralForCausalLM/MistralConfig": FEW_KEYS,
    "Qwen2ForCausalLM/Qwen2Config": FEW_KEYS,
    "Qwen2MoeForCausalLM/Qwen2MoeConfig": {**FEW_KEYS, "num_experts": 4, "moe_intermediate_size": 16},
    "GPTNeoXForCausalLM/GPTNeoXConfig": HEADS,
    "GemmaForCausalLM/GemmaConfig": {**FEW_KEYS, "head_dim": 8},
    "PhiForCausalLM/PhiConfig": {**HEADS, "resid_pdrop": 0.0},
    "FalconForCausalLM/FalconConfig": HEADS,
    "GPTJForCausalLM/GPTJConfig": {**OLD, "rotary_dim": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "BloomForCausalLM/BloomConfig": {**OLD, "hidden_size": 32},
    "BertForMaskedLM/BertConfig": {**HEADS, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
}


@pytest.mark.parametrize(
    "family", [name if name[0] in "O" else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES]
)
def test_stages_are_the_whole_model(family: str) -> None:
    """Losses and gradients of two stages one after the other are those of the model, in this process."""
    transformers: Any = importlib.import_module("transformers")
    kind, config = (getattr(transformers, name) for name in family.split("/"))
    torch.manual_seed(5)
    model = kind(config(**FAMILIES[family], use_cache=False))
    batch = {name: ids[:2] for name, ids in batch_of(0).items()}
    expected = model(**batch).loss
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    first, last = (copy.deepcopy(model) for _ in range(2))
    for member in (first, last):
        member.zero_grad()
    stages, noted = zip(cut(first, 0), cut(last, 1), strict=True)
    with stages[0].running(0, None):
        hidden = first(**batch)
    assert stages[1].received_by(1).shape(((), batch)) == tuple(hidden.shape)
    received = hidden.detach().requires_grad_()
    with stages[1].running(1, received):
        loss = last(**batch).loss
    loss.backward()
    hidden.backward(received.grad)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    summed: dict[str, torch.Tensor] = {}
    for member, parts in zip((first, last), noted, strict=True):
        for name, parameter in member.named_parameters():
            if parameter.grad is not None:
                whole = parts.shared.get(name, name)
                summed[whole] = summed.get(whole, torch.zeros(())) + parameter.grad
    assert summed.keys() == gradients.keys()
    assert max((summed[name] - gradient).abs().max().item() for name, gradient in gradients.items()) < 1e-6


class Plain(nn.Module):
    """Token table, four blocks and a head; `trait` is what a pipeline cannot cut."""

    def __init__(self, trait: str = "", head: int = VOCABULARY) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 8)
        self.blocks = nn.ModuleList([nn.ModuleDict({"up": nn.Linear(8, 8)}) for _ in range(4)])
        for block in self.blocks:
            block.forward = lambda x, extra=None, block=block: x + block["up"](x) + (0 if extra is None else extra)
        self.head = nn.Linear(8, head, bias=False)
        self.trait = trait
        if trait == "shares":
            self.blocks[1]["up"].weight = self.blocks[0]["up"].weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        table = self.tokens(ids)
        x = table
        for block in self.blocks:
            x = block(x, table) if self.trait == "takes" else block(x)
            x = x * 2 if self.trait == "between" else x
        x = x + table if self.trait == "skips" else x
        weight = self.tokens.weight if self.trait == "table" else self.head.weight
        return nn.functional.linear(x, weight).square().mean()


@pytest.mark.parametrize(
    ("trait", "words"),
    [
        ("takes", "take 1 beside hidden states, which is made from weights"),
        ("between", "changes hidden states between its blocks"),
        ("skips", "uses after its blocks what it computed before them"),
        ("table", "uses tokens.weight before its blocks and after them; give the head a layer of its own"),
        ("shares", "blocks of Plain share weights"),
    ],
)
def test_what_cannot_be_cut_is_refused(trait: str, words: str) -> None:
    with pytest.raises(CannotRun, match=words) as refusal:
        cut(Plain(trait), 1)
    assert "\n" not in str(refusal.value)


def test_too_few_blocks_and_no_stack_are_refused() -> None:
    with pytest.raises(CannotRun, match="Plain has 4 blocks, and the pipeline has 8 stages"):
        cut(Plain(), 0, ranks=8)
    with pytest.raises(CannotRun, match="put its blocks in a ModuleList"):
        cut(nn.Linear(2, 2), 0)


@pytest.mark.parametrize(
    ("partition", "head", "blocks"),
    [("uniform", 300, 2), ("parameters", 300, 3), ("parameters", VOCABULARY, 2), ("seconds", VOCABULARY, 3)],
)
def test_a_large_head_takes_blocks_from_the_last_stage(partition: Partition, head: int, blocks: int) -> None:
    """A table as large as the head weighs as much in parameters, and takes no time."""
    stages, parts = cut(Plain(head=head), 0, partition=partition)
    assert (len(stages.ranges[0]), parts.blocks) == (blocks, (range(blocks),))


def test_the_plan_names_the_blocks_of_each_stage() -> None:
    for rank, blocks in ((0, range(3)), (1, range(3, 4))):
        stages, parts = cut(Plain(), rank, layers="3,1")
        assert parts.blocks == (blocks,)
        assert stages.ranges[rank] == blocks


@pytest.mark.parametrize(
    ("layers", "partition", "words"),
    [
        ("3,2", "uniform", "layers_per_stage 3,2 are 5 blocks, and Plain has 4; name each of them once"),
        ("3,1", "parameters", "the plan gives stages 3,1 blocks, and pipeline.partition of the config is parameters"),
    ],
)
def test_other_blocks_than_the_model_has_are_refused(layers: str, partition: Partition, words: str) -> None:
    with pytest.raises(CannotRun, match=words):
        cut(Plain(), 0, layers=layers, partition=partition)


def test_optimizers_lose_what_other_stages_have() -> None:
    model = Plain()
    optimizer = torch.optim.AdamW([{"params": [model.head.weight]}, {"params": list(model.blocks.parameters())}])
    given = [("head", model.head.weight), *model.blocks.named_parameters()]
    cut(model, 0)
    without_elsewhere(model, optimizer)
    assert [len(group["params"]) for group in optimizer.param_groups] == [0, 4]
    assert [name for name, _ in without_elsewhere(model, given)] == [
        "0.up.weight",
        "0.up.bias",
        "1.up.weight",
        "1.up.bias",
    ]


def test_a_stage_lets_go_of_what_it_has_sent_and_can_still_go_back() -> None:
    weight = torch.full((3,), 2.0, requires_grad=True)
    output = _StageOutput(weight * weight)
    memory = weakref.ref(output.values.untyped_storage())
    output.is_sent()
    assert memory() is None
    torch.autograd.backward(output.root, torch.ones(3))
    assert weight.grad is not None
    assert weight.grad.tolist() == [4.0, 4.0, 4.0]


def test_part_of_a_weight_that_another_stage_has_takes_no_memory() -> None:
    weight = stand_in((4096, 8), torch.float32, torch.device("cpu"))
    hold_part(weight, even_split(weight.shape, 0, rank=1, ranks=2))
    assert weight.shape == (2048, 8)
    assert weight.untyped_storage().nbytes() == 4
