"""Loss scale: fp16 gradients are made larger than they are, so that the small ones are not rounded to zero.

The rules are those of Micikevicius et al. 2018 (section 3.2) with DeepSpeed's words: an overflow skips the step and,
after `hysteresis` of them, halves the scale, never below `floor`; `window` steps without one double it. What overflowed
is known on every rank, so the scale is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from strategies.config import Fp16Section

_FACTOR = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleSettings:
    """`initial` scale, steps without overflow (`window`) until it grows, overflows (`hysteresis`) until it shrinks."""

    initial: float = 2.0**16
    window: int = 1000
    hysteresis: int = 2
    floor: float = 1.0
    is_dynamic: bool = True


def scale_settings(section: Fp16Section) -> ScaleSettings:
    """What a config's `fp16` asks for."""
    fixed = section.loss_scale
    return ScaleSettings(
        initial=fixed or 2.0**section.initial_scale_power,
        window=section.loss_scale_window,
        hysteresis=section.hysteresis,
        floor=section.min_loss_scale,
        is_dynamic=not fixed,
    )


class LossScale:
    """The scale and how it changes; without settings it is 1 and stays it."""

    def __init__(self, settings: ScaleSettings | None) -> None:
        self._settings = settings
        self.value = 1.0 if settings is None else settings.initial
        self._good_steps = 0
        self._overflows_left = 0 if settings is None else settings.hysteresis

    def stepped(self) -> None:
        """A step was taken."""
        if self._settings is None or not self._settings.is_dynamic:
            return
        self._good_steps += 1
        if self._good_steps >= self._settings.window:
            self._good_steps = 0
            self._overflows_left = self._settings.hysteresis
            self.value *= _FACTOR

    def overflowed(self) -> None:
        """A step was skipped for gradients that are not finite."""
        if self._settings is None or not self._settings.is_dynamic:
            return
        self._good_steps = 0
        self._overflows_left -= 1
        if self._overflows_left <= 0:
            self.value = max(self._settings.floor, self.value / _FACTOR)

    def state_dict(self) -> dict[str, Any]:
        """JSON, with the names of torch's GradScaler, so that its strategies resume from it."""
        if self._settings is None:
            return {}
        return {
            "scale": self.value,
            "growth_factor": _FACTOR,
            "backoff_factor": 1 / _FACTOR,
            "growth_interval": self._settings.window,
            "_growth_tracker": self._good_steps,
            "overflows_left": self._overflows_left,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the scale of this class or of torch's GradScaler; nothing where fp16 is off on either side."""
        if self._settings is None or "scale" not in state:
            return
        self.value = float(state["scale"])
        self._good_steps = int(state["_growth_tracker"])
        self._overflows_left = int(state.get("overflows_left", self._settings.hysteresis))
