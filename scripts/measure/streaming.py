"""Measures how a checkpoint with the shapes of Llama-2 70B comes to 8 ranks: in parts, or whole on one rank and sent.

    python -m scripts.measure.streaming --folder DIRECTORY [--blocks 2] [--only stream-fsdp ...]

The files of all 80 blocks are written with their headers and as holes (138 GB of zeros that take no disk), as the Hub
has them: 15 of them, bf16. A model of `--blocks` of these blocks and the tables, in their true widths, is then made on
8 ranks over gloo, so that what all of them have fits one machine; a rank of the whole model would have 80 / blocks
times as much of the blocks, and beside its own parts the same. Memory is what processes have that no file backs
(anonymous pages; pages of the files are the system's cache), over what they had before, sampled every 5 ms. Beside it
stands what the planner counts. Loading whole is transformers' `from_pretrained` on rank 0, and torch's broadcast of it
into FSDP2 shards (`set_model_state_dict`, `broadcast_from_rank0`), as accelerate does it.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

import dsplan
from dsplan.diagnostics.bench.rank_pool import RankPool
from hardware_db.units import GIB
from planner.cost.memory.host import READ_BYTES
from planner.cost.memory.units import weight_bytes
from planner.cost.precision import recipe_of
from planner.models.from_hf.config import facts_from_config
from planner.search.estimate import estimate, price
from planner.search.request import Request, WorkOptions, make_request
from planner.types.plan import Configuration, Plan
from scripts.measure.machines import measured_cluster
from strategies.checkpoint.safefile import lay_out
from strategies.engine.initialize import initialize
from strategies.parallel.blocks import repeated_blocks
from strategies.telemetry.machine import ProcessMemory

RANKS = 8
SHAPE: Mapping[str, int] = {
    "vocab_size": 32_000,
    "hidden_size": 8_192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4_096,
}
"""Of meta-llama/Llama-2-70b-hf."""
FILE_BYTES = 9_800_000_000
"""Of a file at most, which makes the 15 of the Hub."""
_EVERY_SECONDS = 0.005


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A way to load, under a strategy and degrees."""

    name: str
    strategy: str
    tp: int = 1
    pp: int = 1
    narrower: int = 1
    """Widths are divided by it: tensor parallelism tries a whole block in fp32 on every rank first."""
    whole: bool = False
    """Load all of it on rank 0 and send it."""

    def plan(self, blocks: int) -> Plan:
        """Return the plan of the training."""
        return estimate(*self.question(blocks))

    def question(self, blocks: int) -> tuple[Request, Configuration]:
        """Return what the planner is asked."""
        shape = self.shape(blocks)
        facts = facts_from_config({"model_type": "llama", **shape}, f"llama-2-70b of {blocks} blocks")
        work = WorkOptions(seq_len=16, global_batch=RANKS, precision="bf16-pure", optimizer="sgd")
        request = make_request(facts, measured_cluster("cpu", RANKS), work, zero_backend="native")
        shards = RANKS // self.tp // self.pp
        return request, Configuration(
            strategy=self.strategy,  # type: ignore[arg-type]
            backend="native" if self.strategy.startswith("zero") else "torch",
            dp_shard=shards,
            tp=self.tp,
            pp=self.pp,
            micro_batch_size=1,
            gradient_accumulation_steps=RANKS // shards,
            global_batch_size=RANKS,
            sequence_length=16,
            precision="bf16-pure",
            optimizer="sgd",
        )

    def shape(self, blocks: int) -> dict[str, int]:
        """Return the config of a model of some blocks."""
        widths = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
        narrow = {name: SHAPE[name] // self.narrower for name in widths}
        return {**SHAPE, **narrow, "num_hidden_layers": blocks}


CASES = (
    Case(name="stream-fsdp", strategy="fsdp"),
    Case(name="stream-zero3", strategy="zero3"),
    Case(name="stream-fsdp-pp2", strategy="fsdp", pp=2),
    Case(name="stream-fsdp-tp2", strategy="fsdp", tp=2, narrower=4),
    Case(name="whole-fsdp", strategy="fsdp", whole=True),
)


# The files.


def write_files(folder: Path, shape: Mapping[str, int]) -> int:
    """Write the files of a checkpoint as holes behind their headers, and return the bytes of its weights."""
    model = _build(shape)
    folder.mkdir(parents=True, exist_ok=True)
    groups: list[dict[str, torch.Size]] = [{}]
    filled = total = 0
    for name, weight in model.state_dict().items():
        size = 2 * weight.numel()
        if filled + size > FILE_BYTES:
            groups.append({})
            filled = 0
        groups[-1][name] = weight.shape
        filled, total = filled + size, total + size
    weight_map: dict[str, str] = {}
    for number, group in enumerate(groups, 1):
        name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        _write_holes(folder / name, group)
        weight_map |= dict.fromkeys(group, name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16", **shape}
    (folder / "config.json").write_text(json.dumps(config))
    return total


def _write_holes(path: Path, shapes: Mapping[str, torch.Size]) -> None:
    entries = lay_out((name, torch.bfloat16, shape) for name, shape in shapes.items())
    head = {e.key: {"dtype": "BF16", "shape": list(e.shape), "data_offsets": [e.begin, e.end]} for e in entries}
    text = json.dumps({"__metadata__": {"format": "pt"}, **head}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + entries[-1].end)


def _build(shape: Mapping[str, int]) -> nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    with dsplan.empty_weights():
        model: nn.Module = AutoModelForCausalLM.from_config(LlamaConfig(**shape), dtype=torch.bfloat16)
    return model


# What a rank does.


@dataclass(frozen=True, kw_only=True, slots=True)
class Loaded:
    """Time and memory that loading took on a rank."""

    peak_bytes: int
    """Anonymous memory at its most, over what there was before."""
    left_bytes: int
    """The same afterwards."""
    own_bytes: int
    """Of the rank's weights."""
    seconds: float
    cpu_seconds: float


def load(case: Case, blocks: int, folder: str) -> Loaded:
    """Load on this rank, with the others."""
    free_memory()
    dist.barrier()
    before, began, cpu = ProcessMemory().read()["private_bytes"], time.perf_counter(), time.process_time()
    with sampled_peak() as peak:
        module = _load_whole(case, blocks, folder) if case.whole else _stream(case, blocks, folder)
    dist.barrier()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    left = ProcessMemory().read()["private_bytes"] - before
    own = sum(_bytes_of(weight) for weight in module(None))
    return Loaded(peak_bytes=peak() - before, left_bytes=left, own_bytes=own, seconds=seconds, cpu_seconds=cpu)


def _stream(case: Case, blocks: int, folder: str) -> Callable[[Any], list[torch.Tensor]]:
    engine, *_ = initialize(
        _build(case.shape(blocks)),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        plan=case.plan(blocks),
        weights=folder,
    )
    return lambda _: list(engine.state_tensors()["parameters"])


def _load_whole(case: Case, blocks: int, folder: str) -> Callable[[Any], list[torch.Tensor]]:
    from transformers import AutoModelForCausalLM, LlamaConfig

    config, state = LlamaConfig(**case.shape(blocks)), {}
    if dist.get_rank() == 0:
        whole = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.bfloat16)
        state = whole.state_dict()
    model = _build(case.shape(blocks))
    for unit in (*repeated_blocks(model), model):
        fully_shard(unit)
    for module in model.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(torch.empty_like(weight, device="cpu")))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, state, options=options)
    return lambda _: list(model.parameters())


def _bytes_of(weight: Any) -> int:
    local = weight.to_local() if hasattr(weight, "to_local") else weight
    return 0 if not any(local.stride()) and local.numel() > 1 else local.numel() * local.element_size()


@contextmanager
def sampled_peak() -> Iterator[Callable[[], int]]:
    """Watch this process's anonymous memory, and give a function that returns the most there was."""
    ended, most = threading.Event(), [0]

    def watch() -> None:
        memory = ProcessMemory()
        while not ended.wait(_EVERY_SECONDS):
            most[0] = max(most[0], memory.read()["private_bytes"])
        memory.close()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield lambda: most[0]
    finally:
        ended.set()
        watcher.join()


def free_memory() -> None:
    """Give what is not in use back to the system, so that a peak begins from there."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


# The table.


def row_of(case: Case, blocks: int, ranks: Sequence[Loaded]) -> str:
    """Return a row: what ranks took and what the planner counts, beside two shards and one tensor."""
    priced = price(*case.question(blocks))
    job = priced.job
    own = weight_bytes(job, recipe_of(job), sharded=True)
    tensor = 2 * max(SHAPE["intermediate_size"], SHAPE["vocab_size"]) * SHAPE["hidden_size"] // case.narrower
    tensor //= case.narrower if case.narrower > 1 else 1
    most = max(ranks, key=lambda rank: rank.peak_bytes)
    planned = own + READ_BYTES
    bound = 2 * max(rank.own_bytes for rank in ranks) + tensor
    cells = [
        case.name,
        f"{max(rank.own_bytes for rank in ranks) / GIB:.2f}",
        f"{most.peak_bytes / GIB:.2f}",
        "-" if case.whole else f"{planned / GIB:.2f}",
        f"{bound / GIB:.2f}",
        f"{sum(rank.peak_bytes for rank in ranks) / GIB:.1f}",
        f"{max(rank.seconds for rank in ranks):.1f}",
        f"{sum(rank.cpu_seconds for rank in ranks):.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Write the files, load them under each case, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where the files go; they take a few MB of disk")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--only", nargs="*", choices=[case.name for case in CASES])
    options = parser.parse_args()
    print("| case | own | peak | planned | two shards and a tensor | node, sum of peaks | seconds | CPU seconds |")
    print("|---|---|---|---|---|---|---|---|")
    for case in CASES:
        if options.only and case.name not in options.only:
            continue
        folder = options.folder / f"narrower-{case.narrower}"
        total = write_files(folder, case.shape(SHAPE["num_hidden_layers"]))
        with RankPool(RANKS, timeout_seconds=1200, preload=("transformers.models.llama.modeling_llama",)) as pool:
            pool.run(_import)
            ranks = pool.run(load, case, options.blocks, str(folder))
        print(row_of(case, options.blocks, ranks), f"files of {total / 1e9:.0f} GB", flush=True)


def _import() -> None:
    _build({**SHAPE, "num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 64})


if __name__ == "__main__":
    main()
