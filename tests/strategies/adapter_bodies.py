"""A small Llama whose adapters are trained, saved and exported; what the tests of adapters send to ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from planner.types.plan import Plan
from strategies.engine.initialize import initialize
from tests.strategies.training_bodies import Recipe

ADAPTERS = {"rank": 4, "targets": "q_proj,v_proj,down_proj"}
VOCABULARY = 64


def llama(*, shift: float = 0.0) -> Any:
    """The base model, the same in every process; `shift` makes another one of it."""
    import transformers  # slow to import, and only ranks of these tests need it

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight.add_(shift)
    return model


def batch_of(step: int) -> torch.Tensor:
    """The ids of a step's global batch, [12, 6]."""
    return torch.randint(0, VOCABULARY, (12, 6), generator=torch.Generator().manual_seed(100 + step))


def engine_of(recipe: Recipe, method: str, *, shift: float = 0.0, trainable_only: bool = False, tp: int = 1) -> Any:
    """An engine that trains adapters: put in by the config, or by the script where the method is `own`."""
    model = llama(shift=shift)
    config: dict[str, Any] = {"checkpoint": {"trainable_only": trainable_only}}
    torch.manual_seed(1)
    if method == "own":
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    else:
        config["lora"] = {"method": method, **ADAPTERS}
    engine, *_ = initialize(
        model=model,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
        plan=plan_of(recipe, tp),
        config=config,
    )
    return engine


def plan_of(recipe: Recipe, tp: int) -> Plan:
    """The recipe's plan, for ranks of which as many split every layer."""
    plan = recipe.plan()
    chosen, readers = plan.configuration, recipe.world_size // tp
    replicas = readers if recipe.strategy in ("single", "ddp") else 1
    split = replace(
        chosen,
        dp_replicate=replicas,
        dp_shard=readers // replicas,
        tp=tp,
        micro_batch_size=chosen.micro_batch_size * tp,
        sequence_parallel=tp > 1,
    )
    return replace(plan, configuration=split)


def train(engine: Any, steps: range) -> list[float]:
    """The mean loss of every step over the global batch."""
    losses, rank, ranks = [], engine.data_parallel_rank, engine.data_parallel_size
    for step in steps:
        own, total = batch_of(step)[rank::ranks], torch.zeros(())
        for ids in own.chunk(engine.configuration.gradient_accumulation_steps):
            loss = engine(input_ids=ids, labels=ids).loss
            engine.backward(loss)
            engine.step()
            total = total + loss.detach().float()
        total = total / engine.configuration.gradient_accumulation_steps
        if ranks > 1:
            dist.all_reduce(total)
        losses.append(total.item() / ranks)
    return losses


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapted:
    """The results of training adapters on rank 0."""

    losses: list[float]
    adapters: dict[str, torch.Tensor]
    frozen_changed: list[str]
    optimized: int
    gradients_of_frozen: int


def adapters_after(recipe: Recipe, method: str, tp: int = 1) -> Adapted:
    """Five steps."""
    engine = engine_of(recipe, method, tp=tp)
    losses = train(engine, range(5))
    after = engine.state_dict()
    before = llama().state_dict()
    narrow = next(weight for name, weight in after.items() if "lora_" not in name).dtype
    changed = []
    for name, weight in after.items():
        own = name.removeprefix("base_model.model.").replace(".base_layer.", ".")
        if own in before and not torch.equal(weight, before[own].to(narrow)):
            changed.append(name)
    frozen = [weight for weight in engine.module.parameters() if not weight.requires_grad]
    return Adapted(
        losses=losses,
        adapters={name: weight for name, weight in after.items() if "lora_" in name},
        frozen_changed=changed,
        optimized=sum(weight.numel() for group in engine.optimizer.param_groups for weight in group["params"]),
        gradients_of_frozen=sum(weight.grad is not None for weight in frozen),
    )


def saved_and_exported(recipe: Recipe, method: str, directory: Path, tp: int = 1) -> tuple[list[float], float]:
    """The losses of two steps after a checkpoint of the adapters alone, and that of the exported weights."""
    engine = engine_of(recipe, method, trainable_only=True, tp=tp)
    train(engine, range(2))
    engine.save_checkpoint(directory)
    engine.export_checkpoint(directory / "adapter")
    engine.export(directory / "merged", merged=True)
    with torch.no_grad():
        exported = engine(input_ids=batch_of(9), labels=batch_of(9)).loss.item()
    return train(engine, range(2, 4)), exported


def exported_from_stages(directory: Path) -> None:
    """The adapters of a pipeline of two ranks after a step, exported and in a checkpoint."""
    recipe = Recipe(strategy="single", accumulation=2)
    plan = recipe.plan()
    split = replace(plan.configuration, strategy="ddp", pp=2)
    model = llama()
    torch.manual_seed(1)
    engine, *_ = initialize(
        model=model,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-3),
        plan=replace(plan, configuration=split),
        config={"lora": {"method": "lora", **ADAPTERS}},
    )
    ids = batch_of(0)
    engine.train_batch({"input_ids": ids, "labels": ids})
    engine.export_checkpoint(directory / "adapter")
    engine.save_checkpoint(directory / "saved", trainable_only=True)


def resumed(recipe: Recipe, method: str, directory: Path, shift: float = 0.0) -> list[float]:
    """The losses of two steps over the base model, or another one, with the saved adapters."""
    engine = engine_of(recipe, method, shift=shift)
    engine.load_checkpoint(directory)
    return train(engine, range(2, 4))


def losses_of_exports(directory: Path) -> tuple[float, float]:
    """The loss that PEFT gives with the exported adapters, and transformers with the merged weights."""
    import peft
    import transformers

    ids = batch_of(9)
    adapted = peft.PeftModel.from_pretrained(llama(), str(directory / "adapter"))
    merged = transformers.LlamaForCausalLM.from_pretrained(str(directory / "merged"))
    models: tuple[nn.Module, ...] = (adapted, merged)
    first, second = (model(input_ids=ids, labels=ids).loss.item() for model in models)
    return first, second
