"""Training methods: all weights, those of a pattern, or adapters beside frozen ones (LoRA, DoRA and QLoRA of PEFT).

The script's config, `dsplan run --method` or the plan asks for one. A model that the script has given adapters stays as
it is. Elsewhere they are put into the model in place, so that the script's model, and the names of what is frozen, stay
what they are. Targets mean what they mean to the planner (`planner.models.counting.count`): all linear layers but the
output head, those of attention, names, or a pattern.
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
from planner.question_defaults import LORA_RANK, LORA_TARGETS
from planner.types.plan import Configuration, WorkloadSection
from strategies.config.values import ScriptConfig
from strategies.errors import BackendMissing, CannotRun
from strategies.modules.precision import DTYPES
from strategies.parallel.blocks import QUANTISER, quantised_weights, repeated_blocks
from strategies.parallel.empty import cast, has_stand_ins, is_stand_in, stand_in
from strategies.run_directory.request import named, plan_request

_ATTENTION = ("attn", "attention")
"""Parts of the paths of attention's linear layers, in transformers and in most other blocks."""
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
    """A way to train a model."""

    method: words.Method = "full"
    """`full`, or adapters of a kind."""
    rank: int = LORA_RANK
    """Of the adapters."""
    alpha: float | None = None
    """An adapter's output counts alpha / rank times; None: alpha is twice the rank."""
    targets: str = LORA_TARGETS
    """The layers that get adapters: `all-linear`, `attention`, names with commas, or a regular expression."""
    dropout: float = 0.0
    """Share of an adapter's inputs that is dropped in training."""
    train_only: str = ""
    """A regular expression that is found in the names of the weights that are trained; empty for all."""
    load_dtype: str | None = None
    """Frozen weights are cast to `fp32`, `bf16` or `fp16`, or quantised to `nf4`; None: they stay as they are."""
    precision: str | None = None
    """The plan's, as far as it is known: quantised weights are multiplied in it."""

    @property
    def is_full(self) -> bool:
        """True if the model is trained as the script made it."""
        return self.method == "full" and not self.train_only

    @property
    def in_a_plan(self) -> WorkloadSection:
        """The fields of a plan's `workload` that say it."""
        if self.method == "full":
            return {"train_only": self.train_only}
        return {"method": self.method, "lora_rank": self.rank, "lora_targets": self.targets}


def read_method(script: ScriptConfig, planned: WorkloadSection, precision: str | None) -> TrainingMethod:
    """Return what `dsplan run`, the config, or else the workload of the plan (empty where none is made yet) asks for.

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
    of_plan = replace(of_plan, train_only=script.train_only)
    if section is None:
        return of_plan
    return replace(
        of_plan,
        method=section.method,
        rank=section.rank or LORA_RANK,
        alpha=section.alpha,
        targets=section.targets,
        dropout=section.dropout,
    )


def apply_method(model: nn.Module, method: TrainingMethod) -> str | None:
    """Freeze, quantise and adapt a model in place; return a line that says so, or None if it is as it was.

    Raises:
        CannotRun: the targets or the pattern mean nothing in the model, or its weights cannot be quantised.
        BackendMissing: PEFT, or for `qlora` bitsandbytes, is not installed.
    """
    if method.is_full:
        return None
    if method.method == "full":
        return _freeze(model, method.train_only)
    if method.train_only:
        raise CannotRun(f"train_only says what method {method.method} says too; leave one of them out")
    if has_adapters(model):
        return None
    if method.method == "dora" and has_stand_ins(model):
        raise CannotRun(
            "method dora begins from the lengths of the weights, which are not read yet when adapters are put beside"
            " them; use lora, or load the model with its weights"
        )
    layers = _find_targets(model, method.targets)
    peft = _import_library("peft", method.method, "makes the adapters")
    _narrow_frozen(model, method)
    config = _peft_config(peft, model, method, layers)
    peft.inject_adapter_in_model(config, model)
    holder: Any = model
    holder.peft_config = {"default": config}
    for weight in model.parameters():
        if weight.requires_grad and weight.dtype in (torch.float16, torch.bfloat16):
            weight.data = weight.data.float()  # as get_peft_model does: 16 bits lose small updates
    names = sorted({layer.rpartition(".")[2] for layer in layers})
    return (
        f"{method.method} adapters of rank {method.rank} beside {len(layers)} linear layers ({', '.join(names)}):"
        f" {_count_trained(model)} weights are trained"
    )


def method_of(model: nn.Module) -> TrainingMethod | None:
    """Return the method by which a script's own PEFT model is trained; None where the words of a plan do not say it.

    Plans know one LoRA or DoRA of one rank beside named layers, over weights that are not quantised.
    """
    configs = getattr(model, "peft_config", None)
    if not isinstance(configs, Mapping) or len(configs) != 1 or not has_adapters(model) or quantised_weights(model):
        return None
    (config,) = configs.values()
    targets = getattr(config, "target_modules", None)
    more = ("rank_pattern", "modules_to_save", "layers_to_transform", "trainable_token_indices", "target_parameters")
    if not targets or any(getattr(config, name, None) for name in more) or getattr(config, "bias", "") != "none":
        return None
    frozen = next((weight.dtype for weight in model.parameters() if not weight.requires_grad), torch.float32)
    return TrainingMethod(
        method="dora" if config.use_dora else "lora",
        rank=config.r,
        targets=targets
        if isinstance(targets, str)
        else ",".join(sorted({name.rpartition(".")[2] for name in targets})),
        load_dtype=_DTYPES.get(frozen),
    )


_DTYPES: Mapping[torch.dtype, str] = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def has_adapters(model: nn.Module) -> bool:
    """Return whether a model has adapters of PEFT's beside frozen weights."""
    return any(hasattr(module, "base_layer") and hasattr(module, "lora_A") for module in model.modules())


def wide_adapters(model: nn.Module, plan: Configuration) -> list[nn.Parameter]:
    """Return the adapters that stay in fp32 beside 16-bit weights: those that a plan neither shards nor splits."""
    if plan.strategy not in words.UNSHARDED or plan.tp * plan.pp > 1 or not has_adapters(model):
        return []
    return [weight for weight in model.parameters() if weight.requires_grad and weight.dtype == torch.float32]


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


def select_trained(named: Iterable[Any], model: nn.Module) -> list[Any] | None:
    """Return those weights that the script named which are trained beside adapters, or None for all that are trained.

    Raises:
        CannotRun: the script named groups, of which it is not known where the adapters belong.
    """
    named = list(named)
    if any(isinstance(item, Mapping) for item in named):
        raise CannotRun(
            "initialize: model_parameters= has groups of weights that are frozen beside adapters; leave it out"
        )
    weights = {item[1] if isinstance(item, tuple) else item for item in named}
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    chosen = [weight for weight in trained if weight in weights]
    return None if not chosen or len(chosen) == len(trained) else chosen


def _freeze(model: nn.Module, pattern: str) -> str:
    wanted = _compile("train_only", pattern)
    weights = dict(model.named_parameters())
    trained = {name for name in weights if wanted.search(name)}
    if not trained:
        like = ", ".join(get_close_matches(pattern, weights, n=2, cutoff=0.3) or list(weights)[:2])
        raise CannotRun(f"train_only {pattern!r} matches no weight of {type(model).__name__}; names are like {like}")
    for name, weight in weights.items():
        weight.requires_grad_(weight.requires_grad and name in trained)
    return f"weights that match {pattern!r} are trained: {_count_trained(model)}"


def _count_trained(model: nn.Module) -> str:
    sizes = [(weight.requires_grad, weight.numel()) for weight in model.parameters()]
    return f"{sum(size for is_trained, size in sizes if is_trained):,} of {sum(size for _, size in sizes):,}"


def _linears(model: nn.Module) -> dict[str, nn.Module]:
    """Return the linear layers of a model's blocks by name, or of all of it where it has none, but for its output head.

    Conv1D of transformers (GPT-2) is one.
    """
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


def _find_targets(model: nn.Module, targets: str) -> list[str]:
    """Return the names of the linear layers that are meant.

    Raises:
        CannotRun: there are none.
    """
    linears = _linears(model)
    if targets == "all-linear":
        layers = list(linears)
    elif targets == "attention":
        layers = [name for name in linears if any(word in part for part in name.split(".") for word in _ATTENTION)]
    elif re.fullmatch(r"[\w., ]+", targets):
        names = [part.strip() for part in targets.split(",") if part.strip()]
        layers = [name for name in linears if any(name == each or name.endswith(f".{each}") for each in names)]
    else:
        layers = [name for name in linears if _compile("lora_targets", targets).fullmatch(name)]
    if not layers:
        ends = sorted({name.rpartition(".")[2] for name in linears}) or ["none"]
        near = get_close_matches(targets, ends, n=1)
        remedy = f"did you mean {near[0]}?" if near else f"it has {', '.join(ends)}"
        raise CannotRun(f"lora targets {targets!r} mean no linear layer of {type(model).__name__}; {remedy}")
    return layers


def _compile(key: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as problem:
        raise CannotRun(f"{key} {pattern!r} is no regular expression: {problem}") from None


def _import_library(name: str, method: str, purpose: str) -> Any:
    try:
        return import_module(name)
    except ImportError:
        raise BackendMissing(f"method {method} needs {name}, which {purpose}; pip install {name}") from None


def _peft_config(peft: Any, model: nn.Module, method: TrainingMethod, layers: list[str]) -> Any:
    """Make PEFT's config, with the short names of the layers where these mean them alone, so that it can be read."""
    ends = sorted({layer.rpartition(".")[2] for layer in layers})
    meant = {name for name, _ in model.named_modules() if any(name == end or name.endswith(f".{end}") for end in ends)}
    task = next((word for ending, word in _TASKS.items() if type(model).__name__.endswith(ending)), None)
    heads = [name for name, _ in model.named_children() if name in _HEADS] if task and task != "CAUSAL_LM" else []
    base = getattr(getattr(model, "config", None), "_name_or_path", "")
    return peft.LoraConfig(
        r=method.rank,
        lora_alpha=method.alpha if method.alpha is not None else 2 * method.rank,
        lora_dropout=method.dropout,
        target_modules=ends if meant == set(layers) else layers,
        use_dora=method.method == "dora",
        task_type=task,
        modules_to_save=heads or None,
        base_model_name_or_path=base or None,
    )


def _narrow_frozen(model: nn.Module, method: TrainingMethod) -> None:
    if method.load_dtype not in (None, "nf4", *DTYPES):
        raise CannotRun(
            f"dsplan run loads no frozen weights in {method.load_dtype}; use bf16, or nf4 with method qlora"
        )
    if method.method == "qlora" or method.load_dtype == "nf4":
        _quantise(model, method)
    elif method.load_dtype is not None:
        _cast(model, DTYPES[method.load_dtype])


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    for weight in model.parameters():
        if weight.is_floating_point():
            weight.data = cast(weight.data, dtype)


def _quantise(model: nn.Module, method: TrainingMethod) -> None:
    """Make the linear layers of a model, but for its output head, bitsandbytes' 4-bit ones.

    They are stored in the 16-bit dtype that FSDP2 and ZeRO compute in, since both cast what is of another
    (bitsandbytes' `bnb_4bit_quant_storage`), and their bits are not numbers of it; in fp32 nothing is cast.
    """
    library = _import_library("bitsandbytes", method.method, "stores weights in 4 bits")
    if quantised_weights(model):
        return
    compute = {"fp32": torch.float32, "fp16": torch.float16}.get(method.precision or "", torch.bfloat16)
    storage = torch.uint8 if compute is torch.float32 else compute
    linears = {name: layer for name, layer in _linears(model).items() if isinstance(layer, nn.Linear)}
    if not linears:
        raise CannotRun(f"method {method.method}: {type(model).__name__} has no linear layers to store in 4 bits")
    if len({layer.weight for layer in linears.values()}) < len(linears):
        raise CannotRun(f"method {method.method}: linear layers of {type(model).__name__} share weights; use lora")
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    form = {"compress_statistics": True, "quant_type": "nf4", "quant_storage": storage}

    def store(values: torch.Tensor, layer: nn.Module | None = None) -> Any:
        return library.nn.Params4bit(values, requires_grad=False, module=layer, **form).to(device)

    for name, layer in linears.items():
        narrow = library.nn.Linear4bit(
            layer.in_features, layer.out_features, bias=False, compute_dtype=compute, device="meta", **form
        )
        if is_stand_in(layer.weight):
            codes = stand_in((-(-layer.weight.numel() // (2 * storage.itemsize)), 1), storage)
            narrow.weight = library.nn.Params4bit(codes, requires_grad=False, bnb_quantized=True, **form)
            vars(narrow)[QUANTISER] = store
        else:
            narrow.weight = store(layer.weight.data, narrow)
        narrow.bias = layer.bias
        owner, _, own = name.rpartition(".")
        setattr(model.get_submodule(owner), own, narrow)
    _cast(model, compute)
    holder: Any = model
    holder.is_loaded_in_4bit = True  # how PEFT recognizes it
