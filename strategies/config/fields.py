"""One section of a config, read key by key; a value of another kind is named with its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from strategies.errors import CannotRun


class Fields:
    """A section's values. `null` and `auto` read as the default; every reader raises CannotRun for another kind."""

    def __init__(self, values: Mapping[str, Any], place: str = "") -> None:
        self.values = values
        self._place = place

    def name(self, key: str) -> str:
        """A key as messages call it: `zero_optimization.stage`."""
        return f"{self._place}.{key}" if self._place else key

    def has(self, key: str) -> bool:
        """Whether the section decides this key."""
        return self.values.get(key) not in (None, "auto")

    def section(self, key: str) -> Fields:
        """The section below a key; an empty one where there is none."""
        value = self.values.get(key)
        if value is None:
            return Fields({}, self.name(key))
        if not isinstance(value, Mapping):
            self.refuse(key, "an object")
        return Fields(value, self.name(key))

    def flag(self, key: str, default: bool = False) -> bool:
        """A truth value."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            self.refuse(key, "true or false")
        return value

    def maybe_flag(self, key: str) -> bool | None:
        """Return a truth value, or None if the section does not say."""
        return self.flag(key) if self.has(key) else None

    def whole(self, key: str, default: int, *, least: int = 0) -> int:
        """A whole number; JSON writes large ones as 5e8."""
        value = self._value(key, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            self.refuse(key, f"a whole number of at least {least}")
        return value

    def maybe_whole(self, key: str, *, least: int = 0) -> int | None:
        """Return a whole number, or None if the section does not say."""
        return self.whole(key, least, least=least) if self.has(key) else None

    def number(self, key: str, default: float, *, most: float | None = None) -> float:
        """A number of at least 0."""
        value = self._value(key, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 <= value < float("inf") or (most is not None and value > most):
            self.refuse(key, "a number of at least 0" if most is None else f"a number from 0 to {most:g}")
        return float(value)

    def maybe_number(self, key: str) -> float | None:
        """Return a number of at least 0, or None if the section does not say."""
        return self.number(key, 0.0) if self.has(key) else None

    def real(self, key: str) -> float | None:
        """Return a number of either sign, or None if the section does not say."""
        value = self._value(key, None)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
            self.refuse(key, "a number")
        return float(value)

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self._value(key, default)
        if not isinstance(value, str):
            self.refuse(key, "a string")
        return value

    def maybe_text(self, key: str) -> str | None:
        """Return a string, or None if the section does not say."""
        return self.text(key, "") if self.has(key) else None

    def refuse(self, key: str, kind: str) -> NoReturn:
        """Stop at a value that is not of its kind.

        Raises:
            CannotRun: always.
        """
        raise CannotRun(f"config: {self.name(key)} is {self.values.get(key)!r}; it must be {kind}")

    def one_of(self, key: str, choices: Mapping[str, Any], default: Any) -> Any:
        """What `choices` has under the value, whatever its case."""
        value = self._value(key, None)
        if value is None:
            return default
        if not isinstance(value, str) or value.lower() not in choices:
            self.refuse(key, f"one of {', '.join(choices)}")
        return choices[value.lower()]

    def _value(self, key: str, default: Any) -> Any:
        return self.values[key] if self.has(key) else default


# Other spellings: flat keys (`batch_size`, `zero_stage`), old names and `true` for a section, in DeepSpeed's words.


Values = dict[str, Any]

_PLACES: Mapping[str, tuple[str, ...]] = {
    "batch_size": ("train_micro_batch_size_per_gpu",),
    "log_interval": ("steps_per_print",),
    "zero_stage": ("zero_optimization", "stage"),
    "offload_optimizer": ("zero_optimization", "offload_optimizer"),
    "offload_param": ("zero_optimization", "offload_param"),
    "allgather_base_size": ("zero_optimization", "allgather_bucket_size"),
    "reduce_scatter_base_size": ("zero_optimization", "reduce_bucket_size"),
    "gather_16bit_weights_on_model_save": ("zero_optimization", "stage3_gather_16bit_weights_on_model_save"),
    "loss_scale": ("fp16", "loss_scale"),
    "save_dir": ("checkpoint", "directory"),
    "save_interval": ("checkpoint", "every_steps"),
    "keep_checkpoints": ("checkpoint", "keep_last"),
    "save_logs": ("csv_monitor", "enabled"),
    "bfloat16": ("bf16",),
    "profiling": ("profiler",),
    "compression": ("communication",),
}
_SWITCHES = ("fp16", "bf16", "activation_checkpointing", "profiler", "tensorboard", "csv_monitor", "monitor")
_STAGE_3 = (
    "allgather_sequential",
    "gather_16bit_weights_on_model_save",
    "max_live_parameters",
    "max_reuse_distance",
    "model_persistence_threshold",
    "module_granularity_threshold",
    "param_persistence_threshold",
    "prefetch_bucket_size",
    "use_all_reduce_for_fetch_params",
)
"""Keys of `zero_optimization` that DeepSpeed documents so and reads only with `stage3_` in front."""
_OLD_OFFLOAD = {
    "cpu_offload": "offload_optimizer",
    "cpu_offload_param": "offload_param",
    "cpu_offload_params": "offload_param",
}


def in_deepspeeds_words(config: Mapping[str, Any]) -> Values:
    """The config with every key where DeepSpeed, or a section of ours, has it.

    Raises:
        CannotRun: two spellings of one thing differ.
    """
    values: Values = {key: _copied(value) for key, value in config.items() if key not in _PLACES}
    if isinstance(values.get("zero_optimization"), bool):
        # What DeepSpeed still takes it for (deepspeed/runtime/zero/config.py, read_zero_config_deprecated).
        values["zero_optimization"] = {"stage": int(values["zero_optimization"])}
    for key, place in _PLACES.items():
        if key in config:
            _put(values, place, _TRANSLATED.get(key, _copied)(config[key]), spelled=key)
    for name in _SWITCHES:
        if isinstance(values.get(name), bool):
            values[name] = {"enabled": values[name]}
    _overlap(values)
    zero = values.get("zero_optimization")
    if isinstance(zero, dict):
        _offload(zero)
        for name in _STAGE_3:
            if name in zero:
                _put(zero, (f"stage3_{name}",), zero.pop(name), spelled=f"zero_optimization.{name}")
    _learning_rate(values)
    return values


def _put(values: Values, place: tuple[str, ...], value: Any, *, spelled: str) -> None:
    """Write a value at its place, unless the place holds it already."""
    *sections, key = place
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
        raise CannotRun(f"config: {spelled} is {value!r} and {'.'.join(place)} is {there!r}; leave one out")
    if there is None:
        values[key] = value


def _offload(zero: Values) -> None:
    """`offload_x: true` and the older `cpu_offload` as sections of their own."""
    for name in ("offload_optimizer", "offload_param"):
        if isinstance(zero.get(name), bool):
            zero[name] = {"device": "cpu" if zero[name] else "none"}
    for old, place in _OLD_OFFLOAD.items():
        on = zero.pop(old, None)
        if isinstance(on, bool):
            _put(zero, (place, "device"), "cpu" if on else "none", spelled=old)
        elif on is not None:
            Fields({old: on}, "zero_optimization").refuse(old, "true or false")
    pinned = zero.pop("cpu_offload_use_pin_memory", None)
    for name in ("offload_optimizer", "offload_param"):
        if pinned is not None and name in zero:
            _put(zero, (name, "pin_memory"), pinned, spelled="cpu_offload_use_pin_memory")


def _overlap(values: Values) -> None:
    """The two words of `communication` for what DeepSpeed calls `zero_optimization.overlap_comm`."""
    section = values.get("communication")
    for name in ("overlap_comm", "overlap_reduce_scatter"):
        if isinstance(section, dict) and name in section:
            flag = Fields(section, "communication").maybe_flag(name)
            del section[name]
            if flag is not None:
                _put(values, ("zero_optimization", "overlap_comm"), flag, spelled=f"communication.{name}")


def _learning_rate(values: Values) -> None:
    """A flat `learning_rate` is AdamW's, or that of the optimizer that has none."""
    if "learning_rate" not in values:
        return
    rate = values.pop("learning_rate")
    optimizer = values.setdefault("optimizer", {"type": "AdamW"})
    if isinstance(optimizer, dict) and isinstance(optimizer.setdefault("params", {}), dict):
        _put(values, ("optimizer", "params", "lr"), rate, spelled="learning_rate")


def _profiler(section: Any) -> Any:
    """`profiling` names one step to watch; ours counts the steps before it."""
    if not isinstance(section, Mapping):
        return section
    fields = Fields(section, "profiling")
    step = fields.whole("profile_step", 1, least=1)
    own = {name: value for name, value in section.items() if name in ("enabled", "output_path")}
    rest = {name: value for name, value in section.items() if name not in _PROFILING and name not in own}
    return own | rest | {"wait": max(0, step - 2), "warmup": min(1, step - 1), "active": 1}


_PROFILING = ("profile_step", "module_depth", "top_modules")


def _communication(section: Any) -> Any:
    """`compression` as our `communication`: 8 bits only where the type is quantization, else a 16-bit type."""
    if not isinstance(section, Mapping):
        return section
    fields = Fields(section, "compression")
    own: Values = {name: value for name, value in section.items() if name not in _COMPRESSION}
    if fields.flag("enabled"):
        own["compression"] = fields.one_of("compression_type", _TYPES, "fp16")
        if own["compression"] == "int8" and fields.whole("quantization_bits", 8) != 8:
            fields.refuse("quantization_bits", "8")
    return own


_TYPES = {"fp16": "fp16", "bf16": "bf16", "int8": "int8", "quantization": "int8"}
# What is gathered is the weights in the dtype of the plan, and our 8-bit blocks are symmetric.
_COMPRESSION = ("enabled", "compression_type", "quantization_type", "quantization_bits", "all_gather_fp16")
_TRANSLATED: Mapping[str, Callable[[Any], Any]] = {"profiling": _profiler, "compression": _communication}


def _copied(value: Any) -> Any:
    return {key: _copied(inner) for key, inner in value.items()} if isinstance(value, Mapping) else value
