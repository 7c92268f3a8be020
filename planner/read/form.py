"""The form that every reader makes of a config: settings with their places, and what became of each of them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from hardware_db.errors import BrokenFile
from hardware_db.handed_in import quote
from hardware_db.records import dataclass
from planner import limits

Severity = Literal["error", "warning", "info"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "info")
"""Worst first."""
Reach = Literal["anywhere", "folder", "nowhere"]
"""Which files the names in a text may mean: any, those of its own folder, or none of this machine."""
TWO_PRECISIONS = "two-precisions"
"""The id of findings of bf16 and fp16 that are both on; their key is that of fp16."""
TWO_BATCHES = "two-batches"
"""The id of findings of a key of the batch that a trainer refuses beside others; it is that to leave out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A text that was read; `path` is what messages call it. A command line is a source without a file."""

    path: str
    text: str
    is_file: bool = True
    reach: Reach = "folder"
    """Only what a person types themselves reaches anywhere; a text that a stranger hands in reaches nowhere."""

    @property
    def folder(self) -> Path:
        """The folder that it is in."""
        return Path(self.path).parent

    def line_of(self, offset: int) -> int:
        """Return the line, from 1 on, of a character."""
        return self.text.count("\n", 0, max(offset, 0)) + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One key with its value and its place; keys of nested mappings are joined by dots."""

    key: str
    value: Any
    source: Source
    line: int
    start: int = -1
    """Where in the text the value begins; -1 where it stands nowhere as it is."""
    end: int = -1
    """Where it ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unresolved:
    """A value that only running the script would give: `$(nvidia-smi …)`, `$1` without a default."""

    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, kw_only=True, slots=True)
class Understood:
    """A key and what it became: a value of a field of the question."""

    key: str
    file: str
    line: int
    field: str
    value: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Unread:
    """A key that became nothing, and why; `matters` where memory or time may differ for it."""

    key: str
    file: str
    line: int
    reason: str
    matters: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Something to know of a config; `severity` error where it does not run or fit as it is."""

    severity: Severity
    id: str
    message: str
    key: str = ""
    file: str = ""
    line: int = 0


Role = tuple[str, str]
"""A reader's name for a field, as keys of one trainer say it: `("micro_batch", "per_device_train_batch_size")`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """All that files say: keys that were understood and those that were not, findings, and the question they make.

    `answers` are fields of `Question` and of `ExactOptions` by name. `steps` are those of the whole run, None where no
    file says it; `gpus` is in `answers` where a file or a launcher says it. `settings` are those of the trainer's own
    config, which changes are written to. `trainer` is the name of what trains.
    """

    format: str
    trainer: str
    files: tuple[str, ...]
    read: tuple[Understood, ...]
    unread: tuple[Unread, ...]
    findings: tuple[Finding, ...]
    answers: Mapping[str, Any]
    settings: Mapping[str, Setting]
    steps: int | None = None
    looks_at_files: bool = True
    """Whether names in it may mean files of this machine."""

    @property
    def gaps(self) -> tuple[Unread, ...]:
        """Keys that may matter and are not counted."""
        return tuple(item for item in self.unread if item.matters)


COMMAND = "the command"
"""The key under which a subcommand or a script's name stands beside its flags."""
_TRUE, _FALSE = frozenset({"true", "yes", "on", "1"}), frozenset({"false", "no", "off", "0"})
_REFERENCE = re.compile(r"\$|\{\{|<[a-z_ ]+>|^\?\?\?$")
_DEFAULTED = re.compile(r"\$\{(?:oc\.env:)?[A-Za-z_]\w*[:,]-?([^{}]*)\}")
"""A variable of the environment with its default, as Primus and hydra write it; nobody's environment is read."""


def plain_value(text: str) -> Any:
    """Return a word of a command line as the value that YAML would read in it."""
    stripped = text.strip()
    lowered = stripped.lower()
    if lowered in ("null", "none", "~", ""):
        return None
    if lowered in ("true", "false"):
        return lowered == "true"
    if re.fullmatch(r"[-+]?[0-9]{1,18}", stripped):
        return int(stripped)
    if re.fullmatch(r"\[[^\[\]]*\]", stripped):
        return [plain_value(part.strip(" '\"")) for part in stripped[1:-1].split(",") if part.strip()]
    return stripped.strip("'\"")


_MOST_LETTERS = 10_000
_LIMITS: Mapping[str, limits.Limit] = {
    **dict.fromkeys(("micro_batch", "grad_accum", "global_batch", "prompts_per_step"), limits.SAMPLES),
    **dict.fromkeys(("gpus", "nodes", "tp", "pp", "cp", "ep", "shard", "rollout_gpus", "rollout_tp"), limits.GPUS),
    **dict.fromkeys(("seq_len", "prompt_len", "generations", "lora_rank"), limits.TOKENS),
}
"""Of the fields that a config's numbers become, as of the flags that say the same."""


class Notebook:
    """Collects what a reader understands: the settings, which of them were used, and what they became."""

    def __init__(self, settings: Iterable[Setting], trainer: str) -> None:
        self.settings: dict[str, Setting] = {}
        self.trainer = trainer
        self.answers: dict[str, Any] = {}
        self.understood: list[Understood] = []
        self.unread: list[Unread] = []
        self.findings: list[Finding] = []
        self.steps: int | None = None
        self._used: set[str] = set()
        for setting in settings:
            self.add(setting)

    def add(self, setting: Setting) -> None:
        """Take a setting; one that is there already is overridden, as trainers do it."""
        before = self.settings.get(setting.key)
        if isinstance(setting.value, str) and (default := _DEFAULTED.fullmatch(setting.value)):
            setting = replace(setting, value=plain_value(default[1]))
        self.settings[setting.key] = setting
        if before is not None and before.source is setting.source and before.value != setting.value:
            message = f"{setting.key} is there twice, in lines {before.line} and {setting.line}; the last one counts"
            self.find("warning", "key-twice", message, setting.key)

    # Looking at keys.

    def __contains__(self, key: str) -> bool:
        """Return whether a key is set to anything but nothing."""
        setting = self.settings.get(key)
        return setting is not None and setting.value is not None

    def under(self, prefix: str) -> Iterator[str]:
        """Yield the keys of a mapping: those that begin with its name and a dot."""
        return (key for key in tuple(self.settings) if key.startswith(f"{prefix}."))

    def raw(self, key: str, default: Any = None) -> Any:
        """Return a value as it is written, and count the key as used; an unresolved one is the default."""
        setting = self.settings.get(key)
        if setting is None or setting.value is None:
            self._used.add(key)
            return default
        if isinstance(setting.value, Unresolved) or is_reference(setting.value):
            self.leave(key, f"{quote(str(setting.value))} is known when it runs only", matters=True)
            return default
        self._used.add(key)
        return setting.value

    def text(self, key: str, default: str | None = None) -> str | None:
        """Return a value as text; of a list its parts, separated by commas.

        Raises:
            BrokenFile: it is longer than any name, path or list of modules.
        """
        value = self.raw(key)
        if value is None:
            return default
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        if len(text) > _MOST_LETTERS:
            raise self.broken(key, f"give at most {_MOST_LETTERS:,} characters")
        return text

    def word(self, key: str, default: str = "") -> str:
        """Return a value as a word in small letters."""
        return (self.text(key, default) or "").strip().lower()

    def flag(self, key: str, default: bool = False) -> bool:
        """Return a truth value, written in any of the usual ways.

        Raises:
            BrokenFile: it is none.
        """
        value = self.raw(key)
        if value is None or value == "":
            return default
        if isinstance(value, bool):
            return value
        text = str(value).strip().lower()
        if text in _TRUE or text in _FALSE:
            return text in _TRUE
        raise self.broken(key, "give true or false")

    def number(self, key: str, default: float | None = None) -> float | None:
        """Return a number; `auto` is the default.

        Raises:
            BrokenFile: it is none.
        """
        value = self.raw(key)
        if value is None or value == "" or str(value).strip().lower() in ("auto", "none", "null"):
            return default
        if isinstance(value, int | float) and not isinstance(value, bool):
            return value
        try:
            return float(str(value).replace("_", ""))
        except ValueError:
            raise self.broken(key, "give a number") from None

    def whole(self, key: str, default: int | None = None) -> int | None:
        """Return a whole number.

        Raises:
            BrokenFile: it is none.
        """
        value = self.number(key)
        if value is None:
            return default
        if value != value or abs(value) >= 2**63 or int(value) != value:
            raise self.broken(key, "give a whole number")
        return int(value)

    def positive(self, key: str, default: int | None = None) -> int | None:
        """Return a whole number of at least 1.

        Raises:
            BrokenFile: it is none.
        """
        value = self.whole(key, default)
        if value is not None and value < 1:
            raise self.broken(key, "give a whole number of at least 1")
        return value

    def broken(self, key: str, remedy: str) -> BrokenFile:
        """Return the error for a value that its key cannot have."""
        setting = self.settings[key]
        return BrokenFile(f"{setting.source.path}, line {setting.line}", f"{key} is {quote(setting.value)}", remedy)

    # Writing down what they became.

    def answer(self, field: str, value: Any, *keys: str) -> None:
        """Fill in a field of the question, and write down the keys that say it.

        Raises:
            BrokenFile: it is a number that nobody trains with, which nothing can be planned for either.
        """
        limit, written = _LIMITS.get(field), next((key for key in keys if key in self), None)
        if limit is not None and written is not None and isinstance(value, int) and not limit.allows(value):
            raise self.broken(written, f"give {limit}")
        self.answers[field] = value
        self.become(field, value, *keys)

    def become(self, field: str, value: Any, *keys: str) -> None:
        """Write down what keys that are set became."""
        for key in keys:
            setting = self.settings.get(key)
            if setting is None or setting.value is None:
                continue
            self._used.add(key)
            self.understood.append(
                Understood(key=key, file=setting.source.path, line=setting.line, field=field, value=value)
            )

    def leave(self, key: str, reason: str, *, matters: bool) -> None:
        """Write down why a key became nothing; once for each key."""
        setting = self.settings.get(key)
        if setting is None or any(item.key == key for item in self.unread):
            return
        self._used.add(key)
        self.unread.append(Unread(key=key, file=setting.source.path, line=setting.line, reason=reason, matters=matters))

    def find(self, severity: Severity, id: str, message: str, key: str = "") -> None:
        """Write down a finding, at a key's place where one is named."""
        setting = self.settings.get(key)
        file, line = ("", 0) if setting is None else (setting.source.path, setting.line)
        self.findings.append(Finding(severity=severity, id=id, message=message, key=key, file=file, line=line))

    def assume(self, message: str, key: str = "") -> None:
        """Write down what was taken for granted."""
        self.find("info", "assumed", message, key)

    # What is left at the end.

    def close(
        self,
        *,
        without_effect: Callable[[str], bool],
        gaps: Mapping[str, str],
        names: Iterable[str] = (),
        refuses_unknown: bool = False,
    ) -> None:
        """Say of every key that is left why it became nothing.

        `names` are the keys that the trainer has; a key that is none of them is told with the nearest.
        """
        spelt = set(names)
        told = {item.key for item in self.understood} | {item.key for item in self.unread} | {COMMAND}
        for key, setting in self.settings.items():
            if key not in told:
                self._leave_rest(key, setting, without_effect, gaps, spelt, refuses_unknown)

    def _leave_rest(
        self,
        key: str,
        setting: Setting,
        without_effect: Callable[[str], bool],
        gaps: Mapping[str, str],
        spelt: set[str],
        refuses_unknown: bool,
    ) -> None:
        first = key.partition(".")[0]
        reason = next(filter(None, (gaps.get(name) for name in _prefixes(key))), None)
        if reason is not None and not _is_off(setting.value):
            self.leave(key, reason, matters=True)
        elif setting.value is None:
            self.leave(key, "is empty", matters=False)
        elif key in self._used or reason is not None:
            self.leave(key, f"is {quote(setting.value)}, which is as if it were not there", matters=False)
        elif spelt and first not in spelt and (slip := difflib.get_close_matches(first, spelt, n=1, cutoff=_A_SLIP)):
            self._leave_unknown(key, slip, refuses_unknown)
        elif without_effect(key) or without_effect(first):
            self.leave(key, "changes neither memory nor time", matters=False)
        elif spelt and first not in spelt:
            self._leave_unknown(key, difflib.get_close_matches(first, spelt, n=1, cutoff=0.8), refuses_unknown)
        else:
            self.leave(key, f"a key of {self.trainer} that is not counted", matters=True)

    def _leave_unknown(self, key: str, near: Sequence[str], refuses_unknown: bool) -> None:
        first = key.partition(".")[0]
        hint = f"; did you mean {near[0]}" if near else ""
        self.leave(key, f"is no key of {self.trainer}{hint}", matters=bool(near))
        severity: Severity = "error" if refuses_unknown else "warning"
        does = "refuses it" if refuses_unknown else "does not look at it"
        self.find(severity, "unknown-key", f"{first} is no key of {self.trainer}, which {does}{hint}", key)

    def reading(self, format: str, files: Iterable[str]) -> Reading:
        """Return all that was written down."""
        order = {severity: rank for rank, severity in enumerate(SEVERITIES)}
        return Reading(
            format=format,
            trainer=self.trainer,
            files=tuple(dict.fromkeys(files)),
            read=tuple(self.understood),
            unread=tuple(self.unread),
            findings=tuple(sorted(self.findings, key=lambda item: order[item.severity])),
            answers=self.answers,
            settings=self.settings,
            steps=self.steps,
        )


_PATH = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")
_MOST_STEPS = 10
_A_SLIP = 0.93
"""Likeness from which on a key is one that the trainer has, misspelt, whatever it begins with."""


def follow_references(settings: Iterable[Setting]) -> list[Setting]:
    """Return settings with `${a.b}` replaced by the value of that key, as OmegaConf does; others stay as they are."""
    listed = list(settings)
    values = {item.key: item.value for item in listed}
    followed = []
    for item in listed:
        value = item.value
        for _ in range(_MOST_STEPS):
            match = _PATH.search(value) if isinstance(value, str) else None
            if match is None or match[1] not in values:
                break
            target = values[match[1]]
            value = target if match[0] == value else f"{value[: match.start()]}{target}{value[match.end() :]}"
        followed.append(item if value is item.value else replace(item, value=value, start=-1, end=-1))
    return followed


def _prefixes(key: str) -> Iterator[str]:
    """Yield a dotted key and the mappings that it is in, without the numbers of list items."""
    parts = [part for part in key.split(".") if not part.isdigit()]
    return (".".join(parts[:count]) for count in range(len(parts), 0, -1))


def is_reference(value: object) -> bool:
    """Return whether a value is a name for another one, which the file does not hold."""
    return isinstance(value, str) and _REFERENCE.search(value) is not None


def _is_off(value: object) -> bool:
    """Return whether a value switches off what its key is about."""
    return value in (None, False, 0, "", "false", "False", "none", "null", "no") or value in ([], {})
