"""Training with a model that ranks split between them, against one process: what ranks of the pool run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import dsplan
from planner.types.plan import Plan
from strategies.engine.initialize import initialize
from strategies.errors import CannotRun
from strategies.modules.activation_checkpointing import checkpoint_activations
from strategies.parallel.blocks import repeated_blocks
from strategies.parallel.split import parts_of
from strategies.run_directory.heartbeat import PULSE
from tests.strategies.training_bodies import Recipe

Kind = Literal["llama", "qwen3", "gpt2", "mixtral", "gpt", "numbered", "layers"]
VOCABULARY, LENGTH, SAMPLES = 101, 16, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Composition:
    """The way in which ranks train a model together."""

    strategy: str = "ddp"
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    schedule: str = "1f1b"
    virtual_stages: int = 1
    layers: str = ""
    """Blocks of each stage, where they are not as even as they go."""
    accumulation: int = 1
    precision: str = "fp32"
    checkpointing: str = "none"
    clipping: float = 0.0
    steps: int = 5

    @property
    def world_size(self) -> int:
        return self.dp_replicate * self.dp_shard * self.cp * self.tp * self.pp

    def plan(self) -> Plan:
        """A plan with these degrees; its costs are of no interest to the engine."""
        backend = "native" if self.strategy.startswith("zero") else "torch"
        plan = Recipe(strategy="single", backend=backend).plan()
        parts = self.dp_replicate * self.dp_shard * self.accumulation
        changes: dict[str, Any] = {
            name: getattr(self, name)
            for name in ("strategy", "dp_replicate", "dp_shard", "tp", "pp", "cp", "ep", "sequence_parallel")
        }
        configuration = replace(
            plan.configuration,
            **changes,
            pp_schedule=self.schedule,
            virtual_stages=self.virtual_stages,
            layers_per_stage=self.layers,
            micro_batch_size=SAMPLES // parts,
            gradient_accumulation_steps=self.accumulation,
            global_batch_size=SAMPLES,
            sequence_length=LENGTH,
            precision=self.precision,
            activation_checkpointing=self.checkpointing,
        )
        return replace(plan, configuration=configuration)


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The distance of a run from one process: of the losses, of every parameter, and the gradients' norm."""

    loss: float
    parameter: float
    norm: float
    where: str
    share: float
    """Parameters on this rank as a share of the whole model's."""


def build(kind: Kind) -> nn.Module:
    """A small model of a family, the same on every rank."""
    transformers: Any = importlib.import_module("transformers")
    torch.manual_seed(7)
    usual = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**usual, **heads))
    if kind == "qwen3":
        config = transformers.Qwen3Config(**usual, **heads, head_dim=8, tie_word_embeddings=True)
        return transformers.Qwen3ForCausalLM(config)
    if kind == "mixtral":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**usual, **heads, num_local_experts=4))
    if kind == "layers":
        return OwnLayers(dist.new_subgroups(group_size=1)[0])  # whole, as before the job is joined
    if kind in ("deepseek", "qwen2_moe"):
        return _with_shared_experts(kind, usual, heads)
    if kind == "gpt2":
        dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        sizes = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=VOCABULARY, **sizes, **dropouts))
    examples = str(Path(__file__).parents[2] / "scripts" / "examples")
    if examples not in sys.path:
        sys.path.insert(0, examples)
    gpt: nn.Module = importlib.import_module("train_gpt").Gpt(layers=4, width=32, heads=4, length=LENGTH)
    return _Numbered(gpt) if kind == "numbered" else gpt


class OwnLayers(nn.Module):
    """A script's own model of `dsplan.parallel`'s layers, split over a group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.tokens = dsplan.parallel.VocabParallelEmbedding(VOCABULARY + 1, 32, padding_idx=3, group=group)
        self.blocks = nn.ModuleList([_OwnBlock(group) for _ in range(2)])
        self.head = dsplan.parallel.ColumnParallelLinear(32, VOCABULARY + 1, gather_output=True, group=group)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy(self.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class _OwnBlock(nn.Module):
    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(32)
        self.attention = dsplan.parallel.ParallelAttention(32, 4, key_heads=2, group=group)
        self.mlp = dsplan.parallel.ParallelMLP(32, 48, is_gated=True, group=group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.mlp(self.norm(x))  # type: ignore[no-any-return]


def refused_layers(composition: Composition, members: Sequence[Sequence[int]] | None) -> str:
    """Return what `initialize` says to layers that are split over the whole job, or over this rank's of some groups."""
    group = dist.new_subgroups_by_enumeration([list(ranks) for ranks in members])[0] if members else None
    return _refused(lambda: initialize(OwnLayers(group), optimizer=_optimizer, plan=composition.plan()))


class _Unnamed(nn.Module):
    """Attention whose number of heads has no name that says so."""

    def __init__(self) -> None:
        super().__init__()
        self.h = 4
        self.query, self.key, self.value, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (self.h, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(attended.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def said_of_splits(composition: Composition, tp_plan: Mapping[str, str]) -> list[str]:
    """Return what is said while a plan splits the example's model, or the rule one with `_Unnamed` attention."""
    model: Any = build("gpt")
    model.blocks = model.blocks[:2]
    if not tp_plan:
        model = OwnLayers(dist.new_subgroups(group_size=1)[0])
        for block in model.blocks:
            block.attention = _Unnamed()
    tensor, notices = importlib.import_module("strategies.parallel.tensor"), list[str]()
    usual, tensor.notice = tensor.notice, notices.append
    try:
        initialize(model, optimizer=_optimizer, plan=composition.plan(), tp_plan=tp_plan)
    finally:
        tensor.notice = usual
    return notices


class _Numbered(nn.Module):
    """The example's model as torchtitan writes its own: blocks in a `ModuleDict`, which take a mask too."""

    def __init__(self, gpt: Any) -> None:
        super().__init__()
        self.tokens, self.norm, self.head = gpt.tokens, gpt.norm, gpt.head
        self.layers = nn.ModuleDict({str(index): _Masked(block) for index, block in enumerate(gpt.blocks)})

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        for layer in self.layers.values():
            x = layer(x, None)
        logits = self.head(self.norm(x))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class _Masked(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        assert mask is None
        return self.block(x)  # type: ignore[no-any-return]


def _with_shared_experts(kind: Kind, usual: Mapping[str, int], heads: Mapping[str, int]) -> nn.Module:
    """DeepSeek-V2's shared experts are given samples, and tp ranks split them; Qwen2's are given rows of tokens."""
    transformers: Any = importlib.import_module("transformers")
    routed = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
    if kind == "qwen2_moe":
        shared = {"num_experts": 4, "shared_expert_intermediate_size": 24}
        return transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**usual, **heads, **routed, **shared))
    shared = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
    config = {**usual, **heads, "num_key_value_heads": heads["num_attention_heads"], **routed, **shared, **latent}
    return transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**config))


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """The global batch of a step: ids and labels, both [SAMPLES, LENGTH]."""
    generator = torch.Generator().manual_seed(500 + step)
    ids = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids}


def _optimizer(parameters: Any) -> torch.optim.Optimizer:
    # An epsilon above rounding: gradients that are zero but for rounding (GPT-2's key biases) make no step.
    return torch.optim.AdamW(parameters, lr=2e-3, eps=1e-4)


def _loss(output: Any) -> torch.Tensor:
    loss: torch.Tensor = output if isinstance(output, torch.Tensor) else output.loss
    return loss


@cache
def reference(
    kind: Kind, steps: int, clipping: float, precision: str
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, norms and weights of one process with the whole global batch."""
    model = build(kind)
    optimizer = _optimizer(model.parameters())
    losses, norms = [], []
    for step in range(steps):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
            loss = _loss(model(**batch_of(step)))
        loss.backward()
        losses.append(loss.item())
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clipping or torch.inf).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: parameter.detach() for name, parameter in model.named_parameters()}


def make_engine(
    kind: Kind,
    composition: Composition,
    tp_plan: Mapping[str, str] | None = None,
    kernels: Mapping[str, str] | None = None,
) -> Any:
    config: dict[str, Any] = {"gradient_clipping": composition.clipping} if composition.clipping else {}
    engine, *_ = initialize(
        build(kind),
        optimizer=_optimizer,
        plan=composition.plan(),
        config=config | ({"kernels": kernels} if kernels else {}) or None,
        tp_plan=tp_plan,
    )
    return engine


def train(
    kind: Kind,
    composition: Composition,
    tp_plan: Mapping[str, str] | None = None,
    kernels: Mapping[str, str] | None = None,
) -> Difference:
    """Train on this rank with the others and compare with one process."""
    return compared(make_engine(kind, composition, tp_plan, kernels), kind, composition)


def compared(engine: Any, kind: Kind, composition: Composition) -> Difference:
    """Train with an engine that has the weights of `build`, and compare with one process."""
    losses, norms = [], []
    for step in range(composition.steps):
        losses.append(one_step(engine, step))
        norms.append(engine.gradient_norm or 0.0)
    expected = reference(kind, composition.steps, composition.clipping, composition.precision)
    worst, where = 0.0, ""
    parts = parts_of(engine.module)
    own = 0
    for name, parameter in engine.module.named_parameters():
        here = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        whole = expected[2][parts.shared.get(name, name)]
        split = parts.splits.get(name)
        part = whole if split is None else split.take(whole)
        own += part.numel()
        difference = (here.detach().float().cpu() - part).abs().max().item() if part.numel() else 0.0
        if difference > worst:
            worst, where = difference, name
    return Difference(
        loss=max(abs(a - b) for a, b in zip(losses, expected[0], strict=True)),
        parameter=worst,
        norm=max(abs(a - b) / b for a, b in zip(norms, expected[1], strict=True)),
        where=where,
        share=own / sum(parameter.numel() for parameter in expected[2].values()),
    )


def one_step(engine: Any, step: int) -> float:
    """One optimizer step on this data-parallel rank's samples; the mean loss over the global batch."""
    rank, size = engine.data_parallel_rank, engine.data_parallel_size
    if engine.configuration.pp > 1:
        return engine.train_batch({name: tensor[rank::size] for name, tensor in batch_of(step).items()}).item()
    accumulation = engine.configuration.gradient_accumulation_steps
    own = {name: tensor[rank::size] for name, tensor in batch_of(step).items()}
    if engine.configuration.pp > 1:
        return float(engine.train_batch(own))
    total = torch.zeros((), device=engine.environment.device)
    for part in range(accumulation):
        loss = _loss(engine(**{name: tensor.chunk(accumulation)[part] for name, tensor in own.items()}))
        engine.backward(loss)
        engine.step()
        total += loss.detach().float() / accumulation
    torch.distributed.all_reduce(total, group=engine.mesh.group("dp"))
    return total.item() / size


def passes_of_a_block(kind: Kind, composition: Composition, is_chosen_by_script: bool) -> tuple[float, int]:
    """The largest difference from one process over two steps, and how often a block's attention ran in the second."""
    model = build(kind)
    blocks = repeated_blocks(model)
    norm = next(module for module in blocks[1].modules() if "Norm" in type(module).__name__)
    if is_chosen_by_script:
        checkpoint_activations(model, lambda module: module in blocks)
    engine, *_ = initialize(model, optimizer=_optimizer, plan=composition.plan())
    losses = [one_step(engine, 0)]
    passes: list[nn.Module] = []
    norm.register_forward_pre_hook(lambda module, _: passes.append(module))
    losses.append(one_step(engine, 1))
    expected = reference(kind, 2, 0.0, composition.precision)[0]
    return max(abs(a - b) for a, b in zip(losses, expected, strict=True)), len(passes)


@dataclass(frozen=True, kw_only=True, slots=True)
class InStages:
    """Answers of a model that was cut into stages."""

    loss: float
    expected: float
    is_training: bool
    called: str
    short: str
    stale: int
    groups: int


def evaluated_in_stages(composition: Composition) -> InStages:
    """Evaluate, and ask for what cannot be done, with an optimizer that the script made of the whole model."""
    model = build("gpt2")
    weights = list(model.parameters())
    matrices = [parameter for parameter in weights if parameter.dim() > 1]
    optimizer = _optimizer([{"params": matrices}, {"params": [p for p in weights if p.dim() == 1]}])
    engine, *_ = initialize(model, optimizer, plan=composition.plan())
    engine.train()
    batch = {name: ids[:3] for name, ids in batch_of(0).items()}  # one micro-batch and a half
    loss = float(engine.eval_batch(batch))
    whole = build("gpt2").eval()
    parts = [{name: ids[first : first + 2] for name, ids in batch.items()} for first in (0, 2)]
    expected = sum(_loss(whole(**part)).item() * len(part["labels"]) for part in parts) / 3
    here = set(engine.module.parameters())
    return InStages(
        loss=loss,
        expected=expected,
        is_training=engine.module.training,
        called=_refused(lambda: engine(**batch)),
        short=_refused(lambda: engine.train_batch(batch)),
        stale=sum(parameter.numel() for parameter in weights if parameter not in here),
        groups=len(engine.optimizer.param_groups),
    )


Unfit = Literal["positions", "eager", "eager llama", "bert", "mamba", "packed", "window", "tuple"]


def refused_sequences(kind: Unfit, tp: int = 1) -> str:
    """Return what cp 2 says to a model, or to a call of it, that it cannot split."""
    transformers: Any = importlib.import_module("transformers")
    given, step = dict(batch_of(0)), Composition(cp=2, tp=tp)
    if kind in ("positions", "eager"):
        model = build("gpt")
        for block in model.get_submodule("blocks").children():
            block.forward = MethodType(_with_positions if kind == "positions" else _eager, block)
    elif kind in ("packed", "window", "eager llama", "tuple"):
        model = build("llama")
        if kind == "packed":
            given["position_ids"] = torch.arange(LENGTH // 2).repeat(SAMPLES, 2)
        elif kind == "window":
            model.config.sliding_window = LENGTH // 2
        elif kind == "tuple":
            given["return_dict"] = False
        else:
            model.set_attn_implementation("eager")
    elif kind == "bert":
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, intermediate_size=48))
    else:
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
        model = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes))
    return _refused(lambda: initialize(model, optimizer=_optimizer, plan=step.plan())[0](**given))


def refused_in_stages(composition: Composition) -> str:
    """Return what a pipeline of ranks that share sequences says to padded samples."""
    engine, *_ = initialize(build("llama"), optimizer=_optimizer, plan=composition.plan())
    batch = {**batch_of(0), "attention_mask": torch.ones(SAMPLES, LENGTH, dtype=torch.long)}
    batch["attention_mask"][-1, -1] = 0
    return _refused(lambda: engine.train_batch(batch))


def _with_positions(block: Any, x: torch.Tensor) -> torch.Tensor:
    """Rows are turned by their number in what the block sees, as rotary embeddings are inside attention."""
    turns = torch.arange(x.shape[1], device=x.device).cos().unsqueeze(-1)
    output: torch.Tensor = type(block).forward(block, x.roll(1, -1) * turns + x)
    return output


def _eager(block: Any, x: torch.Tensor) -> torch.Tensor:
    scores = (x @ x.transpose(1, 2)).tril()
    return x + block.out(scores @ x)


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnLoss:
    """A script that makes its own loss of logits, and what its blocks drop out."""

    loss: float
    expected: float
    gradient: float
    """The largest difference of a gradient from one process."""
    dropped: list[bool]
    later: float
    """The next random number after a forward pass."""


def own_loss(kind: Kind) -> OwnLoss:
    """Logits of cp 2 in training, a loss of the script's own, and dropout in the blocks."""
    engine, *_ = initialize(build(kind), optimizer=_optimizer, plan=Composition(cp=2).plan())
    alone, ids = build(kind).to(engine.device), batch_of(0)["input_ids"].to(engine.device)
    losses = []
    for model in (engine, alone):
        logits = model(input_ids=ids).logits
        losses.append(nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()))
    torch.autograd.backward(losses)
    right = dict(alone.named_parameters())
    apart = [(p.grad - right[name].grad).abs().max().item() for name, p in engine.module.named_parameters()]
    return OwnLoss(loss=losses[0].item(), expected=losses[1].item(), gradient=max(apart), **_dropped())


def _dropped() -> dict[str, Any]:
    model = build("gpt")
    blocks = model.get_submodule("blocks")
    seen: list[torch.Tensor] = []
    for block in blocks.children():
        block.mlp_norm = nn.Sequential(nn.Dropout(0.5), block.mlp_norm)
        block.mlp_norm[0].register_forward_hook(lambda _, __, output: seen.append(output == 0))
    engine, *_ = initialize(model, optimizer=_optimizer, plan=Composition(cp=2).plan())
    torch.manual_seed(3)
    engine(**batch_of(0))
    return {"dropped": seen[-1].flatten().tolist(), "later": torch.rand((), device=engine.device).item()}


def _refused(call: Callable[[], object]) -> str:
    try:
        call()
    except CannotRun as refusal:
        return str(refusal)
    return ""


def train_batch_and_loop(composition: Composition) -> tuple[list[float], list[float], int]:
    """Losses of three steps by `train_batch`, from an iterator and from whole steps, and by a loop of calls."""
    both = []
    for uses_iterator in (None, True, False):
        engine, *_ = initialize(build("gpt"), optimizer=_optimizer, plan=composition.plan())
        losses = []
        for step in range(3):
            if uses_iterator is None:
                losses.append(one_step(engine, step))
                continue
            own = {n: ids[engine.data_parallel_rank :: engine.data_parallel_size] for n, ids in batch_of(step).items()}
            halves = [
                dict(zip(own, rows, strict=True)) for rows in zip(*(ids.chunk(2) for ids in own.values()), strict=True)
            ]
            losses.append(float(engine.train_batch(iter(halves) if uses_iterator else own)))
        both.append(losses)
    assert both[1] == both[2]
    return both[0], both[1], engine.global_steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """The view of a rank on three steps, of which the second overflows on one rank."""

    skipped: list[int]
    """Steps that were skipped, after each."""
    scales: list[float]
    norms: list[float | None]
    moved: list[float]
    """The largest change of an element of the whole model, by each step."""


def skips_together(composition: Composition) -> Skipped:
    """Train in fp16 with gradients that overflow in the embedding's part of rank 0 alone."""
    fp16 = {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}
    engine, *_ = initialize(build("llama"), optimizer=_optimizer, plan=composition.plan(), config={"fp16": fp16})
    overflows = False

    def overflow(module: nn.Module, _: Any, output: torch.Tensor) -> None:
        if overflows and output.requires_grad:
            output.register_hook(lambda gradient: torch.full_like(gradient, torch.inf))

    if engine.environment.rank == 0:
        engine.module.get_input_embeddings().register_forward_hook(overflow)
    answer = Skipped(skipped=[], scales=[], norms=[], moved=[])
    before = engine.state_dict()
    for step in range(3):
        overflows = step == 1
        one_step(engine, step)
        after = engine.state_dict()
        answer.skipped.append(engine.skipped_steps)
        answer.scales.append(engine.loss_scale)
        answer.norms.append(engine.gradient_norm)
        answer.moved.append(max(float((after[name] - value).abs().max()) for name, value in before.items()))
        before = after
    return answer


def train_after_other_meetings(kind: Kind, compositions: Sequence[Composition]) -> list[Difference]:
    """`train` where rank 0 has met others more often than they have met it, as with an engine that it had alone."""
    differences = []
    for composition in compositions:
        for _ in range(3 * (dist.get_rank() == 0)):
            with PULSE.meeting("save_checkpoint"):
                pass
        differences.append(train(kind, composition))
    return differences


def meetings_of_a_step(composition: Composition) -> list[tuple[str, int]]:
    """Return what a step and an evaluation count as calls that all ranks make alike, by kind and number."""
    engine, *_ = initialize(build("llama"), _optimizer, plan=composition.plan())
    rows = {name: ids.chunk(engine.data_parallel_size)[engine.data_parallel_rank] for name, ids in batch_of(0).items()}
    before = PULSE.number
    engine.train_batch(rows)
    engine.eval_batch(rows)
    return [(each.kind, each.last - before) for each in PULSE.meetings if each.last > before]
