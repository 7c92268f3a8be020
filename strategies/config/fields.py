"""One section of a config, read key by key; a value of another kind is named with its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar, cast, get_args, get_origin, get_type_hints

from hardware_db.files import read_shipped_yaml
from strategies.errors import CannotRun

Section = TypeVar("Section")


class Fields:
    """A section's values. `null` and `auto` read as the default; every reader raises CannotRun for another kind."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self.values = values
        self._path = path

    def name(self, key: str) -> str:
        """Return a key as messages call it: `zero_optimization.stage`."""
        return f"{self._path}.{key}" if self._path else key

    def has(self, key: str) -> bool:
        """Return whether the section decides this key."""
        return self.values.get(key) not in (None, "auto")

    def into(self, kind: type[Section], **given: Any) -> Section:
        """Read a dataclass whose fields are keys of this section, but for what is `given`.

        A field's default and metadata (`least`, `most`, `spellings`) say what it is without a word and what is refused.
        """
        hints, declared = get_type_hints(kind), fields(cast("Any", kind))
        limits = {each.name: (hints[each.name], each.metadata) for each in declared if each.name not in given}
        read = {key: self._read(key, hint, limit) for key, (hint, limit) in limits.items() if self.has(key)}
        return kind(**{**read, **given})

    def _read(self, key: str, hint: Any, limits: Mapping[str, Any]) -> Any:
        """Read a key that is there as what its field's annotation says, which may allow None too."""
        for kind in (hint, *get_args(hint)):
            if get_origin(kind) is Literal:
                choices = {word: word for word in get_args(kind)} | dict(limits.get("spellings", {}))
                return self.one_of(key, choices, None)
            if kind is bool:
                return self.flag(key)
            if kind is int:
                return self.whole(key, 0, least=limits.get("least", 0))
            if kind is float:
                return self.number(key, 0.0, most=limits.get("most"))
            if kind is str:
                return self.text(key, "")
        raise TypeError(f"{self.name(key)}: no config has values of {hint}")

    def section(self, key: str) -> Fields:
        """Return the section below a key; an empty one where there is none."""
        value = self.values.get(key)
        if value is None:
            return Fields({}, self.name(key))
        if not isinstance(value, Mapping):
            self.refuse(key, "an object")
        return Fields(value, self.name(key))

    def flag(self, key: str, default: bool = False) -> bool:
        """Read a truth value."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "true or false")
        return value

    def maybe_flag(self, key: str) -> bool | None:
        """Read a truth value; None if the section does not say."""
        return self.flag(key) if self.has(key) else None

    def whole(self, key: str, default: int, *, least: int = 0) -> int:
        """Read a whole number; JSON writes large ones as 5e8."""
        value = self._value(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.refuse(key, f"a whole number of at least {least}")
        return value

    def maybe_whole(self, key: str, *, least: int = 0) -> int | None:
        """Read a whole number; None if the section does not say."""
        return self.whole(key, least, least=least) if self.has(key) else None

    def number(self, key: str, default: float, *, most: float | None = None) -> float:
        """Read a number of at least 0."""
        value = self._value(key, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 <= value < float("inf") or (most is not None and value > most):
            self.refuse(key, "a number of at least 0" if most is None else f"a number from 0 to {most:g}")
        return float(value)

    def real(self, key: str) -> float | None:
        """Read a number of either sign; None if the section does not say."""
        value = self._value(key, None)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
            self.refuse(key, "a number")
        return float(value)

    def text(self, key: str, default: str) -> str:
        """Read a string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            self.refuse(key, "a string")
        return value

    def maybe_text(self, key: str) -> str | None:
        """Read a string; None if the section does not say."""
        return self.text(key, "") if self.has(key) else None

    def refuse(self, key: str, kind: str) -> NoReturn:
        """Stop at a value that is not of its kind.

        Raises:
            CannotRun: always.
        """
        raise CannotRun(f"config: {self.name(key)} is {self.values.get(key)!r}; it must be {kind}")

    def one_of(self, key: str, choices: Mapping[str, Any], default: Any) -> Any:
        """Return what `choices` has under the value, whatever its case."""
        value = self._value(key, None)
        if value is None:
            return default
        if not isinstance(value, str) or value.lower() not in choices:
            self.refuse(key, f"one of {', '.join(choices)}")
        return choices[value.lower()]

    def _value(self, key: str, default: Any) -> Any:
        return self.values[key] if self.has(key) else default


# Other spellings (`spellings.yaml`): flat keys, old names and `true` for a section, in DeepSpeed's words.
Values = dict[str, Any]

_SPELLINGS = read_shipped_yaml(Path(__file__).with_name("spellings.yaml"))
_PATHS: Mapping[str, tuple[str, ...]] = {key: tuple(path.split(".")) for key, path in _SPELLINGS["paths"].items()}


def in_deepspeeds_words(config: Mapping[str, Any]) -> Values:
    """Return the config with every key where DeepSpeed, or a section of ours, has it.

    Raises:
        CannotRun: two spellings of one thing differ.
    """
    values: Values = {key: _copied(value) for key, value in config.items() if key not in _PATHS}
    if isinstance(values.get("zero_optimization"), bool):
        # What DeepSpeed still takes it for (deepspeed/runtime/zero/config.py, read_zero_config_deprecated).
        values["zero_optimization"] = {"stage": int(values["zero_optimization"])}
    for key, path in _PATHS.items():
        if key in config:
            _put(values, path, _TRANSLATED.get(key, _copied)(config[key]), spelled=key)
    for name in _words("switches"):
        if isinstance(values.get(name), bool):
            values[name] = {"enabled": values[name]}
    _overlap(values)
    zero = values.get("zero_optimization")
    if isinstance(zero, dict):
        _offload(zero)
        for name in _words("stage_3"):
            if name in zero:
                _put(zero, (f"stage3_{name}",), zero.pop(name), spelled=f"zero_optimization.{name}")
    _learning_rate(values)
    return values


def _words(kind: str) -> list[str]:
    words: list[str] = _SPELLINGS[kind].split()
    return words


def _put(values: Values, path: tuple[str, ...], value: Any, *, spelled: str) -> None:
    """Write a value below its sections, unless it is there already."""
    *sections, key = path
    for name in sections:
        inner = values.setdefault(name, {})
        if isinstance(inner, bool):
            inner = values[name] = {"enabled": inner}
        if not isinstance(inner, dict):
            return  # whoever reads this section refuses it
        values = inner
    there = values.get(key)
    # Two ways to say how often lines are printed may differ: the one named for printing counts.
    if there is not None and value is not None and there != value and spelled != "log_interval":
        raise CannotRun(f"config: {spelled} is {value!r} and {'.'.join(path)} is {there!r}; leave one out")
    if there is None:
        values[key] = value


def _offload(zero: Values) -> None:
    """Write `offload_x: true` and the older `cpu_offload` as sections of their own."""
    for name in ("offload_optimizer", "offload_param"):
        if isinstance(zero.get(name), bool):
            zero[name] = {"device": "cpu" if zero[name] else "none"}
    for old, name in _SPELLINGS["old_offload"].items():
        on = zero.pop(old, None)
        if isinstance(on, bool):
            _put(zero, (name, "device"), "cpu" if on else "none", spelled=old)
        elif on is not None:
            Fields({old: on}, "zero_optimization").refuse(old, "true or false")
    pinned = zero.pop("cpu_offload_use_pin_memory", None)
    for name in ("offload_optimizer", "offload_param"):
        if pinned is not None and name in zero:
            _put(zero, (name, "pin_memory"), pinned, spelled="cpu_offload_use_pin_memory")


def _overlap(values: Values) -> None:
    """Move the two words of `communication` for what DeepSpeed calls `zero_optimization.overlap_comm`."""
    section = values.get("communication")
    for name in ("overlap_comm", "overlap_reduce_scatter"):
        if isinstance(section, dict) and name in section:
            flag = Fields(section, "communication").maybe_flag(name)
            del section[name]
            if flag is not None:
                _put(values, ("zero_optimization", "overlap_comm"), flag, spelled=f"communication.{name}")


def _learning_rate(values: Values) -> None:
    """Give a flat `learning_rate` to AdamW, or to the optimizer that has none."""
    if "learning_rate" not in values:
        return
    rate = values.pop("learning_rate")
    optimizer = values.setdefault("optimizer", {"type": "AdamW"})
    if isinstance(optimizer, dict) and isinstance(optimizer.setdefault("params", {}), dict):
        _put(values, ("optimizer", "params", "lr"), rate, spelled="learning_rate")


def _profiler(section: Any) -> Any:
    """Translate `profiling`, which names one step to watch, into ours, which counts the steps before it."""
    if not isinstance(section, Mapping):
        return section
    fields = Fields(section, "profiling")
    step = fields.whole("profile_step", 1, least=1)
    own = {name: value for name, value in section.items() if name in ("enabled", "output_path")}
    rest = {name: value for name, value in section.items() if name not in _words("profiling") and name not in own}
    return own | rest | {"wait": max(0, step - 2), "warmup": min(1, step - 1), "active": 1}


def _communication(section: Any) -> Any:
    """Translate `compression` into our `communication`: 8 bits only for quantization, else a 16-bit type."""
    if not isinstance(section, Mapping):
        return section
    fields = Fields(section, "compression")
    own: Values = {name: value for name, value in section.items() if name not in _words("compression")}
    if fields.flag("enabled"):
        own["compression"] = fields.one_of("compression_type", _SPELLINGS["compression_types"], "fp16")
        if own["compression"] == "int8" and fields.whole("quantization_bits", 8) != 8:
            fields.refuse("quantization_bits", "8")
    return own


_TRANSLATED: Mapping[str, Callable[[Any], Any]] = {"profiling": _profiler, "compression": _communication}


def _copied(value: Any) -> Any:
    return {key: _copied(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value
