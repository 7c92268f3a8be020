"""Results that ranks compute with split layers, beside the same layers whole."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import dsplan
from strategies.engine.initialize import initialize
from strategies.errors import CannotRun
from strategies.parallel.ranks import _reduce_scatter
from strategies.parallel.split import parts_of, splits_in
from strategies.telemetry.training_monitor import EngineFeed
from tests.strategies import training_bodies
from tests.strategies.example_bodies import EXAMPLES


def _gradients_alike(split: nn.Module, whole: nn.Module) -> float:
    """The largest difference of a gradient from this rank's part of the whole layer's."""
    parts = splits_in(split)
    worst = 0.0
    for (name, here), there in zip(split.named_parameters(), whole.parameters(), strict=True):
        assert here.grad is not None
        assert there.grad is not None
        expected = parts[name].take(there.grad) if name in parts else there.grad
        worst = max(worst, float((here.grad - expected).abs().max()))
    return worst


def _compared(split: nn.Module, whole: nn.Module, x: torch.Tensor) -> float:
    """The largest difference in outputs and gradients of a split module from the whole one with the same weights."""
    here, there = x.clone().requires_grad_(), x.clone().requires_grad_()
    mine, expected = split(here), whole(there)
    for loss in (mine, expected):
        (loss * torch.arange(loss.shape[-1])).square().mean().backward()
    assert here.grad is not None
    assert there.grad is not None
    worst = max(float((mine - expected).abs().max()), float((here.grad - there.grad).abs().max()))
    return max(worst, _gradients_alike(split, whole))


def _start(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return make()


def linear_layers() -> dict[str, float]:
    """Differences of column, row, and column and row layers from `nn.Linear`s."""
    parallel = dsplan.parallel
    x = torch.randn(2, 4, 12, generator=torch.Generator().manual_seed(1))
    pairs: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module]]] = {
        "column": (
            lambda: parallel.ColumnParallelLinear(12, 24, gather_output=True),
            lambda: nn.Linear(12, 24),
        ),
        "row": (lambda: parallel.RowParallelLinear(12, 24, split_input=True), lambda: nn.Linear(12, 24)),
        "both": (
            lambda: nn.Sequential(
                parallel.ColumnParallelLinear(12, 24), nn.GELU(), parallel.RowParallelLinear(24, 12, bias=False)
            ),
            lambda: nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 12, bias=False)),
        ),
    }
    return {name: _compared(_start(split), _start(whole), x) for name, (split, whole) in pairs.items()}


class _Attention(nn.Module):
    """`ParallelAttention` on one rank, written out."""

    def __init__(self, key_heads: int) -> None:
        super().__init__()
        self.keys = key_heads * 4
        self.qkv, self.out = nn.Linear(24, 24 + 2 * self.keys), nn.Linear(24, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(x).split((24, self.keys, self.keys), dim=-1)
        query, key, value = (part.unflatten(-1, (-1, 4)).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(attended.transpose(1, 2).flatten(2))


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(12, 2 * 16), nn.Linear(16, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(functional.gelu(gate) * up)


def blocks() -> dict[str, float]:
    """Differences of Megatron's split of attention, with as many key heads and fewer, and of MLPs."""
    generator = torch.Generator().manual_seed(1)
    wide, narrow = torch.randn(2, 5, 24, generator=generator), torch.randn(3, 12, generator=generator)
    differences = {
        f"attention {heads}": _compared(
            _start(lambda heads=heads: dsplan.parallel.ParallelAttention(24, 6, key_heads=heads)),
            _start(lambda heads=heads: _Attention(heads)),
            wide,
        )
        for heads in (6, 2)
    }
    gated = _start(lambda: dsplan.parallel.ParallelMLP(12, 16, is_gated=True))
    return {**differences, "gated": _compared(gated, _start(_Gated), narrow)}


def vocabulary(length: int) -> dict[str, float]:
    """Differences of a table, a head and a loss over a vocabulary of any length from whole ones."""
    parallel = dsplan.parallel
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, length, (3, 6), generator=generator)
    targets = torch.randint(0, length, (3, 6), generator=generator)
    targets[0, :2] = -100
    table = _start(lambda: parallel.VocabParallelEmbedding(length, 8, padding_idx=3))
    whole = _start(lambda: nn.Embedding(length, 8, padding_idx=3))
    mine, expected = table(tokens), whole(tokens)
    scores = torch.randn(length, 8, generator=generator)
    first, end = table.ranks.share(length)
    part = scores[first:end].clone().requires_grad_()
    head = scores.clone().requires_grad_()
    differences = {"table": float((mine - expected).abs().max())}
    local = dsplan.parallel.copy_to_ranks(mine, table.ranks) @ part.t()
    losses = {}
    for kind in ("sum", "none", "mean"):
        here = parallel.vocab_parallel_cross_entropy(local, targets, vocabulary=length, reduction=kind)
        there = functional.cross_entropy((expected @ head.t()).flatten(0, 1), targets.flatten(), reduction=kind)
        losses[kind] = float(((here.flatten() - there.flatten()) / there.abs().clamp(min=1)).abs().max())
    here.backward()
    there.backward()
    assert part.grad is not None
    assert head.grad is not None
    differences["head gradient"] = float((part.grad - head.grad[first:end]).abs().max())
    return {**differences, **losses, "table gradient": _gradients_alike(table, whole)}


def sequence_parts() -> dict[str, float]:
    """Differences of gathers, splits and sums of parts of a sequence, and of their gradients, from what they undo."""
    parallel, rank, ranks = dsplan.parallel, dist.get_rank(), dist.get_world_size()
    group = parallel.TensorRanks()
    x = torch.randn(2, 2 * ranks, 3, generator=torch.Generator().manual_seed(1))
    own = slice(2 * rank, 2 * rank + 2)

    def gradient(function: Callable[[torch.Tensor], torch.Tensor], given: torch.Tensor) -> Any:
        given = given.clone().requires_grad_()
        out = function(given)
        (out * (rank + 1)).sum().backward()
        return out.detach(), given.grad

    each = torch.ones(1)
    split, split_back = gradient(lambda v: parallel.split_between_ranks(v, group, 1), x)
    whole, whole_back = gradient(lambda v: parallel.gather_from_ranks(v, group, 1, sums=True), x[:, own])
    total, total_back = gradient(lambda v: parallel.scatter_sum(v, group, 1), x)
    numbers = torch.arange(1, ranks + 1).repeat_interleave(2).view(1, -1, 1).expand_as(x).float()
    return {
        "split": float((split - x[:, own]).abs().max() + (split_back - numbers).abs().max()),
        "gather": float((whole - x).abs().max() + (whole_back - each * ranks * (ranks + 1) / 2).abs().max()),
        "scatter": float((total - ranks * x[:, own]).abs().max() + (total_back - numbers).abs().max()),
        "raw": float((_reduce_scatter(x, group, 1) - ranks * x[:, own]).abs().max()),
    }


def layers_on_ranks_of(tokens: bool) -> tuple[float, list[str]]:
    """Difference of layers that lie on different ranks from the same on one, and this rank's names of them."""

    def layers() -> list[nn.Module]:
        first: nn.Module = nn.Embedding(9, 6) if tokens else nn.Linear(6, 6)
        return [first, *(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))]

    torch.manual_seed(5)
    whole = layers()
    torch.manual_seed(5)
    split = dsplan.parallel.LayerSplit(layers())
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(0, 9, (4,), generator=generator) if tokens else torch.randn(4, 6, generator=generator)
    here, there = x.clone().requires_grad_(not tokens), x.clone().requires_grad_(not tokens)
    mine, expected = split(here), nn.Sequential(*whole)(there)
    mine.square().sum().backward()
    expected.square().sum().backward()
    worst = float((mine - expected).abs().max())
    if not tokens:
        worst = max(worst, float((here.grad - there.grad).abs().max()))
    for number, layer in split.layers.items():
        for mine, other in zip(layer.parameters(), whole[int(number)].parameters(), strict=True):
            worst = max(worst, float((mine.grad - other.grad).abs().max()))
    return worst, list(split.layers)


def refusal_of_other_targets() -> str:
    """Return what the loss says where ranks that it takes to share a vocabulary read other samples."""
    import_module("strategies.parallel.loss")._reads_alike.clear()
    targets = torch.full((2, 3), dist.get_rank())
    try:
        dsplan.parallel.vocab_parallel_cross_entropy(torch.randn(2, 3, 5), targets)
    except CannotRun as problem:
        return str(problem)
    return ""


def refusal_of_odd_width() -> str:
    """Return what a layer says whose outputs do not divide."""
    try:
        dsplan.parallel.ColumnParallelLinear(4, 5)
    except CannotRun as problem:
        return str(problem)
    return ""


# Whole models.

SAMPLES, LENGTH, VOCABULARY = 4, 8, 51


@dataclass(frozen=True, kw_only=True, slots=True)
class Composition:
    """One way to train a small model for `steps` optimizer steps on ranks that share its layers."""

    model: str
    strategy: str = "fsdp"
    tp: int = 2
    dp: int = 1
    dp_replicate: int = 1
    sequence_parallel: bool = False
    precision: str = "fp32"
    checkpointing: str = "none"
    accumulation: int = 1
    clipping: float = 0.0
    tp_plan: tuple[tuple[str, str], ...] = ()
    steps: int = 5

    def plan(self) -> Any:
        """A plan with this configuration."""
        plan = training_bodies.Recipe(strategy=self.strategy).plan()
        replicas = self.dp if self.strategy == "ddp" else self.dp_replicate
        return replace(
            plan,
            configuration=replace(
                plan.configuration,
                dp_replicate=replicas,
                dp_shard=self.dp // replicas,
                tp=self.tp,
                sequence_parallel=self.sequence_parallel,
                precision=self.precision,
                activation_checkpointing=self.checkpointing,
                micro_batch_size=SAMPLES // self.dp // self.accumulation,
                gradient_accumulation_steps=self.accumulation,
                global_batch_size=SAMPLES,
                sequence_length=LENGTH,
            ),
        )


def model_named(name: str) -> nn.Module:
    """A small model with the weights that every run begins with."""
    torch.manual_seed(3)
    if name == "gpt":
        sys.path.insert(0, str(EXAMPLES))
        model: nn.Module = import_module("train_gpt").Gpt(layers=2, width=16, heads=2, length=LENGTH)
        return model
    transformers: Any = import_module("transformers")
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    gated = {**sizes, "num_key_value_heads": 2, "intermediate_size": 32, "pad_token_id": 0}
    quiet = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    configs: dict[str, Callable[[], Any]] = {
        "gpt2": lambda: transformers.GPT2Config(**sizes, n_positions=LENGTH, **quiet),
        "llama": lambda: transformers.LlamaConfig(**gated),
        "qwen3": lambda: transformers.Qwen3Config(**gated, head_dim=4, tie_word_embeddings=True),
        "mixtral": lambda: transformers.MixtralConfig(**gated, num_local_experts=4),
        "neox": lambda: transformers.GPTNeoXConfig(
            **sizes, intermediate_size=24, attention_dropout=0.0, hidden_dropout=0.0
        ),
        "deepseek": lambda: transformers.DeepseekV3Config(
            **{**gated, "num_key_value_heads": 4},
            q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4, n_routed_experts=4,
            n_group=2, topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1, moe_intermediate_size=8,
        ),
    }  # fmt: skip
    config = configs[name]()
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")  # type: ignore[no-any-return]


def batch_of(step: int) -> dict[str, torch.Tensor]:
    """The global batch of a step."""
    tokens = torch.randint(1, VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(step))
    return {"input_ids": tokens, "labels": tokens}


def _loss(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.loss


def train_alone(composition: Composition) -> training_bodies.Trained:
    """The same training in plain torch in one process."""
    model = model_named(composition.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(composition.steps):
        loss = _loss(model(**batch_of(step)))
        loss.backward()
        if composition.clipping:
            nn.utils.clip_grad_norm_(model.parameters(), composition.clipping)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return training_bodies.Trained(losses=losses, parameters={n: p.detach() for n, p in model.named_parameters()})


def split_engine(composition: Composition) -> Any:
    """An engine over ranks that share a model's layers."""
    engine, *_ = initialize(
        model=model_named(composition.model),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        plan=composition.plan(),
        config={"gradient_clipping": composition.clipping},
        tp_plan=dict(composition.tp_plan),
    )
    return engine


def split_step(engine: Any, step: int) -> float:
    """One optimizer step; the mean loss over the global batch."""
    rank, size = engine.data_parallel_rank, engine.data_parallel_size
    accumulation = engine.configuration.gradient_accumulation_steps
    total = torch.zeros(())
    parts = {name: values[rank::size].chunk(accumulation) for name, values in batch_of(step).items()}
    for index in range(accumulation):
        loss = _loss(engine(**{name: chunks[index] for name, chunks in parts.items()}))
        engine.backward(loss)
        engine.step()
        total += loss.detach().float() / accumulation
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitRun:
    """The view of a rank on a training."""

    losses: list[float]
    parameters: dict[str, torch.Tensor]
    norm: float
    held: int
    """Elements of the parameters of this rank, before data parallelism shards them."""


def train_split(composition: Composition) -> SplitRun:
    """Train with the engine over ranks that share the model's layers."""
    engine = split_engine(composition)
    losses = [split_step(engine, step) for step in range(composition.steps)]
    held = sum(parameter.numel() for parameter in engine.module.parameters())
    parameters = engine.state_dict()
    return SplitRun(losses=losses, parameters=parameters, norm=engine.gradient_norm, held=held)


def norm_alone(composition: Composition) -> float:
    """The norm of the last step's gradients in one process, before clipping."""
    model = model_named(composition.model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(composition.steps):
        optimizer.zero_grad()
        _loss(model(**batch_of(step))).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), composition.clipping)
        optimizer.step()
    return float(norm)


def refusal_of(composition: Composition) -> str:
    """Return what `initialize` says to a plan."""
    try:
        split_engine(composition)
    except CannotRun as problem:
        return str(problem)
    return ""


def refusal_of_odd_length() -> str:
    """Return what a forward pass of seven tokens says under sequence parallelism."""
    engine = split_engine(Composition(model="llama", sequence_parallel=True))
    try:
        engine(input_ids=torch.ones(2, 7, dtype=torch.int64))
    except CannotRun as problem:
        return str(problem)
    return ""


def loss_inside_whole_parameters() -> tuple[float, float, float]:
    """Losses of all ranks and of one inside `whole_parameters`, and how much larger logits are once changed there."""
    engine = split_engine(Composition(model="llama", tp=2))
    engine.eval()
    batch = batch_of(0)
    with torch.no_grad():
        output = engine(**batch)
        with engine.whole_parameters(keeps_changes=True):
            inside = engine.module(**batch) if dist.get_rank() == 0 else output
            engine.module.lm_head.weight.mul_(30 if dist.get_rank() == 0 else 1)
        after = engine(**batch)
    assert after.logits.shape[-1] == VOCABULARY
    return float(output.loss), float(inside.loss), float(after.logits.abs().max() / output.logits.abs().max())


def dropped_out() -> dict[str, list[float]]:
    """Return what dropout leaves of ones between a column and a row layer, and after the row layer."""
    transformers: Any = import_module("transformers")
    torch.manual_seed(3)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_embd=16, n_layer=2, n_head=4, n_positions=LENGTH, resid_pdrop=0.5, attn_pdrop=0.5
    )
    engine, *_ = initialize(model=transformers.GPT2LMHeadModel(config), plan=Composition(model="gpt2").plan())
    seen: dict[str, list[float]] = {"own": [], "shared": []}

    def note(name: str) -> Any:
        return lambda module, args, output=None: seen[name].append(float(torch.rand((), device=engine.device)))

    attention = engine.module.transformer.h[0].attn
    attention.c_proj.register_forward_pre_hook(note("own"), prepend=True)
    attention.resid_dropout.register_forward_pre_hook(note("shared"))
    engine.train()
    engine(**batch_of(0))
    first = list(seen["own"])
    engine(**batch_of(0))
    return {"own": first, "again": seen["own"][1:], "shared": seen["shared"]}


def metrics_row() -> Any:
    """The figures of a step of two ranks that share every sample."""
    engine = split_engine(Composition(model="gpt"))
    rows: list[Any] = []
    engine.observers.append(EngineFeed(engine, rows.append, lambda: None))
    split_step(engine, 0)
    return rows[0]


def _with_adapters() -> nn.Module:
    peft: Any = import_module("peft")
    names = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=2, target_modules=names, lora_dropout=0.0, task_type="CAUSAL_LM")
    model: nn.Module = peft.get_peft_model(model_named("llama"), config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # which starts at zero, where A has no gradient
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 10)
    return model


def _adapter_optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([parameter for parameter in parameters if parameter.requires_grad], lr=1e-2)


def adapters_trained(sequence_parallel: bool) -> dict[str, float]:
    """Return how far losses and weights of a model with LoRA's adapters are from those of one process."""
    whole = _with_adapters()
    optimizer, losses = _adapter_optimizer(whole.parameters()), []
    for step in range(4):
        loss = _loss(whole(**batch_of(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    plan = Composition(model="llama", sequence_parallel=sequence_parallel).plan()
    engine, *_ = initialize(model=_with_adapters(), optimizer=_adapter_optimizer, plan=plan)
    split_losses = [split_step(engine, step) for step in range(4)]
    state = engine.state_dict()
    adapters = {name: split for name, split in parts_of(engine.module).splits.items() if "lora_" in name}
    return {
        "loss": max(abs(a - b) for a, b in zip(split_losses, losses, strict=True)),
        "weights": max(float((state[name] - p).abs().max()) for name, p in whole.named_parameters()),
        "split adapters": float(len(adapters)),
    }
