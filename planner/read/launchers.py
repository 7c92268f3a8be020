"""Commands as launchers and the training that they start: torchrun, accelerate, deepspeed, srun, python and others."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field

from hardware_db.records import dataclass
from planner.read.form import Setting, Source, Unresolved, plain_value
from planner.read.shell import Command, Word

_WRAPPERS = frozenset(
    {"nohup", "exec", "time", "sudo", "uv", "poetry", "pixi", "run", "env", "numactl", "stdbuf", "conda"}
)
_ALONE = frozenset(
    {
        *(
            "standalone",
            "no_python",
            "run_path",
            "multi_gpu",
            "cpu",
            "tpu",
            "use_deepspeed",
            "use_fsdp",
            "debug",
            "quiet",
        ),
        *(
            "same_network",
            "use_megatron_lm",
            "use_xpu",
            "ipex",
            "use_cpu",
            "enable_cpu_affinity",
            "no_ssh",
            "no_local_rank",
        ),
        *("fsdp_offload_params_true", "save_pid", "enable_each_rank_log", "force_multi", "bind_cores_to_rank"),
        *("virtual_local_rank", "downcast_bf16", "dynamo_use_dynamic", "dynamo_use_fullgraph", "tpu_cluster", "q"),
        *("dynamo_use_regional_compilation", "fp8_use_autocast_during_eval", "no_tpu_cluster", "tpu_use_sudo"),
        *("no_ssh_check", "use_parallelism_config", "module", "m", "exclusive", "label", "l", "overlap", "use_env"),
    }
)
"""Flags of launchers that take no value (accelerate 1.15's `commands/launch.py`, torch 2.13's `distributed/run.py`,
DeepSpeed 0.19's `launcher/runner.py`)."""
TRAINING_PROGRAMS = ("swift", "megatron", "llamafactory-cli", "axolotl", "trl", "tune", "torchtune", "composer")
"""Commands of trainers that take a subcommand and start their ranks themselves."""
_IGNORED_PROGRAMS = frozenset(
    {
        *(
            "cd",
            "mkdir",
            "echo",
            "export",
            "set",
            "source",
            ".",
            "pip",
            "pip3",
            "wget",
            "curl",
            "rm",
            "cp",
            "mv",
            "cat",
            "ls",
        ),
        *(
            "git",
            "ray",
            "sleep",
            "kill",
            "pkill",
            "wait",
            "module",
            "conda",
            "tee",
            "huggingface-cli",
            "hf",
            "unset",
            "ulimit",
        ),
        *(
            "exit",
            "return",
            "printf",
            "test",
            "[",
            "[[",
            "true",
            "false",
            "trap",
            "shift",
            "read",
            "tar",
            "unzip",
            "nvidia-smi",
        ),
        *(
            "apt",
            "apt-get",
            "yum",
            "docker",
            "hostname",
            "date",
            "chmod",
            "ln",
            "find",
            "grep",
            "sed",
            "awk",
            "sort",
            "head",
        ),
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """A training that a command starts."""

    program: str
    """The trainer's command with its subcommand, a module, or a script's path."""
    arguments: tuple[Word, ...]
    """What the program is given."""
    source: Source
    line: int
    flags: Mapping[str, Setting] = field(default_factory=dict)
    """The launchers' own flags by name, with `_` for `-`."""
    launchers: tuple[str, ...] = ()
    variables: Mapping[str, Word] = field(default_factory=dict)
    is_cut: bool = False

    def setting(self, name: str, *others: str) -> Setting | None:
        """Return the first of these flags that is there, or of these environment variables."""
        for each in (name, *others):
            if each in self.flags:
                return self.flags[each]
            if (word := self.variables.get(each)) is not None and word.text:
                return setting_of(each, [word], self.source)
        return None


def setting_of(key: str, words: Sequence[Word], source: Source) -> Setting:
    """Return a setting of the words that follow a flag; a flag alone is true."""
    if not words:
        return Setting(key=key, value=True, source=source, line=1)
    first = words[0]
    values = [word.text if word.is_resolved else Unresolved(text=word.text) for word in words]
    return Setting(
        key=key,
        value=values[0] if len(values) == 1 else values,
        source=source,
        line=first.line,
        start=first.start if len(words) == 1 else -1,
        end=first.end if len(words) == 1 else -1,
    )


def launches(commands: Sequence[Command], source: Source) -> Iterator[Launch]:
    """Yield the trainings among commands, in their order."""
    for command in commands:
        launch = launch_of(command, source)
        if launch is not None:
            yield launch


def launch_of(command: Command, source: Source) -> Launch | None:
    """Return the training that a command starts; None where it starts none."""
    words = list(command.words)
    flags: dict[str, Setting] = {}
    launchers: list[str] = []
    line = words[0].line
    while words:
        name = words[0].text.rpartition("/")[2] if words[0].is_resolved else words[0].text
        if name == "ray" and [word.text for word in words[1:3]] == ["job", "submit"]:
            texts = [word.text for word in words]
            words = words[texts.index("--") + 1 :] if "--" in texts else []
        elif name in _IGNORED_PROGRAMS:
            return None
        elif name in _WRAPPERS:
            words = _skip_flags(words[1:])
        elif name in ("apptainer", "singularity"):
            words = words[next((at for at, word in enumerate(words) if _starts_ranks(word)), len(words)) :]
        elif name in ("srun", "mpirun", "mpiexec", "torchrun", "deepspeed", "ds", "torchrun-hpc"):
            launchers.append(name)
            words = _take_flags(words[1:], flags, source)
        elif name == "accelerate" or name.startswith("accelerate-launch"):
            launchers.append("accelerate")
            rest = words[1:] if name == "accelerate-launch" else words[2:]
            words = _take_flags(rest, flags, source)
        elif re.fullmatch(r"python[0-9.]*", name):
            words = _python(words[1:], flags, source, launchers)
        elif name in TRAINING_PROGRAMS and len(words) > 1:
            program = f"{name} {words[1].text}"
            rest = words[2:]
            if program == "tune run":  # torchrun's flags, the recipe, its own
                recipe, *rest = _take_flags(rest, flags, source) or [words[1]]
                program = f"{program} {recipe.text}"
            return _launch(program, rest, source, line, flags, launchers, command)
        elif _is_script(words[0]):
            return _launch(words[0].text, words[1:], source, line, flags, launchers, command)
        else:
            return None
    return None


def _launch(
    program: str,
    words: Sequence[Word],
    source: Source,
    line: int,
    flags: dict[str, Setting],
    launchers: Sequence[str],
    command: Command,
) -> Launch:
    return Launch(
        program=program,
        arguments=tuple(words),
        source=source,
        line=line,
        flags=flags,
        launchers=tuple(launchers),
        variables=command.variables,
        is_cut=command.is_cut,
    )


def _starts_ranks(word: Word) -> bool:
    """Return whether a word is the Python or the launcher that a container runs."""
    return re.fullmatch(r"(.*/)?(python[0-9.]*|torchrun|accelerate|deepspeed)", word.text) is not None


def _is_script(word: Word) -> bool:
    """Return whether a word names a program that may train: a Python file, or a module as `-m` left it."""
    return word.text.endswith(".py") or re.fullmatch(r"[A-Za-z_][\w-]*(\.[A-Za-z_]\w*)+", word.text) is not None


def _python(words: list[Word], flags: dict[str, Setting], source: Source, launchers: list[str]) -> list[Word]:
    """Return what Python runs, a launcher's module taken off with its flags."""
    while words and words[0].text.startswith("-") and words[0].text != "-m":
        takes_value = words[0].text in ("-X", "-W")
        words = words[2 if takes_value else 1 :]
    if not words or words[0].text != "-m":
        return words
    module = words[1].text if len(words) > 1 else ""
    known_as = {"torch.distributed.run": "torchrun", "torch.distributed.launch": "torchrun"}
    if module in known_as:
        launchers.append(known_as[module])
        return _take_flags(words[2:], flags, source)
    if module == "accelerate.commands.launch":
        launchers.append("accelerate")
        return _take_flags(words[2:], flags, source)
    return words[1:]


def _skip_flags(words: list[Word]) -> list[Word]:
    while words and (words[0].text.startswith("-") or "=" in words[0].text):
        words = words[1:]
    return words


def _take_flags(words: list[Word], flags: dict[str, Setting], source: Source) -> list[Word]:
    """Take a launcher's flags off and return what follows: the program that it starts."""
    while words and words[0].text.startswith("-"):
        text = words[0].text.lstrip("-")
        name, equals, value = text.partition("=")
        key = name.replace("-", "_")
        if equals:
            flags[key] = setting_of(key, [words[0].tail(len(value))], source)
            words = words[1:]
        elif key in ("m", "module"):
            return words[1:]
        elif key in ("mca", "gmca"):
            words = words[3:]  # Open MPI's parameter and its value
        elif (
            key in _ALONE
            or len(words) == 1
            or words[1].text.startswith("--")
            or (
                _is_script(words[1])
                and words[1].text.endswith(".py")
                and key not in ("config_file", "main_training_function")
            )
        ):
            flags[key] = Setting(key=key, value=True, source=source, line=words[0].line)
            words = words[1:]
        else:
            flags[key] = setting_of(key, [words[1]], source)
            words = words[2:]
    return words


def argument_settings(words: Sequence[Word], source: Source) -> tuple[list[Setting], list[Word]]:
    """Return flags as settings, with `_` for `-` in their names, and the words that belong to none.

    A flag without a value is true; one with several has a list.
    """
    settings: list[Setting] = []
    loose: list[Word] = []
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if word.text in _CALLERS:
            continue
        if not _is_flag(word):
            loose.append(word)
            continue
        name, equals, value = word.text.lstrip("-").partition("=")
        key = name.replace("-", "_")
        if equals:
            settings.append(setting_of(key, [word.tail(len(value))], source))
            continue
        values: list[Word] = []
        while position < len(words) and not (
            words[position].text in _CALLERS
            or _is_flag(words[position])
            or (values and _OVERRIDE.match(words[position].text))
        ):
            values.append(words[position])
            position += 1
        if values:
            settings.append(setting_of(key, values, source))
        else:
            settings.append(Setting(key=key, value=True, source=source, line=word.line))
    return settings, loose


_CALLERS = ("$@", "$*", "${@}", "${*}")
"""What a script passes on of its own arguments, which are none while it is read."""
_OVERRIDE = re.compile(r"\+{0,2}[A-Za-z_][\w.]*=")
"""A word that overrides a config's key, which ends the values of a flag before it."""


def _is_flag(word: Word) -> bool:
    return word.text.startswith("--") or re.fullmatch(r"-[A-Za-z]\w*", word.text) is not None


def override_settings(words: Sequence[Word], source: Source) -> list[Setting]:
    """Return `key=value` words as settings: hydra's and torchtune's overrides; `+key` and `++key` add one."""
    settings = []
    for word in words:
        match = re.fullmatch(r"\+{0,2}([A-Za-z_][\w./@-]*)=(.*)", word.text, re.DOTALL)
        if match is None:
            continue
        written = word.tail(len(match[2]))
        value = plain_value(match[2]) if word.is_resolved else Unresolved(text=match[2])
        settings.append(
            Setting(key=match[1], value=value, source=source, line=word.line, start=written.start, end=written.end)
        )
    return settings


# How many GPUs a launch is for.

_SBATCH = re.compile(r"^#SBATCH\s+(-\w|--[\w-]+)[=\s]+(\S+)", re.MULTILINE)
_SHORT = {"-N": "nodes", "-n": "ntasks", "-G": "gpus"}


def sbatch_settings(source: Source) -> dict[str, Setting]:
    """Return the flags of a script's `#SBATCH` lines."""
    settings = {}
    for match in _SBATCH.finditer(source.text):
        name = _SHORT.get(match[1], match[1].lstrip("-").replace("-", "_"))
        key = f"#SBATCH {name}"
        settings[name] = Setting(
            key=key,
            value=match[2],
            source=source,
            line=source.line_of(match.start()),
            start=match.start(2),
            end=match.end(2),
        )
    return settings


@dataclass(frozen=True, kw_only=True, slots=True)
class Counted:
    """A number of GPUs or nodes, and the settings that say it."""

    count: int | None = None
    settings: tuple[Setting, ...] = ()


def count_nodes(launch: Launch, sbatch: Mapping[str, Setting]) -> Counted:
    """Return over how many nodes a launch goes; None where nothing says it."""
    for setting in (launch.setting("nnodes", "num_nodes", "NNODES", "num_machines", "nodes", "N"), sbatch.get("nodes")):
        if setting is None:
            continue
        count = _whole(str(setting.value).rpartition(":")[2] if ":" in str(setting.value) else setting.value)
        if count is not None:
            return Counted(count=count, settings=(setting,))
    return Counted()


def count_gpus(launch: Launch, sbatch: Mapping[str, Setting]) -> Counted:
    """Return how many ranks a launch starts; None where nothing says it."""
    nodes = count_nodes(launch, sbatch)
    factor = nodes.count or 1
    total = launch.setting("num_processes", "np") or launch.flags.get("n")
    if total is not None and (count := _whole(total.value)) is not None:
        return Counted(count=count, settings=(total,))
    per_node = launch.setting("nproc_per_node", "num_gpus", "NPROC_PER_NODE", "gpus_per_node")
    if per_node is not None and (count := _whole(per_node.value)) is not None:
        return Counted(count=count * factor, settings=(per_node, *nodes.settings))
    include = launch.setting("include", "i")
    if include is not None and isinstance(include.value, str) and ":" in include.value:
        hosts = [part.rpartition(":")[2] for part in include.value.split("@")]
        return Counted(
            count=sum(len([card for card in host.split(",") if card]) for host in hosts), settings=(include,)
        )
    for name in ("gpus_per_node", "gres", "gpus_per_task", "ntasks_per_node"):
        setting = launch.flags.get(name) or sbatch.get(name)
        if setting is not None and (count := _whole(str(setting.value).rpartition(":")[2])) is not None:
            is_per_node = name != "ntasks_per_node" or count > 1
            if is_per_node:
                return Counted(count=count * factor, settings=(setting, *nodes.settings))
    visible = launch.setting("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
    if visible is not None and isinstance(visible.value, str) and re.fullmatch(r"[0-9, ]+", visible.value):
        return Counted(count=len([card for card in visible.value.split(",") if card.strip()]), settings=(visible,))
    return Counted()


def _whole(value: object) -> int | None:
    text = str(value).strip()
    return int(text) if re.fullmatch(r"[0-9]{1,7}", text) and int(text) > 0 else None
