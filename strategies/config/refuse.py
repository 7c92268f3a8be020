"""What a config may not say: keys that nobody knows, and what only DeepSpeed does where another engine runs."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from planner.plan import Configuration
from strategies.config.fields import Fields
from strategies.config.known import TOP, Known
from strategies.config.values import ScriptConfig
from strategies.errors import CannotRun


def refuse_unknown(top: Fields, known: Known = TOP) -> None:
    """Stop at a key that no engine reads, in any section.

    Raises:
        CannotRun: naming the key and the nearest known one.
    """
    for key in top.values:
        if key not in known.names:
            raise CannotRun(f"config: {top.name(str(key))} is not known; {_remedy(str(key), known)}")
    for key, section in known.sections.items():
        refuse_unknown(top.section(key), section)
    for key in known.switched:
        top.section(key)


def refuse_deepspeed_keys(script: ScriptConfig, configuration: Configuration) -> None:
    """Stop at what only DeepSpeed does, when another engine runs.

    Raises:
        CannotRun: naming the keys.
    """
    if configuration.backend == "deepspeed":
        return
    asked = sorted(_beyond(Fields(script.values), TOP))
    if asked:
        name = "backend 'native'" if configuration.backend == "native" else f"strategy {configuration.strategy!r}"
        raise CannotRun(
            f"config: {name} cannot do what {', '.join(asked)} asks; leave it out, or use zero1, zero2 or zero3 with"
            " backend 'deepspeed'"
        )


def _beyond(fields: Fields, known: Known) -> Iterator[str]:
    """The keys that ask DeepSpeed for more than its default."""
    for key, default in known.defaults.items():
        value = fields.values.get(key)
        if fields.has(key) and value != default and value not in ({}, [], ()):
            yield fields.name(key)
    for key in known.switched:
        if fields.section(key).flag("enabled"):
            yield fields.name(key)
    for key, section in known.sections.items():
        yield from _beyond(fields.section(key), section)


def _remedy(key: str, known: Known) -> str:
    if home := _home(key, TOP):
        return f"it belongs in {home}"
    near = get_close_matches(key, known.names, n=1) or get_close_matches(key.lower(), known.names, n=1)
    return f"did you mean {near[0]}?" if near else "docs/config.md lists the keys"


def _home(key: str, known: Known, place: str = "") -> str:
    """The section that knows a key; empty where none does."""
    for name, section in known.sections.items():
        inner = f"{place}.{name}" if place else name
        if key in section.names and key not in _COMMON:
            return inner
        if found := _home(key, section, inner):
            return found
    return ""


_COMMON = frozenset(
    {"enabled", "type", "params", "output_path", "job_name", "device", "nvme_path", "pin_memory", "buffer_count"}
)
"""Keys of several sections, which say nothing of where one belongs."""
