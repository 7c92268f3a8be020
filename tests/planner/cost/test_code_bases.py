"""Code that runs decides memory and time: the catalogue, a file of one's own, what follows from their traits."""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import dsplan
from hardware_db.errors import BrokenFile, UnknownName
from planner.cluster.resolve import HardwareRequest, resolve_cluster
from planner.cost.code_bases import code_base, code_names
from planner.cost.memory.activations.blocks import code_blocks
from planner.emit import emit
from planner.errors import ContradictoryRequest
from planner.models.catalogue import find_model
from planner.search.estimate import estimate
from planner.search.exact import ExactOptions, exact
from planner.search.request import Request, WorkOptions, make_request
from planner.search.search import recommend
from planner.types.plan import Plan
from scripts.fit.published_memory import predicted_bytes, published_runs


def ask(model: str = "llama-3-8b", gpus: int = 8, **options: Any) -> Request:
    work = {"seq_len": 4096, "precision": "bf16", **options}
    return make_request(find_model(model), resolve_cluster(HardwareRequest(gpu="H100", gpus=gpus)), WorkOptions(**work))


def planned(request: Request, **exactly: Any) -> Plan:
    return estimate(*exact(request, ExactOptions(**exactly)))


def test_the_documented_code_bases_are_known_and_each_trait_has_a_source() -> None:
    documented = ("transformers", "torch", "torchtitan", "megatron", "megatron-deepspeed", "nemo", "llm-foundry")
    others = ("nanotron", "litgpt", "litgpt-2024", "internevo", "alpa", "automodel", "transformers-2024")
    assert {*documented, *others} <= {*code_names()}
    plain = code_base("transformers")
    for name in code_names():
        code = code_base(name)
        assert code.sources, name
        for group in ("block", "loss", "time"):
            if getattr(code.eager, group) != getattr(plain.eager, group):
                assert {group, "selective_products", "saved_score_bytes"} & code.sources.keys(), (name, group)
        for group in ("states", "accumulator", "loads"):
            if getattr(code, group) != getattr(plain, group) and group != "loads":
                assert group in code.sources, (name, group)


def test_an_unknown_code_is_told_the_known_ones() -> None:
    with pytest.raises(UnknownName, match=r"unknown code 'megatorn'; nearest: megatron.*known are transformers, torch"):
        ask(code="megatorn")


def test_a_block_of_gpt_in_megatron_keeps_what_its_authors_count() -> None:
    """34 bytes per token and hidden unit, 5 per score (Korthikanti et al. 2022, section 4.1), and norms' statistics."""
    facts = replace(find_model("gpt2"), hidden_dropout=0.1, attention_dropout=0.1)
    block = code_base("megatron-deepspeed").eager.block
    assert block is not None
    kept = dict(code_blocks(facts, block, "pure", "eager")["block"].kept)
    assert kept.pop("a b s s") == 5
    assert kept.pop("b s") == 2 * 8  # a mean and a scale for each of two norms, in fp32
    sizes = {"b h s": 1, "a b d s": 1, "b d g s": 1, "b f s": 4}  # heads are as wide as the stream, the MLP four times
    assert sum(sizes[term] * size for term, size in kept.items()) == 34


def test_a_block_of_llama_in_transformer_engine() -> None:
    """Of width h what goes into two norms and two products; q and k rotated and v copied, which frees the product that
    they were views of (`get_qkv_layout`), and attention's output; gate and up, what goes down: all in two bytes."""
    block = code_base("megatron").eager.block
    assert block is not None
    kept = code_blocks(find_model("llama-3-8b"), block, "pure", "flash")["block"].kept
    assert kept == {"b h s": 8, "b s": 8, "a b d s": 2 + 2, "b d g s": 2 + 2, "a b s": 4, "b f s": 6}


def dropped(model: str, kind: str, *modules: str) -> dict[str, float]:
    """Bytes that a block of Transformer Engine's keeps no more when modules of it are recomputed."""
    block = code_base("nemo").eager.block
    assert block is not None
    form = code_blocks(find_model(model), block, "pure", "flash", recomputed=modules)[kind]
    left = {term: form.kept[term] - form.products.get(term, 0) for term in form.kept}
    return {term: size for term, size in left.items() if size and term != "b h s"} | {
        "b h s": left["b h s"] - form.boundary["b h s"]
    }


def test_what_recomputed_modules_drop() -> None:
    """By the list of `recompute_modules` in Megatron-Core's transformer_config.py, in two bytes."""
    assert dropped("deepseek-v3", "expert", "moe_act") == {"b k m s": 2, "b h s": 0}
    assert dropped("deepseek-v3", "expert", "shared_experts") == {"b s x": 6, "b h s": 0}
    assert dropped("deepseek-v3", "expert", "layernorm") == {"b h s": 4}
    assert dropped("deepseek-v3", "dense", "layernorm") == {"b h s": 2}, "a dense MLP's norm is in its first product"
    assert dropped("deepseek-v3", "dense", "mlp") == {"b f s": 6, "b h s": 2}
    assert dropped("deepseek-v3", "expert", "mlp") == {"b h s": 0}
    latent = {"a b n s": 4, "a b o s": 4, "a b s v": 2, "b ql s": 2, "b kl s": 2, "b h s": 0}
    assert dropped("deepseek-v3", "expert", "mla_up_proj") == latent
    assert dropped("llama-3-8b", "block", "mla_up_proj", "layernorm", "moe") == {"b h s": 0}, "it has none of them"
    whole = dropped("deepseek-v3", "expert", "moe")
    assert (whole["b k m s"], whole["b s x"]) == (6, 6), "the experts inside, and the shared one"


def test_recomputed_modules_cost_memory_and_time_in_turn() -> None:
    options = {"model": "deepseek-v3", "gpus": 256, "gpu": "B200-SXM-180GB", "code": "nemo", "strategy": "zero1"}
    options |= {"pp": 16, "ep": 8, "micro_batch": 1, "grad_accum": 128, "seq_len": 4096, "attention": "flash"}
    options |= {"precision": "fp8", "fp8_recipe": "mxfp8"}
    none = dsplan.estimate(**options)
    plans = [
        dsplan.estimate(**options, checkpointing="selective", recompute_modules=modules)
        for modules in ("moe_act", "moe_act,layernorm", "moe_act,layernorm,mla_up_proj")
    ]
    for less, more in zip([none, *plans[:-1]], plans, strict=True):
        assert more.memory.activations_bytes < less.memory.activations_bytes
        assert more.time.step_seconds > less.time.step_seconds
    assert plans[-1].time.step_seconds < dsplan.estimate(**options, checkpointing="full").time.step_seconds


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"code": "torchtitan"}, "has no list of modules to recompute"),
        ({"checkpointing": "full"}, "parts of selective checkpointing; choose selective"),
        ({"recompute_modules": "moe_acts"}, "moe_acts.: use some of core_attn, layernorm"),
    ],
)
def test_modules_that_cannot_be_recomputed(options: dict[str, Any], why: str) -> None:
    asked_for = {"code": "nemo", "checkpointing": "selective", "recompute_modules": "moe_act", **options}
    with pytest.raises(ContradictoryRequest, match=why):
        dsplan.estimate(model="llama-3-8b", gpus=8, gpu="H100-SXM5-80GB", **asked_for)


@pytest.mark.parametrize(("strategy", "bytes_per_parameter"), [("ddp", 18), ("zero1", 6 + 12 / 8)])
def test_megatron_holds_what_its_documentation_says(strategy: Any, bytes_per_parameter: float) -> None:
    plan = planned(ask("opt-1.3b", seq_len=512, code="megatron"), strategy=strategy, checkpointing="full")
    held = plan.memory.states
    per_parameter = sum(held.values()) / plan.model["parameters"]  # type: ignore[operator]
    assert per_parameter == pytest.approx(bytes_per_parameter, rel=1e-3)


def test_code_changes_memory_and_time() -> None:
    plans = {
        code: planned(ask(code=code, compile=compiled), strategy="fsdp", micro_batch=1)
        for code, compiled in (("transformers", False), ("torch", False), ("torchtitan", True))
    }
    used = [plan.memory.peak_allocated_bytes for plan in plans.values()]
    took = [plan.time.compute_seconds for plan in plans.values()]
    assert used == sorted(used, reverse=True)
    assert took == sorted(took, reverse=True)
    assert used[0] > 1.25 * used[2]


@pytest.mark.parametrize("loss", ["chunked", "fused"])
def test_a_loss_without_all_logits_at_once_saves_their_copies(loss: Any) -> None:
    plain, other = (planned(ask(loss=kind), strategy="fsdp", micro_batch=2) for kind in ("plain", loss))
    logits = 2 * 4096 * 128256
    saved = plain.memory.phases["loss"] - other.memory.phases["loss"]
    assert 5 * logits < saved < 12 * logits
    assert other.memory.phases["step"] == plain.memory.phases["step"]


def test_what_dsplan_does_not_run_names_the_tool_that_does() -> None:
    plan = planned(ask(code="megatron"), strategy="zero1", tp=4)
    assert not plan.runnable
    assert plan.notes[0].startswith("Megatron-LM runs the code megatron; dsplan run runs transformers' modules")
    assert plan.configuration.sequence_parallel
    assert not planned(ask(), strategy="zero1", tp=4).configuration.sequence_parallel
    answer = recommend(ask(code="torchtitan"))
    assert {plan.configuration.strategy for plan in answer.plans} <= {"fsdp", "fsdp-grad-op", "ddp"}
    assert ("zero3", "torchtitan has no zero3") in {(item.strategy, item.reason) for item in answer.rejected}


def test_what_is_not_counted_as_its_own_is_said() -> None:
    of_encoder = planned(ask("google-bert/bert-base-uncased", seq_len=512, code="megatron"), strategy="ddp")
    assert any(note.startswith("only plain decoders' blocks are known of megatron") for note in of_encoder.notes)
    compiled = planned(ask("google-bert/bert-base-uncased", seq_len=512, compile=True), strategy="ddp")
    assert any("take eager ones' memory" in note for note in compiled.notes)
    fused = planned(ask(code="nemo", compile=True), strategy="ddp")
    assert any(note.startswith("--compile changes nothing that is known of nemo") for note in fused.notes)


@pytest.mark.parametrize(
    ("code", "exactly", "reason"),
    [
        ("nanotron", {"strategy": "zero1", "offload": "optimizer"}, "nanotron has no offload optimizer; it has none"),
        ("nanotron", {"strategy": "ddp", "checkpointing": "selective"}, "nanotron has no checkpointing selective"),
        ("llm-foundry", {"strategy": "fsdp", "pp": 2}, "has no pp; use pp 1 or another --code"),
        ("torchtitan", {"strategy": "fsdp", "tp": 16}, "tp 16 does not divide the 8 heads of keys"),
        ("megatron", {"strategy": "ddp", "pp": 2, "pp_schedule": "zero-bubble"}, "has no schedule zero-bubble"),
    ],
)
def test_what_a_code_base_cannot_do_is_refused(code: str, exactly: dict[str, Any], reason: str) -> None:
    with pytest.raises(ContradictoryRequest, match=reason):
        planned(ask("llama-3.1-8b", gpus=16, code=code), **exactly)


@pytest.mark.parametrize("code", ["torchtitan", "megatron", "nanotron"])
def test_what_is_recommended_for_a_trainer_is_written_for_it(code: str) -> None:
    answer = recommend(replace(ask("llama-3-8b", gpus=16, code=code), top=20))
    assert len(answer.plans) > 2
    for plan in answer.plans:
        assert emit(plan, code), plan.configuration


def test_only_code_that_makes_whole_copies_has_to_stream_for_host_memory() -> None:
    """Eight copies of 70.6 billion fp32 weights do not fit a terabyte of host memory; ranks then read their parts."""
    transformers, megatron = (
        planned(ask("meta-llama/Llama-3.1-70B", gpus=64, host_memory_gb=1000, code=code), strategy="ddp", tp=8, pp=8)
        for code in ("transformers", "megatron")
    )
    streams = "a node has no room to load 8 copies of the model"
    assert any(streams in note for note in transformers.notes)
    assert not any(streams in note for note in megatron.notes)
    assert transformers.verdict == megatron.verdict == "fits"
    assert transformers.memory.host_load_bytes_per_node < megatron.memory.host_load_bytes_per_node < 50 * 2**30


def test_fsdp_in_a_pipeline_holds_a_stage_whole_until_its_last_micro_batch() -> None:
    """torchtitan's policy: no micro-batch but the last shards weights or gradients, or moves them."""
    plans = {
        (pp, steps): planned(
            ask("llama-3-8b", 16, code="torchtitan", compile=True),
            strategy="fsdp",
            pp=pp,
            micro_batch=1,
            grad_accum=steps,
        )
        for pp in (1, 2)
        for steps in (2, 8)
    }
    moved = {key: plan.time.communication_seconds for key, plan in plans.items()}
    assert moved[1, 8] == pytest.approx(4 * moved[1, 2], rel=0.01)
    assert moved[2, 8] < 1.5 * moved[2, 2]
    weights = 32 // 2 * 218_112_000  # of a stage's blocks, 2 bytes each in bf16 and so their gradients
    peaks = {key: plan.memory.peak_allocated_bytes for key, plan in plans.items()}
    assert peaks[2, 8] > 2 * 2 * weights
    assert peaks[1, 8] < peaks[2, 8]


def test_how_uneven_experts_are_is_said_by_the_user() -> None:
    """Forced balance, as published benchmarks of MoE models run, does a fifth less of the experts' products."""
    even, usual, uneven = (
        planned(ask("qwen3-30b-a3b", code="megatron", **options), strategy="zero1", ep=8, checkpointing="none")
        for options in ({"expert_imbalance": 1.0}, {}, {"expert_imbalance": 2.0})
    )
    assert even.time.compute_seconds < usual.time.compute_seconds < uneven.time.compute_seconds
    assert even.memory.peak_allocated_bytes < usual.memory.peak_allocated_bytes < uneven.memory.peak_allocated_bytes
    assert (even.workload["expert_imbalance"], usual.workload["expert_imbalance"]) == (1.0, 1.25)
    with pytest.raises(ContradictoryRequest, match="--expert-imbalance is for models with experts, which meta-llama"):
        ask(expert_imbalance=1.0)


@pytest.mark.parametrize("code", ["megatron", "nemo", "automodel"])
def test_transformer_engine_has_sinks_in_fused_attention(code: str) -> None:
    """transformers runs gpt-oss eagerly, with its scores in memory."""
    eager, fused = (ask("gpt-oss-20b", code=name).facts for name in ("transformers", code))
    assert (eager.eager_only, fused.eager_only) == (True, False)


def test_fsdp_qlora_holds_its_logits_until_the_backward_has_ended() -> None:
    """A 16-bit copy of each beside what transformers' loss keeps; and no recomputation stops early."""
    lora = {"method": "qlora", "precision": "bf16", "seq_len": 2048}
    new, old = (
        planned(ask(code=code, **lora), strategy="fsdp", checkpointing="full", micro_batch=4)
        for code in ("transformers", "transformers-2024")
    )
    logits = 4 * 2048 * 128256
    assert old.memory.phases["loss"] - new.memory.phases["loss"] == pytest.approx(2 * logits, rel=1e-3)
    assert old.time.compute_seconds > new.time.compute_seconds


def test_nemo_keeps_gradients_in_16_bit() -> None:
    megatron, nemo = (planned(ask(code=code), strategy="ddp") for code in ("megatron", "nemo"))
    assert sum(megatron.memory.states.values()) / sum(nemo.memory.states.values()) == pytest.approx(18 / 16, rel=1e-3)


def written(path: Path, text: str) -> str:
    (path / "own.yaml").write_text(text)
    return str(path / "own.yaml")


def test_a_code_base_of_ones_own(tmp_path: Path) -> None:
    own = written(tmp_path, "like: torch\nblock: {norm: fused, activation: fused}\nloads: sharded\n")
    plan = planned(ask(code=own), strategy="fsdp", micro_batch=1)
    like = planned(ask(code="torch"), strategy="fsdp", micro_batch=1)
    assert plan.memory.peak_allocated_bytes < like.memory.peak_allocated_bytes
    assert plan.workload["code"] == own


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("like: torch\nblock: {norm: fuzed}\n", "block.norm 'fuzed' is not one of composite, fused"),
        ("like: torch\ncolour: red\n", "colour is not a key; the keys are like, title, runs_with"),
        ("like: [1]\n", "is like .1., which is none of transformers, torch"),
        ("title: mine\n", "has no `like: NAME` and not all of title, runs_with and loads"),
        ("like: megatron\nstates: {bf16: {weight: 2}}\n", r"states.*is missing"),
        ("- torch\n", "is not a mapping of traits"),
    ],
)
def test_a_file_that_says_nonsense_is_refused_in_one_line(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(BrokenFile, match=problem) as refused:
        code_base(written(tmp_path, text))
    assert "\n" not in str(refused.value)


def test_published_memory_by_code_base() -> None:
    """Printed figures against predictions; half of the runs of a code base are within a tenth."""
    errors = defaultdict(list)
    for run in published_runs():
        memory, _ = run.predicted()
        if run.memory_bytes:
            error = predicted_bytes(memory, run.kind) / run.memory_bytes - 1
            errors[run.request.workload.code].append(abs(error))
    medians = {code: statistics.median(of_code) for code, of_code in errors.items() if len(of_code) >= 3}
    assert {"torchtitan-2024", "megatron", "megatron-deepspeed", "litgpt"} <= medians.keys()
    assert {code: median for code, median in medians.items() if median > 0.14} == {}
    assert statistics.median(error for of_code in errors.values() for error in of_code) <= 0.08
