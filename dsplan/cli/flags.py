"""Flags that several commands share, grouped as values.

A command takes such a group as one parameter; `with_flags` spells the group out as options for typer.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, Literal, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from hardware_db.errors import DsplanError
from hardware_db.handed_in import quote
from hardware_db.records import dataclass
from hardware_db.units import parse_length
from planner import limits
from planner import vocabulary as words
from planner.question_defaults import EXPERT_IMBALANCE, PLANS_SHOWN

WITH_SUFFIX = "N[k|M]"
"""How help names a number that may be written as 8k or 4M, and how reading a flag knows that it may."""
_COUNTED_IN_THOUSANDS = (limits.TOKENS, limits.SAMPLES)


def number(limit: limits.Limit, text: str, metavar: str = "") -> Any:
    """Return the option of a number within a limit; `units.parse_length` reads tokens and samples such as `8k`."""
    metavar = metavar or (WITH_SUFFIX if limit in _COUNTED_IN_THOUSANDS else "N")
    least, most = (limit.least, limit.most) if limit.fraction else (int(limit.least), int(limit.most))
    return typer.Option(min=least, max=most, metavar=metavar, help=text)


def among(table: str) -> Callable[[str], list[str]]:
    """Return what a shell completes a name with: those of `module:table` that begin with what is written.

    The module is imported when a shell asks; a list of names, separated by commas, is completed at its end.
    """

    def beginning_with(incomplete: str) -> list[str]:
        module, attribute = table.split(":")
        before, comma, begun = incomplete.rpartition(",")
        names = getattr(import_module(module), attribute)
        return [f"{before}{comma}{name}" for name in names if name.startswith(begun)]

    return beginning_with


def _names(catalogue: str) -> Callable[[str], list[str]]:
    """Return the names of a catalogue that a shell completes what is written with.

    They begin with it, in its case or in small letters, as shells compare letters strictly and catalogues do not. One
    with a space would be two words.

    Those that begin with it, in its case or in small letters, as shells compare letters
    strictly and catalogues do not. One with a space would be two words.
    """

    def beginning_with(incomplete: str) -> list[str]:
        from hardware_db import datasheets
        from planner.models.catalogue import every_model

        rows: Any = every_model() if catalogue == "models" else getattr(datasheets, catalogue)()
        spellings = (name for row in rows for name in (row.name, row.name.rpartition("/")[2], *row.aliases))
        written = (name if name.startswith(incomplete) else name.lower() for name in spellings)
        return sorted({name for name in written if name.startswith(incomplete) and " " not in name})

    return beginning_with


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFlags:
    """The model, and the task it is trained for."""

    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Catalogue name, Hub id, config.json, or package.module:factory.",
            autocompletion=_names("models"),
        ),
    ] = None
    model_size: Annotated[str | None, typer.Option(metavar="SIZE", help="A size such as 6.7B instead of a model.")] = (
        None
    )
    task: Annotated[words.Task | None, typer.Option(help="What it is trained for; by default the model's own.")] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareFlags:
    """The devices; with none of these flags, the probed machine."""

    gpus: Annotated[int | None, number(limits.GPUS, "GPUs in total.")] = None
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="GPU, as `dsplan devices` lists it.", autocompletion=_names("devices")),
    ] = None
    nodes: Annotated[int | None, number(limits.GPUS, "Nodes the GPUs are spread over.")] = None
    node_type: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Machine type, as `dsplan devices --nodes` lists it.",
            autocompletion=_names("node_types"),
        ),
    ] = None
    interconnect: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Link between nodes, as `dsplan devices --links` lists it; 4xNAME for four in a node.",
            autocompletion=_names("links"),
        ),
    ] = None
    cluster: Annotated[Path | None, typer.Option(metavar="FILE", help="A cluster written down in YAML.")] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkFlags:
    """The training job, independent of how it is spread over devices."""

    seq_len: Annotated[int | None, number(limits.TOKENS, "Tokens per sample.")] = None
    image_size: Annotated[
        int | None, number(limits.PIXELS, "Pixels of an image's side, for models that make images.")
    ] = None
    source_len: Annotated[int | None, number(limits.TOKENS, "Encoder tokens per sample, for encoder-decoders.")] = None
    global_batch: Annotated[int | None, number(limits.SAMPLES, "Samples per optimizer step, over all GPUs.")] = None
    precision: Annotated[words.Precision | None, typer.Option(help="Types of arithmetic and storage.")] = None
    optimizer: Annotated[words.Optimizer, typer.Option(help="Optimizer, as torch runs it.")] = "adamw"
    attention: Annotated[words.Attention, typer.Option(help="Attention implementation.")] = "sdpa"
    max_memory_gb: Annotated[float | None, number(limits.GIGABYTES, "Memory one GPU may use, in 1e9 bytes.", "GB")] = (
        None
    )
    host_memory_gb: Annotated[
        float | None, number(limits.GIGABYTES, "Memory of one node's host, in 1e9 bytes.", "GB")
    ] = None
    eval_batch: Annotated[
        int | None, number(limits.SAMPLES, "Count evaluation too, with so many samples per GPU and evaluation step.")
    ] = None
    eval_keep: Annotated[
        int | None,
        number(
            limits.SAMPLES,
            "Evaluation steps whose logits stay on the GPU at once, as metrics need them; else none.",
            "N",
        ),
    ] = None
    save: Annotated[
        words.Save,
        typer.Option(help="Count saving too: every rank its own part (sharded), or all weights on rank 0 (full)."),
    ] = "none"
    code: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="Whose modules run: transformers, torchtitan, megatron and others.")
    ] = "transformers"
    compile: Annotated[bool, typer.Option("--compile", help="Blocks are under torch.compile.")] = False
    loss: Annotated[
        words.Loss | None,
        typer.Option(
            help="How logits become a loss: all at once, in chunks, fused without logits, or in TRL's tiles; by default"
            " as the task's trainer does it."
        ),
    ] = None
    method: Annotated[words.Method, typer.Option(help="All weights, or adapters beside frozen ones.")] = "full"
    lora_rank: Annotated[int | None, number(limits.SAMPLES, "Rank of the adapters.", "N")] = None
    lora_targets: Annotated[
        str | None, typer.Option(metavar="WHAT", help="attention, all-linear, or a pattern of module names.")
    ] = None
    train_only: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="Train only weights whose names match; the rest is frozen.")
    ] = None
    load_dtype: Annotated[
        words.LoadDtype | None, typer.Option(help="What weights are loaded as; by default what the precision says.")
    ] = None
    fp8_recipe: Annotated[words.Fp8Recipe | None, typer.Option(help="How fp8 and fp4 products are scaled.")] = None
    ema: Annotated[bool, typer.Option("--ema", help="Keep an exponential moving average of the weights.")] = False
    expert_imbalance: Annotated[
        float | None,
        number(
            limits.IMBALANCE,
            f"Tokens of the busiest rank's experts over the mean; {EXPERT_IMBALANCE:g} if left open.",
            "R",
        ),
    ] = None
    prompt_len: Annotated[int | None, number(limits.TOKENS, "Tokens of a prompt.")] = None
    completion_len: Annotated[
        str | None,
        typer.Option(metavar="MEAN[:MAX]", help="Tokens of a completion on average, and at most where that is more."),
    ] = None
    generations: Annotated[int | None, number(limits.SAMPLES, "Completions of a prompt; 8 if left open.", "N")] = None
    prompts_per_step: Annotated[
        int | None, number(limits.SAMPLES, "Prompts of one generation; by default those of an optimizer step.", "N")
    ] = None
    num_iterations: Annotated[
        int | None, number(limits.SAMPLES, "Times that each completion is trained on; 1 if left open.", "N")
    ] = None
    beta: Annotated[
        float | None,
        number(limits.WEIGHT, "Weight of the reference model; GRPO has none at 0, its default, PPO's is 0.05.", "B"),
    ] = None
    rollout: Annotated[
        words.Rollout | None,
        typer.Option(help="Who generates: the trained model itself, an engine on its GPUs, or one on GPUs apart."),
    ] = None
    rollout_gpus: Annotated[int | None, number(limits.GPUS, "Of the GPUs, those that only generate.")] = None
    rollout_tp: Annotated[int | None, number(limits.GPUS, "GPUs that share an engine; 1 if left open.")] = None
    rollout_memory: Annotated[
        float | None, number(limits.SHARE, "Share of a GPU's memory that an engine takes.", "SHARE")
    ] = None
    rollout_sleep: Annotated[
        bool | None,
        typer.Option(
            "--rollout-sleep/--no-rollout-sleep", help="An engine beside training frees its memory in between."
        ),
    ] = None
    steps_off: Annotated[
        int | None, number(limits.ROUNDS, "Generations that may run ahead of training; 0 if left open.", "N")
    ] = None
    precompute_ref: Annotated[
        bool, typer.Option("--precompute-ref", help="The reference model runs before training, once.")
    ] = False


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigurationFlags:
    """One exact configuration, for `estimate`."""

    strategy: Annotated[
        words.Strategy | None, typer.Option(help="How the states are spread; single on one GPU, ddp on several.")
    ] = None
    backend: Annotated[words.Backend | None, typer.Option(help="Who runs the strategy.")] = None
    micro_batch: Annotated[int | None, number(limits.SAMPLES, "Samples per forward pass and GPU; 1 if left open.")] = (
        None
    )
    grad_accum: Annotated[int | None, number(limits.SAMPLES, "Forward passes per optimizer step.", "N")] = None
    checkpointing: Annotated[words.Checkpointing, typer.Option(help="Activations that are computed twice.")] = "none"
    offload: Annotated[words.Offload, typer.Option(help="States that live in host memory or on NVMe.")] = "none"
    offload_ratio: Annotated[
        float, number(limits.SHARE, "Share of it that leaves the device, with native ZeRO.", "R")
    ] = 1.0
    gradient_compression: Annotated[words.Compression, typer.Option(help="What gradients are between ranks.")] = "none"
    activations_on_host: Annotated[
        bool, typer.Option("--activations-on-host", help="Keep in host memory what checkpointing keeps.")
    ] = False
    hpz: Annotated[int, number(limits.GPUS, "ZeRO++: ranks that share a second copy of ZeRO-3's weights.")] = 1
    quantized_weights: Annotated[
        bool, typer.Option("--quantized-weights", help="ZeRO++: ZeRO-3's weights travel in 8 bits.")
    ] = False
    quantized_gradients: Annotated[
        bool, typer.Option("--quantized-gradients", help="ZeRO++: ZeRO-3's gradients travel in 4 bits.")
    ] = False
    shard: Annotated[
        int | None,
        number(limits.GPUS, "Ranks that share one set of states (zero1-3, fsdp, hsdp); by default what it says."),
    ] = None
    tp: Annotated[int, number(limits.GPUS, "Tensor-parallel degree.")] = 1
    pp: Annotated[int, number(limits.GPUS, "Pipeline-parallel degree.")] = 1
    cp: Annotated[int, number(limits.GPUS, "Context-parallel degree: ranks that split every sequence.")] = 1
    ep: Annotated[int, number(limits.GPUS, "Expert-parallel degree: ranks the experts are spread over.")] = 1
    sequence_parallel: Annotated[
        bool | None,
        typer.Option(
            "--sequence-parallel/--no-sequence-parallel",
            help="tp ranks split the sequence between their products; on where tp > 1 and the code does it.",
        ),
    ] = None
    pp_schedule: Annotated[words.Schedule, typer.Option(help="Order of a pipeline's forwards and backwards.")] = "1f1b"
    virtual_stages: Annotated[int, number(limits.GPUS, "Stages per rank of an interleaved pipeline.", "V")] = 1
    checkpoint_every: Annotated[int, number(limits.GPUS, "Recompute the first block and every K-th after it.", "K")] = 1
    recompute_modules: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES", help="Parts of a block that Megatron's selective checkpointing drops: moe_act,layernorm."
        ),
    ] = None
    steps_per_generation: Annotated[
        int | None, number(limits.SAMPLES, "Micro-batches of one generation, as TRL counts them.", "N")
    ] = None


@dataclass(frozen=True, kw_only=True, slots=True)
class MaximumFlags:
    """Of which ways to run the most that fits is asked, for `max`."""

    strategy: Annotated[words.Strategy | None, typer.Option(help="Only this strategy; by default every one.")] = None
    backend: Annotated[words.Backend | None, typer.Option(help="Who runs the strategy.")] = None
    checkpointing: Annotated[
        words.Checkpointing | None, typer.Option(help="Only so; by default none and full, each a row.")
    ] = None
    offload: Annotated[
        words.Offload | None, typer.Option(help="Only so; by default none, and the most that a strategy can.")
    ] = None
    shard: Annotated[
        int | None, number(limits.GPUS, "Ranks that share one set of states; by default what the strategy says.")
    ] = None
    tp: Annotated[int, number(limits.GPUS, "Tensor-parallel degree.")] = 1
    pp: Annotated[int, number(limits.GPUS, "Pipeline-parallel degree.")] = 1
    cp: Annotated[int, number(limits.GPUS, "Context-parallel degree.")] = 1
    ep: Annotated[int, number(limits.GPUS, "Expert-parallel degree.")] = 1


ExactFlag = Annotated[
    bool,
    typer.Option(
        "--exact",
        help="Take the memory from a trace of the real module, which needs torch but neither weights nor a GPU; kept,"
        " so that asking again is instant.",
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class GoalFlags:
    """Limits on the plans that count, and their order."""

    objective: Annotated[words.Objective, typer.Option(help="What the first plan is best at.")] = "throughput"
    top: Annotated[int, number(limits.PLANS, "How many plans to show.")] = PLANS_SHOWN
    fastest: Annotated[
        bool, typer.Option("--fastest", help="By predicted figures alone, without putting simpler plans first.")
    ] = False
    price: Annotated[float | None, number(limits.USD_PER_HOUR, "What one GPU costs per hour.", "USD")] = None
    tokens: Annotated[str | None, typer.Option(metavar="N", help="Tokens of the whole training, such as 300B.")] = None
    deadline: Annotated[
        str | None, typer.Option(metavar="TIME", help="Only plans that train --tokens in so long: 36h, 14d or 2w.")
    ] = None
    pareto: Annotated[
        bool, typer.Option("--pareto", help="Show every plan that no other beats in time, memory and GPUs at once.")
    ] = False
    backend: Annotated[
        Literal["deepspeed", "native"] | None,
        typer.Option(help="Who runs ZeRO; deepspeed where it has the precision, else native."),
    ] = None
    offload: Annotated[words.Offload | None, typer.Option(help="Only plans with this offload; by default any.")] = None
    shard: Annotated[
        int | None, number(limits.GPUS, "Only plans where so many ranks share one set of states; by default any.")
    ] = None
    all_plans: Annotated[
        bool, typer.Option("--all-plans", help="Rank plans that only other trainers run beside those of `dsplan run`.")
    ] = False


@dataclass(frozen=True, kw_only=True, slots=True)
class RankingFlags(GoalFlags):
    """Choices of what is shown of the plans."""

    plot: Annotated[
        bool, typer.Option("--plot", help="Draw how throughput grows from a quarter of the GPUs to four times as many.")
    ] = False
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write every shown plan and its configs into this directory.")
    ] = None


JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON.", rich_help_panel="Output")]


class GroupedCommand(TyperCommand):
    """A command whose help lists its flags by what they are about; its epilog has an example in every line."""

    def get_help(self, ctx: Any) -> str:
        """Return the help of this command as dsplan lays it out."""
        from dsplan.cli.help import help_text

        return help_text(self, ctx)


class CommandGroup(TyperGroup):
    """Commands whose help is that of `GroupedCommand`."""

    def summaries(self) -> dict[str, str]:
        """Return what each command does, by name."""
        return {name: command.get_short_help_str(limit=1000) for name, command in self.commands.items()}

    def get_help(self, ctx: Any) -> str:
        """Return the help of this command as dsplan lays it out."""
        from dsplan.cli.help import help_text

        return help_text(self, ctx)


def with_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Replace every parameter of `command` that is a group of flags by the group's fields.

    That takes milliseconds, so a command gets it when it is loaded and not when its module is.

    That takes milliseconds, so a command gets it when it is loaded and not when its module is.

    Field types keep their `Annotated[..., typer.Option(...)]`, which is all that typer reads.
    """
    hints = get_type_hints(command, include_extras=True)
    groups = {name: hint for name, hint in hints.items() if hasattr(hint, "__dataclass_fields__")}

    @functools.wraps(command)
    def flat(**values: Any) -> Any:
        packed = {}
        for name, group in groups.items():
            packed[name] = group(**{item.name: values.pop(item.name) for item in fields(group)})
        return command(**packed, **values)

    parameters = []
    for name, parameter in inspect.signature(command).parameters.items():
        group = groups.get(name)
        one = parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        parameters += _spell_out(group) if group else [one]
    flat.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return flat


def _spell_out(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    panel, parameters = group.__name__.removesuffix("Flags"), []
    for item in fields(group):
        panel = _PANEL_FROM.get((group.__name__, item.name), panel)
        hints[item.name].__metadata__[0].rich_help_panel = panel
        parameters.append(
            inspect.Parameter(
                item.name, inspect.Parameter.KEYWORD_ONLY, default=item.default, annotation=hints[item.name]
            )
        )
    return parameters


_PANEL_FROM = {
    ("MaximumFlags", "strategy"): "Configuration",
    ("WorkFlags", "code"): "Code",
    ("WorkFlags", "prompt_len"): "Post-training",
    ("RankingFlags", "objective"): "Goal",
    ("RankingFlags", "plot"): "Output",
}
"""Under which heading help lists a group's flags from one on; before, it is the group's own name."""

_WHOLE = re.compile(r"[-+]?[0-9]+")
_SPELLINGS = {
    "int": _WHOLE,
    "integer": _WHOLE,  # as older releases of typer call it
    "float": re.compile(r"[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?"),
}
_MOST_DIGITS = 300
SMALLEST = 1e-6
"""A number between this and 0 is a slip: no flag has a use for it."""


def read_strictly(command: Any) -> Any:
    """Return a command, or a group of them, whose flags take numbers in plain digits and refuse what is empty.

    `int` and `float` also read other scripts' digits, underscores, NaN and infinity, and a path that is empty means
    the working directory.
    """
    for parameter in command.params:
        parameter.type_cast_value = functools.partial(_cast, parameter, parameter.type_cast_value)
    for inner in getattr(command, "commands", {}).values():
        read_strictly(inner)
    return command


def _cast(parameter: Any, cast: Callable[[Any, Any], Any], context: Any, value: Any) -> Any:
    try:
        if isinstance(value, str) and getattr(parameter, "metavar", None) == WITH_SUFFIX:
            value = _in_plain_digits(value)
        for word in value if isinstance(value, list | tuple) else (value,):
            if isinstance(word, str):
                _check_word(parameter, word)
        return cast(context, value)
    except typer.BadParameter as error:
        error.ctx, error.param = error.ctx or context, error.param or parameter
        raise


def _in_plain_digits(word: str) -> str:
    """`8k` as `8192`; a word without a suffix as it is."""
    if word[-1:] not in _LENGTH_SUFFIXES or len(word) > _MOST_DIGITS:
        return word
    try:
        return str(parse_length(word))
    except DsplanError as error:
        raise typer.BadParameter(str(error)) from None


_LENGTH_SUFFIXES = tuple("kKmM")


def _check_word(parameter: Any, word: str) -> None:
    """Refuse a word of the command line that no flag of its kind has a use for.

    Raises:
        BadParameter: it is no number in plain digits, or a path or a value that is empty or has a NUL character.
    """
    kind = parameter.type.name.removesuffix(" range")
    is_path = kind in ("path", "directory_or_address")  # a parser is named as its function is
    spelling = _SPELLINGS.get(kind)
    if spelling is not None:
        small = kind == "float" and spelling.fullmatch(word) and 0 < abs(float(word)) < SMALLEST
        if len(word) > _MOST_DIGITS or not spelling.fullmatch(word) or small:
            raise typer.BadParameter(f"{quote(word)} is not a number that it takes")
        return
    if not word.strip() and (is_path or parameter.param_type_name == "option"):
        raise typer.BadParameter(f"{quote(word)} is empty; give it a value or leave it out")
    if is_path:
        _check_path(word)
    elif parameter.nargs != -1 and not _is_text(word):  # what follows a script is the script's own
        raise typer.BadParameter(f"{quote(word)} is no text; write it in UTF-8 and without NUL characters")


def _check_path(word: str) -> None:
    """Refuse a path that the system cannot even look up; one that is not there may be made later."""
    try:
        os.stat(word)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise typer.BadParameter(f"{quote(word)} cannot be used ({error.strerror}); name another path") from None
    except ValueError:
        raise typer.BadParameter(f"{quote(word)} cannot be used (it has a NUL character); name another path") from None


def _is_text(word: str) -> bool:
    try:
        return b"\0" not in word.encode()
    except UnicodeEncodeError:
        return False
