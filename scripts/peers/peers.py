"""Asks other tools about the cases of the accuracy report and keeps what they say in `memory_peers.csv`.

    python -m scripts.peers.peers                              # what has no answer yet
    python -m scripts.peers.peers --llm-analysis PYTHON        # also llm-analysis, in an interpreter that has it
    python -m scripts.peers.peers --trackers --minutes 9       # also torch's trackers, which run whole steps
    python -m scripts.peers.peers --again                      # everything anew

Each tool gets its best case: what it does not claim to answer is no answer, with the reason.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import os
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from hardware_db.files import replace_text
from planner.types.job import Job
from scripts.report.accuracy_cases import Case, all_cases
from scripts.report.accuracy_peers import PATH, PEERS, PeerAnswer, read_peers

LLM_ANALYSIS = Path(__file__).resolve().parent / "llm_analysis.py"
ADAM = ("adamw", "adamw-fused", "adamw-forloop")
ZERO_OF = {"single": 0, "ddp": 0, "zero1": 1, "zero2": 2, "fsdp-grad-op": 2, "zero3": 3, "fsdp": 3, "hsdp": 3}
RECOMPUTE = {"none": 0, "selective": 1, "full": 2}


class NoAnswer(Exception):
    """The reason for which a tool says nothing."""


def main() -> None:
    """Ask the peers about all cases and write their answers."""
    arguments = _arguments()
    cases = [case for case in all_cases() if case.measured]
    kept = {} if arguments.again else {(answer.case, answer.peer): answer for answer in read_peers()}
    answers = {**kept, **{(item.case, item.peer): item for item in _arithmetic(cases)}}
    if arguments.llm_analysis:
        answers |= {(item.case, item.peer): item for item in _llm_analysis(cases, arguments.llm_analysis)}
    if arguments.trackers:
        for item in _trackers(cases, answers, time.monotonic() + 60 * arguments.minutes):
            answers[item.case, item.peer] = item
            _write(cases, answers.values())
    _write(cases, answers.values())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llm-analysis", metavar="PYTHON", help="an interpreter that can import llm_analysis")
    parser.add_argument("--trackers", action="store_true", help="run torch's MemTracker and FSDPMemTracker")
    parser.add_argument("--minutes", type=float, default=9.0, help="begin no trace after this many minutes")
    parser.add_argument("--again", action="store_true", help="forget the answers that there are")
    return parser.parse_args()


def _write(cases: Iterable[Case], answers: Iterable[PeerAnswer]) -> None:
    """Answers in the order of the cases; those of cases that are gone go too."""
    order = {case.name: position for position, case in enumerate(cases)}
    kept = sorted(
        (item for item in answers if item.case in order),
        key=lambda item: (list(PEERS).index(item.peer), order[item.case]),
    )
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=["case", "peer", "version", "bytes", "reason"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(item) for item in kept)
    replace_text(PATH, text.getvalue())


def _arithmetic(cases: Sequence[Case]) -> Iterable[PeerAnswer]:
    """Return the tools whose arithmetic is a function call."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for peer, ask in {"accelerate": _accelerate, "deepspeed": _deepspeed}.items():
        for case in cases:
            yield _answer(case, peer, version(peer), ask)


def _answer(case: Case, peer: str, release: str, ask: Any) -> PeerAnswer:
    try:
        return PeerAnswer(case=case.name, peer=peer, version=release, bytes=ask(case.job), reason="")
    except NoAnswer as error:
        return PeerAnswer(case=case.name, peer=peer, version=release, bytes=0, reason=str(error))


def _accelerate(job: Job) -> int:
    """`accelerate estimate-memory`: training with Adam, one device, one sample."""
    chosen = job.configuration
    if chosen.strategy not in ("single", "ddp") or chosen.world_size != chosen.dims.data_parallel:
        raise NoAnswer("knows no sharding")
    if chosen.optimizer not in ADAM:
        raise NoAnswer("knows Adam only")
    dtype = "float32" if chosen.precision == "fp32" else "bfloat16"
    estimate = import_module("accelerate.commands.estimate")
    return int(max(estimate.estimate_training_usage(4 * job.counts.total, dtype).values()))


def _deepspeed(job: Job) -> int:
    """DeepSpeed's `estimate_zero2_model_states_mem_needs` and the same of stage 3: model states of mixed precision."""
    chosen, cluster = job.configuration, job.cluster
    if chosen.zero_stage < 2:
        raise NoAnswer("estimates stages 2 and 3 only")
    if chosen.precision not in ("bf16", "fp16"):
        raise NoAnswer("assumes 16-bit weights with fp32 copies")
    if chosen.optimizer not in ADAM or chosen.tp * chosen.pp > 1 or chosen.offload == "nvme":
        raise NoAnswer("assumes Adam, data parallel only, and no NVMe")
    places = {"num_gpus_per_node": cluster.gpus_per_node, "num_nodes": cluster.nodes}
    offloads = chosen.offload != "none"
    if chosen.zero_stage == 2:
        module = import_module("deepspeed.runtime.zero.stage_1_and_2")
        needs = module.estimate_zero2_model_states_mem_needs(job.counts.total, cpu_offload=offloads, **places)
        return int(needs[1])
    largest = max(job.counts.largest_block, job.facts.vocab_size * job.facts.hidden_size)
    needs = import_module("deepspeed.runtime.zero.stage3").estimate_zero3_model_states_mem_needs(
        job.counts.total, largest, cpu_offload=offloads, cpu_offload_params=chosen.offload == "all", **places
    )
    return int(needs[1])


def _llm_analysis(cases: Sequence[Case], interpreter: str) -> Iterable[PeerAnswer]:
    """One run of the other interpreter for all cases."""
    answerable: list[tuple[Case, dict[str, Any]]] = []
    refused: list[tuple[Case, str]] = []
    for case in cases:
        try:
            answerable.append((case, _question(case.job)))
        except NoAnswer as error:
            refused.append((case, str(error)))
    process = subprocess.run(
        [interpreter, "-I", LLM_ANALYSIS],
        input=json.dumps([question for _, question in answerable]),
        capture_output=True,
        text=True,
        check=True,
    )
    reply = json.loads(process.stdout)
    for (case, _), answer in zip(answerable, reply["answers"], strict=True):
        yield _build_answer(case, reply["version"], answer.get("bytes", 0), answer.get("reason", ""))
    for case, reason in refused:
        yield _build_answer(case, reply["version"], 0, reason)


def _build_answer(case: Case, release: str, predicted: int, reason: str) -> PeerAnswer:
    return PeerAnswer(case=case.name, peer="llm-analysis", version=release, bytes=predicted, reason=reason)


def _question(job: Job) -> dict[str, Any]:
    """Put a case in llm-analysis's words."""
    facts, chosen = job.facts, job.configuration
    if facts.kind != "decoder":
        raise NoAnswer("knows decoders only")
    if chosen.optimizer not in ADAM or chosen.offload != "none":
        raise NoAnswer("assumes Adam, and knows no offload")
    if chosen.precision == "fp32":
        raise NoAnswer("knows 4, 8 and 16 bits")
    width = facts.moe_intermediate_size or facts.intermediate_size
    return {
        "model": {
            "name": facts.name,
            "num_layers": facts.num_layers,
            "n_head": facts.num_heads,
            "hidden_dim": facts.hidden_size,
            "vocab_size": facts.vocab_size,
            "max_seq_len": chosen.sequence_length,
            "num_key_value_heads": facts.num_kv_heads,
            "ffn_embed_dim": width,
            "expansion_ratio": width / facts.hidden_size,
            "moe_num_experts": max(facts.num_experts, 1),
            "moe_top_k": max(facts.experts_per_token, 1),
        },
        "dtype": {"name": "w16a16e16"},
        "parallelism": {"tp_size": chosen.tp, "pp_size": chosen.pp, "dp_size": chosen.dims.data_parallel, "sp_size": 1},
        "training": {
            "batch_size_per_gpu": chosen.micro_batch_size,
            "gradient_accumulation_steps": chosen.gradient_accumulation_steps,
            "seq_len": chosen.sequence_length,
            "activation_recomputation": RECOMPUTE[chosen.activation_checkpointing],
            "ds_zero": ZERO_OF[chosen.strategy],
            "flash_attn": not job.eager_attention,
            "softmax_dropout": facts.attention_dropout > 0,
            "mlp_gated_linear_units": facts.gated_mlp,
        },
    }


def _trackers(cases: Sequence[Case], kept: dict[tuple[str, str], PeerAnswer], deadline: float) -> Iterable[PeerAnswer]:
    """Torch's trackers on what has no answer yet, shallow models first, while there is time."""
    for case in sorted(cases, key=_depth):
        if (case.name, "torch") not in kept and time.monotonic() < deadline:
            yield _answer(case, "torch", version("torch"), lambda job, case=case: _track(case, job))


def _depth(case: Case) -> int:
    """Blocks that two steps pass through: what a trace takes its time for."""
    return case.job.facts.total_layers * case.job.configuration.gradient_accumulation_steps


def _track(case: Case, job: Job) -> int:
    chosen = job.configuration
    if case.code != "transformers":
        raise NoAnswer("the code that ran is not installed")
    if chosen.strategy not in ("single", "fsdp"):
        raise NoAnswer("tracks one device and FSDP2 only")
    if chosen.optimizer not in (*ADAM, "sgd") or chosen.offload != "none" or chosen.precision == "fp16":
        raise NoAnswer("not set up: fp16, offload, or an optimizer that torch has not")
    if chosen.activation_checkpointing == "selective":
        raise NoAnswer("not set up: selective checkpointing")
    try:
        return int(import_module("peer_trackers").tracked_bytes(job))
    except (
        RuntimeError,
        NotImplementedError,
        AttributeError,
        KeyError,
        AssertionError,
        TypeError,
        ValueError,
    ) as error:
        raise NoAnswer(f"fails: {type(error).__name__}: {(str(error) or 'no message').splitlines()[0][:160]}") from None


if __name__ == "__main__":
    main()
