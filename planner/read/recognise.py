"""Files and a command to one reading: which trainer's they are, by their content, and what all of them say together."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

from hardware_db.errors import BrokenFile, DsplanError, UnknownName
from hardware_db.records import dataclass
from planner.read.documents import Files, handed_in, parse_config, read_source
from planner.read.form import COMMAND, Notebook, Reading, Setting, Source
from planner.read.launchers import (
    Launch,
    argument_settings,
    count_gpus,
    count_nodes,
    launches,
    override_settings,
    sbatch_settings,
)
from planner.read.manifests import only_document, task_of
from planner.read.sharding import (
    close_accelerate,
    close_deepspeed,
    merge_accelerate,
    merge_deepspeed,
    read_accelerate,
    read_deepspeed,
    read_deepspeed_alone,
)
from planner.read.shell import Command, Script, Word, parse_script
from planner.read.trainers import TRAINERS


class NoTraining(DsplanError):
    """A file that is read and says nothing of a training: inference, a merge, data."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """A format: how its keys are recognised, and what reads them."""

    trainer: str
    recognise: Callable[[frozenset[str]], bool]
    read: Callable[[Notebook, Files, str], None]
    why_no_training: Callable[[Notebook, str], str]


_MODULES: Mapping[str, str] = {
    "axolotl": "planner.read.axolotl",
    "llama-factory": "planner.read.llamafactory",
    "ms-swift": "planner.read.ms_swift",
    "torchtitan": "planner.read.torchtitan",
    "maxtext": "planner.read.maxtext",
    "megatron": "planner.read.megatron",
    "torchtune": "planner.read.torchtune",
    "automodel": "planner.read.automodel",
    "nemo-rl": "planner.read.nemo_rl",
    "verl": "planner.read.verl",
    "openrlhf": "planner.read.openrlhf",
    "nanotron": "planner.read.pretraining:is_nanotron",
    "llm-foundry": "planner.read.pretraining:is_foundry",
}
"""Readers by format, each imported when files are looked at; behind a colon what recognises one of two."""
FORMATS: tuple[str, ...] = (*_MODULES, "megatron-swift", "trl", "huggingface", "accelerate", "deepspeed")
"""Formats that `--format` takes, in the order in which keys are held against them."""
_TRAINING_ARGUMENTS = {"per_device_train_batch_size", "gradient_accumulation_steps", "num_train_epochs", "output_dir"}
_TRL_KEYS = {"dataset_name", "dataset_mixture", "datasets", "dataset_config", "dataset_train_split"}


def _is_deepspeed(keys: frozenset[str]) -> bool:
    # At the top `fp16` and `bf16` alone are flags of TrainingArguments; in DeepSpeed's config they are sections.
    first = {key.partition(".")[0] for key in keys if key not in ("fp16", "bf16")}
    own = {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "steps_per_print", "fp16", "bf16"}
    return bool({"zero_optimization", "train_micro_batch_size_per_gpu"} & first) or len(own & first) > 1


def _is_accelerate(keys: frozenset[str]) -> bool:
    return bool({"distributed_type", "compute_environment"} & keys)


def _is_huggingface(keys: frozenset[str]) -> bool:
    return len(_TRAINING_ARGUMENTS & keys) > 1 or "per_device_train_batch_size" in keys


def _is_trl(keys: frozenset[str]) -> bool:
    return "model_name_or_path" in keys and bool(_TRL_KEYS & {key.partition(".")[0] for key in keys})


def read_files(paths: Sequence[Path], command: Sequence[str] = (), format: str | None = None) -> Reading:
    """Return what files and a command say of one training.

    Raises:
        BrokenFile: a file cannot be read or is none that a trainer takes.
        NoTraining: what is there trains nothing.
        UnknownName: `format` is no name of one.
        DsplanError: neither a file nor a command is named.
    """
    if not paths and not command:
        raise DsplanError("nothing to read: name a config or a script, or give a command")
    if format is not None and format not in FORMATS:
        raise UnknownName("format", format, FORMATS, hint=f"give one of {', '.join(FORMATS)}")
    chosen = [_OF_REGISTRY.fullmatch(str(path)) for path in paths]
    sources = [read_source(Path(match[1]) if match else path) for path, match in zip(paths, chosen, strict=True)]
    config = next((match[2] for match in chosen if match), None)
    if command:
        text = " ".join(map(_quote_word, command))
        sources.append(Source(path="the command", text=text, is_file=False, reach="anywhere"))
    return _Together(sources, format, config).read()


_OF_REGISTRY = re.compile(r"(.+\.py):([A-Za-z_]\w*)", re.DOTALL)
"""A config of a Python registry: its file and its function."""


def read_texts(texts: Mapping[str, str]) -> Reading:
    """Return what texts, by the names of their files, say of one training; no file of this machine is looked at.

    Raises:
        BrokenFile: one is none that a trainer takes.
        NoTraining: what is there trains nothing.
        DsplanError: there is none.
    """
    if not texts:
        raise DsplanError("nothing to read: name a config or a script")
    reading = _Together([handed_in(name, text) for name, text in texts.items()], None).read()
    return replace(reading, looks_at_files=False)


def _quote_word(word: str) -> str:
    return word if re.fullmatch(r"[\w./:=,@%+-]+", word) else "'" + word.replace("'", "'\\''") + "'"


class _Together:
    """Reads several sources as one training: a script or command with its config, accelerate's and DeepSpeed's."""

    def __init__(self, sources: Sequence[Source], format: str | None, config: str | None = None) -> None:
        self.sources, self.format, self.config = list(sources), format, config
        self.books: list[Notebook] = []
        self.outer: dict[str, Any] = {}
        self.sides: dict[str, Notebook] = {}
        self.names: list[str] = [source.path for source in sources]

    def read(self) -> Reading:
        scripts = [source for source in self.sources if _is_script(source)]
        registries = [source for source in self.sources if source not in scripts and source.path.endswith(".py")]
        others = [source for source in self.sources if source not in [*scripts, *registries]]
        parsed = [(source, *parse_config(source)) for source in map(only_document, others)]
        for item in tuple(parsed):
            if (script_of := self._task_script(item[0], item[1])) is not None:
                parsed.remove(item)
                scripts.append(script_of)
        launch, script = self._launch(scripts)
        parsed += [(source, self._registered(source, launch), "python") for source in registries]
        files = Files(self.sources, script.written if script else None)
        main: tuple[str, list[Setting], str] | None = None
        for source, settings, _ in parsed:
            form = self._form_of(settings, source, alone=len(self.sources) == 1)
            if form in ("accelerate", "deepspeed") and len(self.sources) > 1:
                self.sides[form] = Notebook(settings, TRAINERS[form].name)
            elif main is None:
                main = form, settings, ""
            else:
                remedy = "give the files of one training"
                raise BrokenFile(source.path, f"is {form}'s config beside one of {main[0]}", remedy)
        if launch is not None:
            main = self._of_launch(launch, files, main)
        if main is None:
            form = next(iter(self.sides))
            main = form, list(self.sides.pop(form).settings.values()), ""
        return self._finish(main, files)

    def _registered(self, source: Source, launch: Launch | None) -> list[Setting]:
        """Return the settings of the config of a registry that was named, by a launch's flag where by nothing else."""
        from planner.read.registry import registry_settings

        flags = {} if launch is None else {item.key: item for item in argument_settings(launch.arguments, source)[0]}
        of_launch = flags.get("config")
        name = self.config or (None if of_launch is None else str(of_launch.value))
        return registry_settings(source, name)

    def _task_script(self, source: Source, settings: Sequence[Setting]) -> Source | None:
        """Return the command of a manifest, and keep the GPUs that it asks for; None of any other config."""
        task = task_of(source, settings)
        if task is None:
            return None
        if task.gpus is not None:
            self.outer["gpus"] = task.gpus
        if task.nodes > 1:
            self.outer["nodes"] = task.nodes
        return task.script

    # Scripts and commands.

    def _launch(self, scripts: Sequence[Source]) -> tuple[Launch | None, Script | None]:
        for source in scripts:
            script = parse_script(source)
            every = list(launches(script.commands, source))
            chosen = _training_of(every)
            if chosen is None:
                raise self._no_launch(source, script.commands, every)
            self._count(chosen, source, every)
            return chosen, script
        return None, None

    def _no_launch(self, source: Source, commands: Sequence[Command], every: Sequence[Launch]) -> DsplanError:
        for launch in every:
            if reason := _why_idle(launch):
                return NoTraining(f"{source.path}, line {launch.line}: {reason}")
        if every:
            programs = ", ".join(dict.fromkeys(launch.program for launch in every))
            trains = any(map(_may_train, every))
            why = "whose flags no reader takes" if trains else "whose flags are none of a training's"
            return NoTraining(f"{source.path}: starts {programs}, {why}")
        shown = ", ".join(dict.fromkeys(command.words[0].text for command in commands if command.words)) or "nothing"
        text = shown if len(shown) < 80 else f"{shown[:79]}…"
        return NoTraining(f"{source.path}: starts no training that is read here (it runs {text})")

    def _count(self, launch: Launch, source: Source, every: Sequence[Launch]) -> None:
        """Read how many ranks a launch starts, and the flags that accelerate's launcher takes in its config's place."""
        sbatch = sbatch_settings(source) if source.is_file else {}
        gpus, nodes = count_gpus(launch, sbatch), count_nodes(launch, sbatch)
        book = Notebook([], "the launcher")
        for counted, field in ((gpus, "gpus"), (nodes, "nodes")):
            for setting in counted.settings:
                book.add(setting)
                book.become(field, counted.count, setting.key)
        if gpus.count is not None:
            self.outer.setdefault("gpus", gpus.count)
        if nodes.count is not None and nodes.count > 1:
            self.outer["nodes"] = nodes.count
        trainings = [item for item in every if _program_form(item)]
        if len(trainings) > 1:
            book.assume(
                f"{source.path} starts {len(trainings)} trainings; the first, in line {launch.line}, is checked"
            )
        if launch.is_cut:
            message = f"a comment ends the command of line {launch.line}; what follows it is not given to the trainer"
            book.find("warning", "command-cut", message)
        self.books.append(book)

    def _of_launch(
        self, launch: Launch, files: Files, main: tuple[str, list[Setting], str] | None
    ) -> tuple[str, list[Setting], str]:
        """Return format, settings and subcommand of what a launch trains with."""
        self._accelerate_of(launch, files)
        form = _program_form(launch) or "huggingface"
        subcommand = launch.program.rpartition(" ")[2]
        settings, loose = argument_settings(launch.arguments, launch.source)
        given = [*settings, *override_settings(loose, launch.source)]
        config = self._config_of(launch, given, loose, files, main)
        if config is not None:
            form = config[0] if form == "huggingface" or config[0] in _MODULES else form
            given = [*config[1], *given]
        elif form in ("axolotl",) or (form == "llama-factory" and not settings):
            raise NoTraining(f"{launch.source.path}, line {launch.line}: names no config that is there")
        if form == "trl":
            self._accelerate_of_trl(given, files)
        given.append(Setting(key=COMMAND, value=subcommand, source=launch.source, line=launch.line))
        return (self.format or form), given, subcommand

    def _config_of(
        self,
        launch: Launch,
        given: list[Setting],
        loose: Sequence[Word],
        files: Files,
        main: tuple[str, list[Setting], str] | None,
    ) -> tuple[str, list[Setting]] | None:
        """Return the config file that a command names, or the one that was given beside it."""
        if main is not None:
            return main[0], main[1]
        flags = {item.key: str(item.value) for item in given}
        if {"module", "config"} <= flags.keys() and _program_form(launch) == "torchtitan":
            return self._of_registry(launch, flags["module"], files)
        plain = [word.text for word in loose if "=" not in word.text]
        names = [name for name in plain if name.endswith((".yaml", ".yml", ".json", ".toml"))]
        names += [str(item.value) for item in given if item.key in _CONFIG_FLAGS and isinstance(item.value, str)]
        for name in names:
            source, reason = files.find(name, launch.source)
            if source is None:
                raise NoTraining(f"{launch.source.path}, line {launch.line}: the config {name} {reason}")
            settings, _ = parse_config(source)
            self.names.append(source.path)
            return self._form_of(settings, source, alone=False), settings
        return None

    def _of_registry(self, launch: Launch, module: str, files: Files) -> tuple[str, list[Setting]]:
        """Return the config that torchtitan finds by `--module` and `--config`, of a copy of its tree that is there."""
        for folder in (
            *(f"torchtitan/{part}/{module}" for part in ("models", "experiments")),
            module.replace(".", "/"),
        ):
            source, _ = files.find(f"{folder}/config_registry.py", launch.source)
            if source is not None:
                self.names.append(source.path)
                return "torchtitan", self._registered(source, launch)
        where = f"{launch.source.path}, line {launch.line}"
        raise NoTraining(f"{where}: the registry of {module} is not there; name its config_registry.py too")

    def _accelerate_of(self, launch: Launch, files: Files) -> None:
        """Read the config that `accelerate launch --config_file` names, and the launcher's flags over it."""
        if "accelerate" not in launch.launchers:
            return
        named = launch.flags.get("config_file")
        settings: list[Setting] = []
        if named is not None and isinstance(named.value, str):
            source, reason = files.find(named.value, launch.source)
            if source is not None and not _is_script(source):
                settings, _ = parse_config(source)
                self.names.append(source.path)
            else:
                self.books[-1].add(named)
                self.books[-1].leave("config_file", f"{named.value} {reason}", matters=True)
        flags = {key: item for key, item in launch.flags.items() if key != "config_file"}
        for key, setting in flags.items():
            section = (
                "fsdp_config." if key.startswith("fsdp_") else "deepspeed_config." if key in _DEEPSPEED_FLAGS else ""
            )
            settings.append(replace(setting, key=f"{section}{key}"))
        before = self.sides.get("accelerate")
        own = list(before.settings.values()) if before is not None else []
        self.sides["accelerate"] = Notebook([*own, *settings], TRAINERS["accelerate"].name)

    def _accelerate_of_trl(self, given: Sequence[Setting], files: Files) -> None:
        """Read the config of accelerate that TRL's own flag names: a file, or one that it ships."""
        named = next((item for item in given if item.key == "accelerate_config" and isinstance(item.value, str)), None)
        if named is None:
            return
        source, reason = files.find(named.value, named.source)
        if source is not None:
            settings, _ = parse_config(source)
            self.names.append(source.path)
        elif named.value in _SHIPPED_BY_TRL:
            shipped = {"num_processes": 8, "mixed_precision": "bf16", **_SHIPPED_BY_TRL[named.value]}
            settings = [replace(named, key=key, value=value, start=-1, end=-1) for key, value in shipped.items()]
        else:
            self.books[-1].add(named)
            self.books[-1].leave(named.key, f"{named.value} {reason}", matters=True)
            return
        self.sides["accelerate"] = Notebook(settings, TRAINERS["accelerate"].name)

    # Formats.

    def _form_of(self, settings: Sequence[Setting], source: Source, *, alone: bool) -> str:
        keys = frozenset(setting.key for setting in settings)
        if self.format is not None and alone:
            return self.format
        form = form_of_keys(keys)
        if form is None:
            shown = ", ".join(sorted({key.partition(".")[0] for key in keys})[:5])
            hint = near_miss(keys)
            if not any(_SAYS_TRAINING.search(key) for key in keys):
                why = "it names no batch, optimizer, learning rate, epochs or steps, and so trains nothing"
                raise NoTraining(f"{source.path}: is no config that is read here (keys {shown} …){hint}: {why}")
            raise BrokenFile(
                source.path, f"is no config that is read here (keys {shown} …){hint}", "or name its --format"
            )
        return form

    def _finish(self, main: tuple[str, list[Setting], str], files: Files) -> Reading:
        form, settings, command = main
        trainer = TRAINERS[form]
        if "accelerate" in self.sides and form != "accelerate":
            side = self.sides["accelerate"]
            read_accelerate(side, files)
            close_accelerate(side)
            self.outer = {**side.answers, **self.outer}
            self.books.append(side)
        if form.startswith("megatron"):
            from planner.read.megatron import renamed

            settings = renamed(settings)
        elif form in _MODULES and hasattr(_reader(form), "prepare"):
            module = _reader(form)
            settings = module.prepare(settings, files) if form == "nemo-rl" else module.prepare(settings)
        book = Notebook(settings, trainer.name)
        _read_form(form, book, files, command)
        if "deepspeed" in self.sides:
            side = self.sides["deepspeed"]
            read_deepspeed(side)
            close_deepspeed(side)
            merge_deepspeed(book, side, "deepspeed")
            self.books.append(side)
        merge_accelerate(book, self.outer)
        if (apart := book.answers.pop("gpus_apart", 0)) and "gpus" in book.answers:
            book.answers["gpus"] += apart
        for other in self.books:
            book.understood[:0] = other.understood
            book.unread[:0] = other.unread
            book.findings[:0] = other.findings
        return book.reading(form, [*self.names, *(source.path for source in files.opened)])


_SHIPPED_BY_TRL: Mapping[str, Mapping[str, Any]] = {
    "single_gpu": {"distributed_type": "NO", "num_processes": 1},
    "multi_gpu": {"distributed_type": "MULTI_GPU"},
    **{f"fsdp{number}": {"distributed_type": "FSDP", "fsdp_config.fsdp_version": number} for number in (1, 2)},
    **{f"zero{stage}": {"distributed_type": "DEEPSPEED", "deepspeed_config.zero_stage": stage} for stage in (1, 2, 3)},
}
"""huggingface/trl@f2cd5771 `trl/accelerate_configs/`."""
_CONFIG_FLAGS = ("config", "config_file", "job.config_file")
_DEEPSPEED_FLAGS = frozenset({"zero_stage", "offload_optimizer_device", "offload_param_device", "zero3_init_flag"})


def _reader(form: str) -> Any:
    """Return the module that reads a format."""
    return import_module(_MODULES[form].partition(":")[0])


def form_of_keys(keys: frozenset[str]) -> str | None:
    """Return the format that keys are of; None where they are of none."""
    for name, path in _MODULES.items():
        recognise: Callable[[frozenset[str]], bool] = getattr(_reader(name), path.partition(":")[2] or "recognise")
        if recognise(keys):
            return name
    checks: tuple[tuple[str, Callable[[frozenset[str]], bool]], ...] = (
        (
            "megatron-swift",
            lambda keys: "model" in keys and bool({"tensor_model_parallel_size", "micro_batch_size"} & keys),
        ),
        ("accelerate", _is_accelerate),
        ("deepspeed", _is_deepspeed),
        ("trl", _is_trl),
        ("huggingface", _is_huggingface),
    )
    return next((name for name, check in checks if check(keys)), None)


_SAYS_TRAINING = re.compile(
    r"(?i)(batch_?size|micro_?batch|learning_?rate|(^|[._])lr$|optimi[sz]er|epochs?$|(max|train|num|total)_?(steps|iters)|lora_r"
    r"|(^|\.)(sequence_?len|seq_?len|cutoff_?len)|grad(ient)?_acc|base_?model$|^modules\.)"
)
"""What one of the keys of a training says."""
_TELLING = (
    "base_model",
    "model_name_or_path",
    "per_device_train_batch_size",
    "zero_optimization",
    "distributed_type",
    "sequence_len",
)


def near_miss(keys: frozenset[str]) -> str:
    """Return which key may be misspelt where a config is none that is known."""
    import difflib

    for key in sorted(keys):
        first = key.partition(".")[0]
        near = difflib.get_close_matches(first, _TELLING, n=1, cutoff=0.75)
        if near and near[0] != first:
            return f"; did you mean {near[0]} by {first}?"
    return ""


def _read_form(form: str, book: Notebook, files: Files, command: str) -> None:
    """Have the reader of a format read its keys.

    Raises:
        NoTraining: they are of something else than a training.
    """
    if form == "accelerate":
        read_accelerate(book, files)
        close_accelerate(book)
    elif form == "deepspeed":
        read_deepspeed_alone(book)
        close_deepspeed(book)
    elif form == "trl":
        from planner.read.huggingface import read_trl

        read_trl(book, files, command)
    elif form == "huggingface":
        from planner.read.huggingface import read_flags

        read_flags(book, files, command)
    elif form == "megatron-swift":
        from planner.read import megatron

        megatron.read(book, files, is_swift=True)
    elif form == "ms-swift":
        from planner.read import ms_swift

        ms_swift.read(book, files, command or "sft")
    else:
        module = _reader(form)
        why = module.why_no_training(book) if hasattr(module, "why_no_training") else ""
        if why:
            source = next(iter(book.settings.values())).source
            raise NoTraining(f"{source.path}: {why}")
        module.read(book, files)


# Programs.

_SHEBANG = re.compile(r"\A#!.*\b(ba|z|k)?sh\b")
_SHELL_WORDS = re.compile(
    r"^\s*(export \w+=|#SBATCH|(nohup |srun |exec )?(python3?|torchrun|deepspeed|accelerate launch|swift|megatron|"
    r"axolotl|llamafactory-cli|trl|tune|bash|srun|sbatch|PYTHONPATH=|CUDA_VISIBLE_DEVICES=|NPROC_PER_NODE=)\b)",
    re.MULTILINE,
)


def _is_script(source: Source) -> bool:
    """Return whether a source is a shell script or a command rather than a config."""
    suffix = Path(source.path).suffix.lower()
    if not source.is_file or suffix in (".sh", ".bash", ".slurm", ".sbatch"):
        return True
    if suffix in (".yaml", ".yml", ".json", ".jsonc", ".toml", ".py"):
        return False
    return bool(_SHEBANG.search(source.text) or _SHELL_WORDS.search(source.text))


def _training_of(every: Sequence[Launch]) -> Launch | None:
    """Return the first launch that is a training."""
    return next((launch for launch in every if _program_form(launch)), None)


def _why_idle(launch: Launch) -> str:
    """Return what a trainer's command is for where it trains nothing."""
    name, _, subcommand = launch.program.partition(" ")
    if name in ("swift", "megatron") and subcommand:
        from planner.read.ms_swift import why_no_training

        return why_no_training(subcommand)
    if name == "llamafactory-cli" and subcommand != "train":
        return f"`llamafactory-cli {subcommand}` trains nothing"
    return ""


_OF_TRAINING = {
    *("lr", "learning_rate", "epochs", "num_epochs", "num_train_epochs", "batch_size", "train_batch_size", "max_steps"),
    *("per_device_train_batch_size", "micro_batch_size", "deepspeed", "deepspeed_config", "actor_model_name_or_path"),
}
"""Flags that say of a script without a reader that it trains."""


_OF_GENERATION = {"gen_len", "max_new_tokens", "port", "trials"}
_NAMED_TRAINING = re.compile(r"(^|[_./])(pre)?train|fine_?tune")
_NAMED_OTHERWISE = re.compile(r"infer|bench|serve|generat|eval|preprocess|flexgen")
"""Names of programs, and flags, of what runs models and trains none."""


def _may_train(launch: Launch) -> bool:
    """Return whether a program without a reader is one that trains, by its name and its flags."""
    flags = _flags_of(launch)
    if _OF_GENERATION & flags or _NAMED_OTHERWISE.search(launch.program):
        return False
    return bool(_OF_TRAINING & flags or _NAMED_TRAINING.search(launch.program))


def _flags_of(launch: Launch) -> set[str]:
    """Return the names of a launch's flags, with `_` for `-`."""
    words = (word.text for word in launch.arguments if word.text.startswith("--"))
    return {text.lstrip("-").partition("=")[0].replace("-", "_") for text in words}


_TRL_SCRIPTS = re.compile(r"(^|/)(sft|dpo|grpo|kto|rloo|orpo|cpo|ppo|reward_modeling|reward|online_dpo)(_\w+)?\.py$")


def _program_form(launch: Launch) -> str:
    """Return the format of what a launch runs; empty where no reader takes its flags."""
    program = launch.program
    name, _, subcommand = program.partition(" ")
    if name in ("swift", "megatron") and subcommand:
        form = "ms-swift" if name == "swift" else "megatron-swift"
        return form if not _why_idle(launch) else ""
    if name == "llamafactory-cli":
        return "llama-factory" if subcommand == "train" else ""
    if name in ("tune", "torchtune"):
        return "torchtune" if subcommand.partition(" ")[0] == "run" else ""
    if name == "axolotl":
        return "axolotl" if subcommand == "train" else ""
    if name == "trl":
        return "trl" if subcommand not in ("chat", "env", "vllm-serve", "skills") else ""
    for pattern, form in (
        (r"axolotl\.cli\.train|scripts/finetune\.py", "axolotl"),
        (r"verl\.trainer\.|(^|/)main_ppo(_split)?\.py$|recipe\.\w+\.main_\w+$", "verl"),
        (r"trl\.scripts\.\w+$", "trl"),
        (r"torchtitan[./]train(\.py)?$", "torchtitan"),
        (r"openrlhf\.cli\.train_", "openrlhf"),
        (r"(^|/)run_train\.py$", "nanotron"),
        (r"(^|/)swift/cli/(sft|pt|rlhf)\.py|swift\.cli\.(sft|pt|rlhf)", "ms-swift"),
        (r"llamafactory[./](cli|launcher)|(^|/)src/train(_bash)?\.py", "llama-factory"),
    ):
        if re.search(pattern, program):
            return form
    flags = _flags_of(launch)
    if {"micro_batch_size", "num_layers"} <= flags or (
        re.search(r"(^|/)pretrain_\w+\.py$", program) and {"num_layers", "encoder_num_layers"} & flags
    ):
        return "megatron"
    if _TRL_SCRIPTS.search(program) and ("model_name_or_path" in flags or "config" in flags):
        return "trl"
    batch = {"per_device_train_batch_size", "deepspeed_config", "deepspeed", "train_batch_size", "model_name_or_path"}
    is_training = bool({"per_device_train_batch_size", "actor_model_name_or_path"} & flags) or (
        "model_name_or_path" in flags and bool(batch & flags)
    )
    if is_training or "deepspeed_config" in flags:
        return "huggingface"
    configs = [
        word.text for word in launch.arguments if word.text.endswith((".yaml", ".yml", ".json")) and word.is_resolved
    ]
    return "huggingface" if configs and "accelerate" in launch.launchers else ""
