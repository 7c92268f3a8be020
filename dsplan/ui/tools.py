"""Tools for assistants that write training code: questions over the Model Context Protocol, answered in JSON.

Each tool is a command of the command line with the flags that strangers may use; its answer is what that command prints
with `--json`. A call is answered by a process of its own, which is given texts and no files of this machine, writes
nothing, and is ended where it takes too long.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

from dsplan.cli.flags import ConfigurationFlags, HardwareFlags, MaximumFlags, ModelFlags, RankingFlags, WorkFlags
from dsplan.ui.address import MOST_CONFIG_BYTES, MOST_FILES, Field, flag_fields, write
from hardware_db.errors import DsplanError
from hardware_db.handed_in import quote
from hardware_db.notices import LABEL
from hardware_db.records import dataclass
from planner.models.resolve import named_model
from planner.read.documents import MOST_BYTES
from planner.read.recognise import FORMATS

MOST_WORDS = 400
"""Of a command that is checked."""
_OF_FILES = frozenset({"cluster", "out", "plot", "exact"})
"""Flags that read or write files of this machine, draw, or import code."""
_FILE_NAME = re.compile(r"\w[\w.-]{0,99}", re.ASCII)
_BROKEN = 2
"""The exit status of a question that cannot be answered."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """A command as a tool: the groups of flags that it has, and what it is given beside them."""

    title: str
    description: str
    groups: tuple[Any, ...] = ()
    names: tuple[str, ...] | None = None
    """Of the flags, those that it takes; None for all that need no file."""
    texts: Mapping[str, Mapping[str, Any]] | None = None
    """Schemas of what it is given beside flags, by name; `required` is the first."""

    @property
    def flags(self) -> Mapping[str, Field]:
        """The flags that it takes, by name."""
        every = flag_fields(*self.groups)
        return {
            name: field
            for name, field in every.items()
            if name not in _OF_FILES and (self.names is None or name in self.names)
        }

    @property
    def schema(self) -> dict[str, Any]:
        """JSON Schema of its arguments."""
        properties = {name: _schema(field) for name, field in self.flags.items()}
        texts = self.texts or {}
        required = [name for name in texts if name != "config"]
        return {
            "type": "object",
            "properties": {**texts, **properties},
            "required": required[:1],
            "additionalProperties": False,
        }


def _schema(field: Field) -> dict[str, Any]:
    """Return the JSON Schema of a flag, with its help and its limits."""
    if field.kind == "choice":
        kind: dict[str, Any] = {"enum": list(field.choices)}
    elif field.kind == "switch":
        kind = {"type": "boolean"}
    elif field.kind == "text":
        kind = {"type": "string", "maxLength": 100}
    else:
        kind = {"type": "integer" if field.kind == "whole" else "number", "minimum": field.least, "maximum": field.most}
    return kind | {"description": field.help}


_CONFIG = {
    "config": {
        "type": "string",
        "maxLength": MOST_CONFIG_BYTES,
        "description": "Text of a config.json of transformers, in place of a model's name.",
    }
}
_PLANNING = (ModelFlags, HardwareFlags, WorkFlags)
_HARDWARE = ("gpus", "gpu", "nodes", "node_type", "interconnect")
TOOLS: Mapping[str, Tool] = {
    "recommend": Tool(
        title="Plans of a training",
        description="Ranked ways to train a model on given GPUs: strategy, degrees, micro-batch, precision, predicted"
        " memory and seconds a step. Without hardware, this machine's. Nothing is run.",
        groups=(*_PLANNING, RankingFlags),
        texts=_CONFIG,
    ),
    "estimate": Tool(
        title="Memory and time of one configuration",
        description="Predicted memory by category and phase, seconds a step and verdict of one exact configuration.",
        groups=(*_PLANNING, ConfigurationFlags),
        texts=_CONFIG,
    ),
    "max": Tool(
        title="The largest that fits",
        description="Largest micro-batch, longest sequence and largest model that fit, by strategy.",
        groups=(*_PLANNING, MaximumFlags),
        texts=_CONFIG,
    ),
    "check": Tool(
        title="A trainer's own config",
        description="Reads a config or script of axolotl, LLaMA-Factory, ms-swift, TRL, HF Trainer, accelerate,"
        " DeepSpeed, torchtune, torchtitan, Megatron-LM, NeMo-RL, verl, OpenRLHF and others without running it: every"
        " key, whether it fits, findings, and the best plan of the same trainer as a diff.",
        groups=(ModelFlags, HardwareFlags, WorkFlags),
        names=("model", *_HARDWARE, "seq_len", "max_memory_gb"),
        texts={
            "files": {
                "type": "object",
                "description": "Texts of the files of one training, by name: train.yaml, ds_config.json, run.sh.",
                "minProperties": 1,
                "maxProperties": MOST_FILES,
                "propertyNames": {"pattern": f"^{_FILE_NAME.pattern}$"},
                "additionalProperties": {"type": "string", "maxLength": MOST_BYTES},
            },
            "command": {
                "type": "array",
                "description": "A command that names these files, word by word: what would stand in a shell.",
                "maxItems": MOST_WORDS,
                "items": {"type": "string", "maxLength": 1000},
            },
            "format": {"enum": list(FORMATS), "description": "The config's format, where its content does not tell."},
        },
    ),
    "explain": Tool(
        title="Where bytes and seconds go",
        description="Memory by category and phase and seconds by part of a plan, and why the others lost.",
        texts={
            "plan": {
                "type": "string",
                "maxLength": MOST_BYTES,
                "description": "Text of a plan file, as `dsplan recommend --out` or `dsplan estimate --out` writes it.",
            }
        },
    ),
}
"""What may be asked; every tool is read-only."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """JSON of a command, or the line that says why there is none."""

    value: Any = None
    error: str = ""


def ask(name: str, arguments: Mapping[str, Any], seconds: float) -> Answer:
    """Return the answer of a tool; what cannot be answered is an error in one line."""
    with tempfile.TemporaryDirectory(prefix="dsplan-") as folder:
        try:
            words = command_words(name, arguments, Path(folder))
        except DsplanError as error:
            return Answer(error=str(error))
        return _run(words, Path(folder), seconds)


def command_words(name: str, arguments: Mapping[str, Any], folder: Path) -> list[str]:
    """Return the words behind `dsplan` that ask the same; texts become files of `folder`.

    Raises:
        DsplanError: there is no such tool or argument, or a value is none that it takes.
    """
    if name not in TOOLS:
        raise DsplanError(f"there is no tool {quote(name)}; call one of {', '.join(TOOLS)}")
    tool = TOOLS[name]
    flags, texts = tool.flags, dict(tool.texts or {})
    if unknown := [key for key in arguments if key not in flags and key not in texts]:
        raise DsplanError(f"{name} has no argument {quote(unknown[0])}; give {', '.join([*texts, *flags])}")
    words = [name, "--json"]
    for key, value in arguments.items():
        if key in flags and value is not None:
            words += _flag_words(flags[key], value)
    if "config" in arguments and arguments["config"] is not None:
        if arguments.get("model") is not None:
            raise DsplanError("config and model are both there; give one of them")
        words += ["--model", _write(folder, "config.json", arguments["config"], MOST_CONFIG_BYTES)]
    elif isinstance(arguments.get("model"), str):
        named_model(arguments["model"])  # of the catalogue, or a size: nothing that is a file or code
    if name == "explain":
        words.append(_write(folder, "plan.yaml", arguments.get("plan"), MOST_BYTES))
    elif name == "check":
        words += _check_words(arguments, folder)
    return words


def _flag_words(field: Field, value: Any) -> list[str]:
    """Return a flag with its value, as strictly read as on the page."""
    if field.kind == "switch":
        if not isinstance(value, bool):
            raise DsplanError(f"{field.name} is {quote(value)}; give true or false")
        if value == field.default:
            return []
        return [f"--{'' if value else 'no-'}{field.flag}"]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise DsplanError(f"{field.name} is {quote(value)}; give {'a number' if field.most else 'text'}")
    read = field.read(write(value))
    return [f"--{field.flag}={write(read)}"]


def _write(folder: Path, name: str, text: Any, most: int) -> str:
    if not isinstance(text, str) or not text.strip():
        raise DsplanError(f"the text of {name} is missing; give its content")
    if len(text.encode(errors="replace")) > most:
        raise DsplanError(f"the text of {name} is larger than {most // 1024} KiB")
    (folder / name).write_text(text, encoding="utf-8", errors="replace")
    return name


def _check_words(arguments: Mapping[str, Any], folder: Path) -> list[str]:
    files, command = arguments.get("files"), arguments.get("command") or []
    if not isinstance(files, Mapping) or not files:
        raise DsplanError("files is missing; give the texts of a config or a script by their names")
    if len(files) > MOST_FILES:
        raise DsplanError(f"files holds {len(files)} texts; give at most {MOST_FILES}")
    words = []
    for name, text in files.items():
        if not _FILE_NAME.fullmatch(str(name)):
            raise DsplanError(f"{quote(name)} is no name of a file; write letters, digits, dots and dashes")
        words.append(_write(folder, str(name), text, MOST_BYTES))
    form = arguments.get("format")
    if form is not None:
        words.insert(0, f"--format={form}")
    if not isinstance(command, Sequence) or isinstance(command, str) or len(command) > MOST_WORDS:
        raise DsplanError(f"command is a list of at most {MOST_WORDS} words; give it word by word")
    if command:
        # As a script it finds the files beside it by itself, and none outside of their folder.
        script = next(name for name in map("command-{}.sh".format, count()) if name not in files)
        text = shlex.join(map(str, command))
        words = [*(word for word in words if word.startswith("--")), _write(folder, script, text, MOST_BYTES)]
    return words


def _run(words: Sequence[str], folder: Path, seconds: float) -> Answer:
    call = [sys.executable, "-m", "dsplan", *words]
    try:
        process = subprocess.run(
            call, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired:
        return Answer(error=f"no answer within {seconds:g} seconds; ask for fewer GPUs or a smaller model")
    if process.returncode in (0, 1) and process.stdout.strip():
        return Answer(value=json.loads(process.stdout))
    lines = process.stderr.strip().splitlines() or [f"dsplan ended with status {process.returncode}"]
    if process.returncode == _BROKEN and process.stdout.strip():  # `check` without an estimate says what it read
        return Answer(value=json.loads(process.stdout))
    return Answer(error=lines[-1].removeprefix(LABEL))


# The server.


@lru_cache(maxsize=1)
def _sdk() -> Any:
    try:
        import mcp.types
        from mcp.server.lowlevel import Server
        from mcp.server.stdio import stdio_server
    except ModuleNotFoundError as error:
        raise DsplanError(f"dsplan mcp cannot serve here ({error}); pip install 'dsplan[mcp]'") from None
    return mcp.types, Server, stdio_server


def serve_tools(seconds: float) -> None:
    """Serve the tools on standard input and output until the other side is gone.

    Raises:
        DsplanError: the SDK is not installed.
    """
    types, server_class, stdio_server = _sdk()
    import anyio
    import anyio.to_thread

    from dsplan import __version__

    async def list_tools(context: Any, parameters: Any) -> Any:
        return types.ListToolsResult(tools=[_described(types, name, tool) for name, tool in TOOLS.items()])

    async def call_tool(context: Any, parameters: Any) -> Any:
        answer = await anyio.to_thread.run_sync(ask, parameters.name, parameters.arguments or {}, seconds)
        return _result(types, answer)

    server = server_class(
        "dsplan",
        version=__version__,
        instructions="Predicts memory and time of distributed training, and ranks ways to run it. Sizes are in bytes.",
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )

    async def serve() -> None:
        async with stdio_server() as (reading, writing):
            await server.run(reading, writing, server.create_initialization_options())

    anyio.run(serve)


def _described(types: Any, name: str, tool: Tool) -> Any:
    hints = types.ToolAnnotations(
        title=tool.title, read_only_hint=True, destructive_hint=False, idempotent_hint=True, open_world_hint=False
    )
    return types.Tool(
        name=name, title=tool.title, description=tool.description, input_schema=tool.schema, annotations=hints
    )


def _result(types: Any, answer: Answer) -> Any:
    text = answer.error or json.dumps(answer.value)
    structured = answer.value if isinstance(answer.value, dict) else None
    return types.CallToolResult(
        content=[types.TextContent(type="text", text=text)],
        structured_content=structured,
        is_error=bool(answer.error),
    )
