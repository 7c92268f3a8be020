"""Commands of other launchers as runs of dsplan's own: `accelerate launch train.py`, `axolotl train x.yml`.

What they start is started by `dsplan run` in their place, with what they would have handed to it. A trainer's own
command becomes the module that it starts: axolotl-ai-cloud/axolotl@067b021c `src/axolotl/cli/utils/train.py`,
hiyouga/LLaMA-Factory@ff6d4d12 `src/llamafactory/launcher.py`, modelscope/ms-swift@3602360a `swift/cli/main.py`,
pytorch/torchtune@bd2a0fc7 `torchtune/_cli/run.py`, and `trl/cli/commands/training.py` of TRL 1.9.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from planner import vocabulary as words
from planner.read.documents import parse_config, read_source
from planner.read.form import Notebook, Setting, Source, Unresolved
from planner.read.launchers import Launch, argument_settings, launch_of
from planner.read.sharding import read_accelerate, read_deepspeed
from planner.read.shell import Command, Word
from strategies.errors import BackendMissing, CannotRun
from strategies.launch.options import RequestedPlacement
from strategies.launch.prepare import RunRequest
from strategies.run_directory.request import named
from strategies.run_directory.spec import ScriptStart

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_LAUNCHERS = frozenset({"accelerate", "accelerate-launch", "torchrun", "deepspeed", "ds"})
_TRAINERS: Mapping[str, tuple[str, str]] = {
    "axolotl": ("axolotl", "axolotl"),
    "llamafactory-cli": ("llamafactory", "llamafactory"),
    "swift": ("swift", "ms-swift"),
    "megatron": ("swift", "ms-swift"),
    "trl": ("trl", "trl"),
    "tune": ("torchtune", "torchtune"),
}
"""The module of a trainer's command, and the package that installs it."""
_MODULES: Mapping[str, str] = {
    "axolotl train": "axolotl.cli.train",
    "llamafactory-cli train": "llamafactory.launcher",
    **{f"swift {name}": f"swift.cli.{name}" for name in ("pt", "sft", "rlhf")},
    **{f"megatron {name}": f"swift.cli._megatron.{name}" for name in ("pt", "sft", "rlhf")},
    **{f"trl {name}": f"trl.scripts.{name}" for name in ("sft", "dpo", "kto", "grpo", "rloo", "reward")},
}
_IN_FRONT = frozenset({"srun", "mpirun", "mpiexec", "uv", "poetry", "pixi", "conda", "nohup", "sudo", "numactl", "ray"})
_RAY = re.compile(r"(^|[./])(main_ppo|train_ppo_ray|run_grpo\w*|run_ppo)(\.py)?$|^verl\.trainer\.|^recipe\.\w+\.main_")
_CARRIED_OUT = frozenset(
    {
        *("nproc_per_node", "nnodes", "num_processes", "num_machines", "num_gpus", "num_nodes", "standalone", "module"),
        *("rdzv_endpoint", "rdzv_backend", "rdzv_id", "rdzv_conf", "master_addr", "master_port", "node_rank", "m"),
        *("main_process_ip", "main_process_port", "machine_rank", "max_restarts", "hostfile", "H", "no_local_rank"),
        *("include", "i", "local_ranks_filter", "use_env", "same_network"),
    }
)
"""Flags of torchrun and DeepSpeed's launcher that a run of dsplan's own answers to, or does by itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedScript:
    """The script that a command starts, and how: what is None is left open."""

    script: Path
    arguments: tuple[str, ...] = ()
    start: ScriptStart = field(default_factory=ScriptStart)
    processes: int | None = None
    placement: RequestedPlacement = field(default_factory=RequestedPlacement)
    retries: int | None = None
    strategy: words.Strategy | None = None
    """The one that accelerate's config chooses."""
    notices: tuple[str, ...] = ()


def understand(request: RunRequest) -> tuple[RunRequest, tuple[str, ...]]:
    """Return the request with the script that its command starts, and what to tell of that; flags of ours stay.

    Raises:
        DsplanError: the command starts no script that can be run.
    """
    if request.script is None or request.script.suffix == ".py":
        return request, ()
    if not is_command(request.script):
        return request, ()
    started = started_script((str(request.script), *request.arguments))
    placement, plan, notices = request.placement, request.plan, list(started.notices)
    if placement.launcher is None:
        placement = replace(started.placement, **named(placement))
    decides = plan.plan_file is not None or plan.strategy is not None or named(plan.degrees)
    if started.strategy is not None and not decides:
        plan = replace(plan, strategy=started.strategy)
        notices.append(f"accelerate's config chooses {started.strategy}: planned within it; --strategy names another")
    supervision = request.supervision
    if supervision.retries is None and started.retries is not None:
        supervision = replace(supervision, retries=started.retries)
    understood = replace(
        request,
        script=started.script,
        arguments=started.arguments,
        start=started.start,
        processes=request.processes or (None if plan.plan_file else started.processes),
        plan=plan,
        placement=placement,
        supervision=supervision,
    )
    return understood, tuple(notices)


def is_command(word: str | Path) -> bool:
    """Return whether a word begins a command rather than names a script."""
    text = str(word)
    name = text.rpartition("/")[2]
    programs = _LAUNCHERS | _TRAINERS.keys() | _IN_FRONT | {"env"}
    is_python = re.fullmatch(r"python[0-9.]*", name) is not None
    sets_variable = _ASSIGNMENT.fullmatch(text) is not None
    return (name in programs or is_python or sets_variable) and not (text == name and Path(text).is_file())


def started_script(command: Sequence[str]) -> StartedScript:
    """Return the script that a command starts, and how.

    Raises:
        BackendMissing: the trainer is not installed.
        CannotRun: it starts no script that dsplan can start in its place.
    """
    variables, rest = _without_variables(command)
    shown = " ".join(rest[:3])
    if not rest or rest[0].rpartition("/")[2] in _IN_FRONT:
        first = rest[0] if rest else "env"
        remedy = "--launcher slurm or mpi starts ranks" if first in ("srun", "mpirun", "mpiexec") else "put it first"
        raise CannotRun(f"{first} stands in front of dsplan, not behind it: {remedy}")
    name = rest[0].rpartition("/")[2]
    if name in _TRAINERS:
        _require(name)
    if name == "accelerate" and rest[1:2] != ["launch"]:
        raise CannotRun(f"{shown}: of accelerate's commands dsplan runs `accelerate launch SCRIPT`")
    source = Source(path="the command", text=" ".join(command), is_file=False)
    given = Command(words=tuple(Word(text=text, line=1) for text in rest), variables={})
    launch = launch_of(given, source)
    if launch is None:
        raise CannotRun(f"{shown}: names no Python file or module; give dsplan run the script that trains")
    if _RAY.search(launch.program):
        raise CannotRun(f"{launch.program} starts its workers through Ray, not as ranks of a launcher; run it alone")
    if name in _TRAINERS:
        launch = _of_trainer(launch)
    if "no_python" in launch.flags:
        raise CannotRun("--no_python starts a program that is no Python; dsplan run needs the script itself")
    return _start(launch, variables)


def _without_variables(command: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the variables that a command sets in front of its program, and the rest of it."""
    variables: dict[str, str] = {}
    rest = list(command)
    if rest and rest[0].rpartition("/")[2] == "env":
        rest = rest[1:]
    while rest and (match := _ASSIGNMENT.fullmatch(rest[0])):
        variables[match[1]] = match[2]
        rest = rest[1:]
    return variables, rest


def _require(command: str) -> None:
    module, package = _TRAINERS[command]
    if module_file(module) is None:
        raise BackendMissing(f"{command} is not installed here; pip install {package}")


def module_file(module: str) -> Path | None:
    """Return the file of a module, or of its `__main__` where it is a package; nothing of it is imported."""
    top, *inner = module.split(".")
    spec = PathFinder.find_spec(top, [os.getcwd(), *sys.path])
    if spec is None:
        return None
    folders = spec.submodule_search_locations
    if folders is None:
        return Path(spec.origin) if spec.origin and not inner else None
    for folder in folders:
        base = Path(folder, *inner)
        for path in (base.with_suffix(".py"), base / "__main__.py", base / "__init__.py"):
            if path.is_file() and (inner or path.parent == base):
                return path
    return None


# A trainer's own command, as the module that it starts.


def _of_trainer(launch: Launch) -> Launch:
    """Return the launch of a trainer's module.

    Raises:
        CannotRun: its subcommand trains nothing.
    """
    if launch.program.startswith("tune run "):
        return _of_torchtune(launch, launch.program.removeprefix("tune run "))
    module = _MODULES.get(launch.program)
    if module is None:
        subcommands = ", ".join(name for name in _MODULES if name.split()[0] == launch.program.split()[0])
        raise CannotRun(f"{launch.program} is no training that dsplan runs; it runs {subcommands}")
    arguments, flags = list(launch.arguments), dict(launch.flags)
    texts = [word.text for word in arguments]
    launchers: tuple[str, ...] = ()
    if launch.program == "axolotl train":
        texts, own = _split(texts, {"--launcher"})
        texts, _, behind = _partition(texts, "--")
        flags |= _flags([*own, *behind], launch.source)
        is_torchrun = str(flags.pop("launcher", Setting(key="", value="", source=launch.source, line=1)).value)
        launchers = () if is_torchrun in ("torchrun", "python") else ("accelerate",)
    elif launch.program.startswith("trl "):
        texts, own = _split(texts, _TRL_LAUNCHER)
        flags |= _flags(own, launch.source)
        if (named := flags.pop("accelerate_config", None)) is not None:
            flags["config_file"] = replace(named, key="config_file", value=_trl_config(str(named.value)))
        launchers = ("accelerate",)
    elif texts and texts[0].endswith((".yaml", ".yml", ".json")) and launch.program.startswith(("swift", "megatron")):
        texts[:1] = _spelt_out(Path(texts[0]))
    plain = tuple(Word(text=text, line=1) for text in texts)
    return replace(launch, program=module, arguments=plain, flags=flags, launchers=launchers)


_TRL_LAUNCHER = {
    *("--accelerate_config", "--num_processes", "--num_machines", "--machine_rank", "--main_process_ip"),
    *("--main_process_port", "--mixed_precision"),
}
"""Flags of `accelerate launch` that `trl` takes among the script's, which has none of these names."""


def _split(texts: Sequence[str], names: set[str]) -> tuple[list[str], list[str]]:
    """Return words without flags of these names and their values, and those."""
    rest: list[str] = []
    own: list[str] = []
    takes = False
    for text in texts:
        name, equals, _ = text.partition("=")
        if takes or name.replace("-", "_").replace("__", "--", 1) in names:
            own.append(text)
            takes = not takes and not equals
        else:
            rest.append(text)
    return rest, own


def _partition(texts: list[str], word: str) -> tuple[list[str], str, list[str]]:
    if word not in texts:
        return texts, "", []
    position = texts.index(word)
    return texts[:position], word, texts[position + 1 :]


def _flags(texts: Iterable[str], source: Source) -> dict[str, Setting]:
    settings, _ = argument_settings([Word(text=text, line=1) for text in texts], source)
    return {item.key: item for item in settings}


def _trl_config(name: str) -> str:
    """Return the file of an accelerate config that TRL ships."""
    package = module_file("trl")
    shipped = package and package.parent / "accelerate_configs" / f"{name}.yaml"
    return str(shipped) if shipped and shipped.is_file() and not Path(name).is_file() else name


def _spelt_out(path: Path) -> list[str]:
    """Return a config's keys as flags, as `swift` hands them to its module."""
    flags: list[str] = []
    for setting in parse_config(read_source(path))[0]:
        if "." in setting.key:
            raise CannotRun(f"{path}: {setting.key} is nested, which only swift's own command spells out")
        values = setting.value if isinstance(setting.value, list) else [setting.value]
        flags += [f"--{setting.key}", *map(str, values)]
    return flags


def _of_torchtune(launch: Launch, recipe: str) -> Launch:
    """Return the launch of a recipe: one of torchtune's by its name, or a file."""
    package = module_file("torchtune")
    assert package is not None
    registry = package.parent / "_recipe_registry.py"
    shipped = package.parent.parent / "recipes"
    files = _named_files(registry) if registry.is_file() else {}
    texts = [word.text for word in launch.arguments]
    if "--config" in texts[:-1]:
        position = texts.index("--config") + 1
        if not Path(texts[position]).is_file() and texts[position] in files:
            texts[position] = str(shipped / "configs" / files[texts[position]])
    program = str(shipped / files[recipe]) if recipe in files else recipe
    if not program.endswith(".py"):
        raise CannotRun(f"tune run {recipe}: torchtune has no such recipe; `tune ls` lists them")
    return replace(launch, program=program, arguments=tuple(Word(text=text, line=1) for text in texts))


def _named_files(registry: Path) -> dict[str, str]:
    """Return the files of torchtune's recipes and configs by name, read from its source without running it."""
    files = {}
    for node in ast.walk(ast.parse(registry.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            values = {item.arg: item.value.value for item in node.keywords if isinstance(item.value, ast.Constant)}
            if isinstance(name := values.get("name"), str) and isinstance(path := values.get("file_path"), str):
                files[name] = path
    return files


# What the launcher's flags say.


def _start(launch: Launch, variables: dict[str, str]) -> StartedScript:
    program = launch.program
    path, module = Path(program), ""
    if not program.endswith(".py"):
        file = module_file(program)
        if file is None:
            raise CannotRun(f"module {program} is not here; name one of this folder or of this Python, or a file")
        path, module = file, program
    arguments = tuple(word.text for word in launch.arguments)
    start = ScriptStart(module=module, variables=variables)
    if "accelerate" in launch.launchers:
        return _by_accelerate(launch, path, arguments, start)
    values = {name: str(item.value) for name, item in launch.flags.items() if not isinstance(item.value, Unresolved)}
    is_deepspeed = bool({"deepspeed", "ds"} & set(launch.launchers))
    if is_deepspeed and "no_local_rank" not in values:
        start = replace(start, local_rank="--local_rank")
    processes, chosen = _processes(values, variables)
    start = replace(start, variables={**variables, **chosen})
    idle = sorted(set(launch.flags) - _CARRIED_OUT)
    shown = ", ".join(f"--{name}" for name in idle)
    return StartedScript(
        script=path,
        arguments=arguments,
        start=start,
        processes=processes,
        placement=_placement(values, is_deepspeed=is_deepspeed),
        retries=_whole(values.get("max_restarts")),
        notices=(f"{shown} of {launch.launchers[0]} does nothing here: dsplan starts the ranks",) if idle else (),
    )


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and re.fullmatch(r"[0-9]{1,7}", text) else None


def _processes(values: Mapping[str, str], variables: Mapping[str, str]) -> tuple[int | None, dict[str, str]]:
    """Return the processes of a node, and the variable that chooses their GPUs where a flag does."""
    include = values.get("include") or values.get("i") or ""
    if match := re.fullmatch(r"localhost:([0-9, ]+)", include):
        cards = [card.strip() for card in match[1].split(",") if card.strip()]
        return len(cards), {"CUDA_VISIBLE_DEVICES": ",".join(cards)}
    named = values.get("nproc_per_node") or values.get("num_gpus")
    of_environment = variables.get("NPROC_PER_NODE") or os.environ.get("NPROC_PER_NODE")
    return _whole(named) or _whole(of_environment), {}


def _placement(values: Mapping[str, str], *, is_deepspeed: bool) -> RequestedPlacement:
    """Return the nodes of torchrun's flags or of DeepSpeed's launcher."""
    nodes = values.get("nnodes") or values.get("num_nodes")
    if nodes in (None, "1", "1:1"):
        return RequestedPlacement()
    hostfile = values.get("hostfile") or values.get("H")
    if is_deepspeed:
        rank = _whole(values.get("node_rank"))
        file = None if hostfile is None else Path(hostfile)
        return RequestedPlacement(launcher="deepspeed", nodes=nodes, hostfile=file, node_rank=rank)
    address, port = values.get("master_addr"), values.get("master_port", "29500")
    meeting = values.get("rdzv_endpoint") or (f"{address}:{port}" if address else None)
    return RequestedPlacement(nodes=nodes, rendezvous=meeting)


# accelerate's launcher, whose config chooses more.


def default_config() -> Path | None:
    """Return the config that `accelerate config` wrote, where there is one (accelerate 1.15, config_args.py)."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache"), "huggingface")
    path = Path(os.environ.get("HF_HOME", cache), "accelerate", "default_config.yaml").expanduser()
    return path if path.is_file() else None


def _by_accelerate(launch: Launch, script: Path, arguments: tuple[str, ...], start: ScriptStart) -> StartedScript:
    """Return a script with the variables that `accelerate launch` would hand to it.

    Raises:
        DsplanError: its config cannot be read.
    """
    named = launch.flags.get("config_file")
    path = Path(str(named.value)) if named is not None else default_config()
    settings = parse_config(read_source(path))[0] if path is not None else []
    flags = {name: item for name, item in launch.flags.items() if name != "config_file"}
    prefixed = (
        replace(item, key=f"{'fsdp_config.' if name.startswith('fsdp_') else ''}{name}") for name, item in flags.items()
    )
    book = Notebook([*settings, *prefixed], "accelerate")
    read_accelerate(book)
    ranks, nodes = book.answers.get("gpus"), book.answers.get("nodes", 1)
    handed = [word for name, item in flags.items() for word in _spell(name, item.value)]
    file = [] if path is None else ["--config_file", str(path.resolve())]
    return StartedScript(
        script=script,
        arguments=arguments,
        start=replace(start, accelerate=(*file, *handed), by_accelerate=True),
        processes=None if ranks is None else max(ranks // nodes, 1),
        placement=_accelerate_placement(book, nodes),
        strategy=_chosen_strategy(book),
    )


def _spell(name: str, value: Any) -> list[str]:
    if value is True:
        return [f"--{name}"]
    return [f"--{name}", *map(str, value if isinstance(value, list) else [value])]


def _accelerate_placement(book: Notebook, nodes: int) -> RequestedPlacement:
    if nodes == 1:
        return RequestedPlacement()
    address, port = book.text("main_process_ip"), book.whole("main_process_port", 29500)
    return RequestedPlacement(nodes=str(nodes), rendezvous=None if address is None else f"{address}:{port}")


def _chosen_strategy(book: Notebook) -> words.Strategy | None:
    """Return the strategy that a config of accelerate chooses; None for plain replicas, which are what it starts from.

    Raises:
        DsplanError: the DeepSpeed config that it names cannot be read.
    """
    named = book.text("deepspeed_config.deepspeed_config_file") or book.text("deepspeed_config_file")
    strategy: words.Strategy | None = book.answers.get("strategy")
    if named is not None and strategy is not None:
        side = Notebook(parse_config(read_source(Path(named)))[0], "DeepSpeed")
        read_deepspeed(side)
        strategy = side.answers.get("strategy")
    return None if strategy in ("ddp", "single") else strategy
