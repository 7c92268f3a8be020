"""Which weights are trained: adapters beside frozen ones (LoRA, DoRA and QLoRA, PEFT's own modules), or those of a
pattern, as the script's config, `dsplan run --method` or the plan asks for it.

A model that the script has given adapters stays as it is. Elsewhere the adapters are put into the model in place, so
that the script's model, and the names of what is frozen, stay what they are. Targets mean what they mean to the planner
(`planner.models.counting.count`): all linear layers but the output head, those of attention, names, or a pattern.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from importlib import import_module
from typing import Any

import torch
from torch import nn

from planner import vocabulary as words
from planner.cost.combinations import Adapted, why_refused
from planner.models.counting.adapters import LORA_RANK, LORA_TARGETS
from planner.types.plan import Configuration, WorkloadSection
from strategies.config import ScriptConfig
from strategies.errors import BackendMissing, CannotRun
from strategies.parallel.blocks import quantised_weights, repeated_blocks
from strategies.run_directory.request import named, plan_request

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_ATTENTION = ("attn", "attention")
"""What the path of a linear layer of attention has in one of its parts, in transformers and in most other blocks."""
_TASKS = {
    "ForCausalLM": "CAUSAL_LM",
    "LMHeadModel": "CAUSAL_LM",
    "ForSequenceClassification": "SEQ_CLS",
    "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
    "ForConditionalGeneration": "SEQ_2_SEQ_LM",
}
"""PEFT's word for a task by the ending of a class's name: `PeftModel.from_pretrained` chooses a wrapper by it."""
_HEADS = ("classifier", "score", "qa_outputs")
"""New heads of transformers' classifiers, which PEFT trains whole beside the adapters."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingMethod:
    """What is trained of a model."""

    method: words.Method = "full"
    """`full`, or adapters of a kind."""
    rank: int = LORA_RANK
    """Of the adapters."""
    alpha: float | None = None
    """An adapter's output counts alpha / rank times; None: alpha is twice the rank."""
    targets: str = LORA_TARGETS
    """What adapters are put beside: `all-linear`, `attention`, names with commas, or a regular expression."""
    dropout: float = 0.0
    """Share of an adapter's inputs that is dropped in training."""
    train_only: str = ""
    """A regular expression that is found in the names of what is trained; empty for all."""
    load_dtype: str | None = None
    """What frozen weights are cast to (`fp32`, `bf16`, `fp16`) or quantised to (`nf4`); None: they stay as they are."""
    precision: str | None = None
    """The plan's, as far as it is known: what quantised weights are multiplied in."""

    @property
    def is_full(self) -> bool:
        """Whether the model is trained as the script made it."""
        return self.method == "full" and not self.train_only

    @property
    def in_a_plan(self) -> WorkloadSection:
        """The fields of a plan's `workload` that say it."""
        if self.method == "full":
            return {"train_only": self.train_only}
        return {"method": self.method, "lora_rank": self.rank, "lora_targets": self.targets}


def read_method(script: ScriptConfig, planned: WorkloadSection, precision: str | None) -> TrainingMethod:
    """What `dsplan run`, the config, or else the workload of the plan (empty where none is made yet) asks for.

    Raises:
        CannotRun: the config and the plan contradict each other.
    """
    requested, section = named(plan_request().method), script.lora
    of_plan = TrainingMethod(
        method=planned.get("method", "full"),
        rank=planned.get("lora_rank") or LORA_RANK,
        targets=planned.get("lora_targets") or LORA_TARGETS,
        train_only=planned.get("train_only", ""),
        load_dtype=planned.get("load_dtype"),
        precision=script.precision or precision,
    )
    if requested:
        fields = {"lora_rank": "rank", "lora_targets": "targets"}
        return replace(of_plan, **{fields.get(name, name): value for name, value in requested.items()}, load_dtype=None)
    if section is None and not script.train_only:
        return of_plan
    method = section.method if section is not None else "full"
    if planned.get("method") not in (None, method):
        raise CannotRun(
            f"the plan is for method {planned['method']} and the script's config asks for {method}; plan again with"
            f" --method {method}, or change the config"
        )
    if section is None:
        return replace(of_plan, train_only=script.train_only)
    return replace(
        of_plan,
        method=section.method,
        rank=section.rank or LORA_RANK,
        alpha=section.alpha,
        targets=section.targets,
        dropout=section.dropout,
        train_only=script.train_only,
    )


def apply_method(model: nn.Module, asked: TrainingMethod) -> str:
    """Freeze, quantise and adapt a model in place; what was done in one line, empty where nothing was.

    Raises:
        CannotRun: the targets or the pattern mean nothing in the model, or its weights cannot be quantised.
        BackendMissing: PEFT, or for `qlora` bitsandbytes, is not installed.
    """
    if asked.is_full:
        return ""
    if asked.method == "full":
        return _freeze(model, asked.train_only)
    if asked.train_only:
        raise CannotRun(f"train_only says what method {asked.method} says too; leave one of them out")
    if has_adapters(model):
        return ""
    layers = _targets(model, asked.targets)
    peft = _library("peft", asked.method, "makes the adapters")
    if asked.load_dtype not in (None, "nf4", *_DTYPES):
        raise CannotRun(f"dsplan run loads no frozen weights in {asked.load_dtype}; use bf16, or nf4 with method qlora")
    if asked.method == "qlora" or asked.load_dtype == "nf4":
        _quantise(model, asked)
    elif asked.load_dtype is not None:
        _cast(model, _DTYPES[asked.load_dtype])
    config = _peft_config(peft, model, asked, layers)
    peft.inject_adapter_in_model(config, model)
    holder: Any = model
    holder.peft_config = {"default": config}
    if asked.precision != "bf16-pure":
        for weight in model.parameters():
            if weight.requires_grad and weight.dtype in (torch.float16, torch.bfloat16):
                weight.data = weight.data.float()  # as get_peft_model does: 16 bits lose small updates
    names = sorted({layer.rpartition(".")[2] for layer in layers})
    trained, whole = _counted(model)
    return (
        f"{asked.method} adapters of rank {asked.rank} beside {len(layers)} linear layers ({', '.join(names)}):"
        f" {trained:,} of {whole:,} weights are trained"
    )


def has_adapters(model: nn.Module) -> bool:
    """Whether a model has adapters of PEFT's beside frozen weights."""
    return any(hasattr(module, "base_layer") and hasattr(module, "lora_A") for module in model.modules())


def require_trainable(model: nn.Module, configuration: Configuration) -> None:
    """Check a plan against the adapters that a model has, whoever put them in, and what they lie beside.

    Raises:
        CannotRun: the plan cannot train them; the planner's sentence.
    """
    has_magnitudes = any(len(getattr(module, "lora_magnitude_vector", ())) for module in model.modules())
    method: words.Method = "dora" if has_magnitudes else "lora"
    adapted = Adapted(method=method, load_dtype="nf4" if quantised_weights(model) else None)
    if why := why_refused(configuration, adapted):
        raise CannotRun(f"the plan: {why}")


def select_trained(given: Iterable[Any], model: nn.Module) -> list[Any] | None:
    """What an optimizer is to train after adapters were put beside weights that the script named before; None: all that
    is trained.

    Raises:
        CannotRun: the script named groups, of which it is not known where the adapters belong.
    """
    given = list(given)
    if any(isinstance(each, Mapping) for each in given):
        raise CannotRun(
            "initialize: model_parameters= has groups of weights that are frozen beside adapters; leave it out"
        )
    named = {each for each in (each[1] if isinstance(each, tuple) else each for each in given) if each.requires_grad}
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return None if not named or len(named) == len(trained) else [weight for weight in trained if weight in named]


def _freeze(model: nn.Module, pattern: str) -> str:
    wanted = _compiled("train_only", pattern)
    named = list(model.named_parameters())
    trained = [name for name, _ in named if wanted.search(name)]
    if not trained:
        raise CannotRun(f"train_only {pattern!r} matches no weight of {type(model).__name__}; {_like(pattern, named)}")
    for name, weight in named:
        weight.requires_grad_(weight.requires_grad and name in set(trained))
    found, whole = _counted(model)
    return f"weights that match {pattern!r} are trained: {found:,} of {whole:,}"


def _like(pattern: str, named: Iterable[tuple[str, nn.Parameter]]) -> str:
    names = [name for name, _ in named]
    return f"names are like {', '.join(get_close_matches(pattern, names, n=2, cutoff=0.3) or names[:2])}"


def _counted(model: nn.Module) -> tuple[int, int]:
    """Trained weights, and all."""
    sizes = [(weight.requires_grad, weight.numel()) for weight in model.parameters()]
    return sum(size for is_trained, size in sizes if is_trained), sum(size for _, size in sizes)


def _linears(model: nn.Module) -> dict[str, nn.Module]:
    """The linear layers of a model's blocks, or of all of it where it has none, but for its output head, by name;
    transformers' Conv1D (GPT-2) is one."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    inside = {part for block in repeated_blocks(model) for part in block.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D")
        and module is not head
        and name.rpartition(".")[2] not in _HEADS
        and (not inside or module in inside)
    }


def _targets(model: nn.Module, wanted: str) -> list[str]:
    """The names of the linear layers that are meant.

    Raises:
        CannotRun: there are none.
    """
    linears = _linears(model)
    if wanted == "all-linear":
        found = list(linears)
    elif wanted == "attention":
        found = [name for name in linears if any(word in part for part in name.split(".") for word in _ATTENTION)]
    elif re.fullmatch(r"[\w., ]+", wanted):
        names = [part.strip() for part in wanted.split(",") if part.strip()]
        found = [name for name in linears if any(name == each or name.endswith(f".{each}") for each in names)]
    else:
        found = [name for name in linears if _compiled("lora_targets", wanted).fullmatch(name)]
    if not found:
        known = sorted({name.rpartition(".")[2] for name in linears}) or ["none"]
        near = get_close_matches(wanted, known, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise CannotRun(
            f"lora targets {wanted!r} mean no linear layer of {type(model).__name__}{meant or '; it has '}"
            + ("" if meant else ", ".join(known))
        )
    return found


def _compiled(what: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as problem:
        raise CannotRun(f"{what} {pattern!r} is no regular expression: {problem}") from None


def _library(name: str, method: str, what: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise BackendMissing(f"method {method} needs {name}, which {what}; pip install {name}") from None


def _peft_config(peft: Any, model: nn.Module, asked: TrainingMethod, layers: list[str]) -> Any:
    """PEFT's config: the short names of the layers where these mean them alone, so that it can be read."""
    ends = sorted({layer.rpartition(".")[2] for layer in layers})
    meant = {name for name, _ in model.named_modules() if any(name == end or name.endswith(f".{end}") for end in ends)}
    task = next((word for ending, word in _TASKS.items() if type(model).__name__.endswith(ending)), None)
    heads = [name for name, _ in model.named_children() if name in _HEADS] if task and task != "CAUSAL_LM" else []
    base = getattr(getattr(model, "config", None), "_name_or_path", "")
    return peft.LoraConfig(
        r=asked.rank,
        lora_alpha=asked.alpha if asked.alpha is not None else 2 * asked.rank,
        lora_dropout=asked.dropout,
        target_modules=ends if meant == set(layers) else layers,
        use_dora=asked.method == "dora",
        task_type=task,
        modules_to_save=heads or None,
        base_model_name_or_path=base or None,
    )


# Frozen weights in fewer bits.


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    for weight in model.parameters():
        if weight.is_floating_point():
            weight.data = weight.data.to(dtype)


def _quantise(model: nn.Module, asked: TrainingMethod) -> None:
    """Make the linear layers of a model, but for its output head, bitsandbytes' 4-bit ones.

    They are stored in the 16-bit dtype that FSDP2 and ZeRO compute in, since both cast what is of another
    (bitsandbytes' `bnb_4bit_quant_storage`), and their bits are not numbers of it; in fp32 nothing is cast.
    """
    library = _library("bitsandbytes", asked.method, "stores weights in 4 bits")
    if quantised_weights(model):
        return
    compute = {"fp32": torch.float32, "fp16": torch.float16}.get(asked.precision or "", torch.bfloat16)
    storage = torch.uint8 if compute is torch.float32 else compute
    linears = {name: layer for name, layer in _linears(model).items() if isinstance(layer, nn.Linear)}
    if not linears:
        raise CannotRun(f"method {asked.method}: {type(model).__name__} has no linear layers to store in 4 bits")
    if len({layer.weight for layer in linears.values()}) < len(linears):
        raise CannotRun(f"method {asked.method}: linear layers of {type(model).__name__} share weights; use lora")
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    for name, layer in linears.items():
        narrow = library.nn.Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=False,
            compute_dtype=compute,
            compress_statistics=True,
            quant_type="nf4",
            quant_storage=storage,
            device="meta",
        )
        narrow.weight = library.nn.Params4bit(
            layer.weight.data,
            requires_grad=False,
            compress_statistics=True,
            quant_type="nf4",
            quant_storage=storage,
            module=narrow,
        ).to(device)
        narrow.bias = layer.bias
        owner, _, own = name.rpartition(".")
        setattr(model.get_submodule(owner), own, narrow)
    _cast(model, compute)
    holder: Any = model
    holder.is_loaded_in_4bit = True  # how PEFT recognizes it
