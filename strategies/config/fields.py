"""One section of a config, read key by key; a value of another kind is named with its place."""

from __future__ import annotations

from collections.abc import Mapping
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
        """A truth value, or None where the section does not say."""
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
        """A whole number, or None where the section does not say."""
        return self.whole(key, least, least=least) if self.has(key) else None

    def number(self, key: str, default: float, *, most: float | None = None) -> float:
        """A number of at least 0."""
        value = self._value(key, default)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not 0 <= value < float("inf") or (most is not None and value > most):
            self.refuse(key, "a number of at least 0" if most is None else f"a number from 0 to {most:g}")
        return float(value)

    def real(self, key: str) -> float | None:
        """A number of either sign, or None where the section does not say."""
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
        """A string, or None where the section does not say."""
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
