"""Explain a plan: the distribution of its bytes and seconds, and why other plans lost."""

from __future__ import annotations

from dataclasses import dataclass

from planner.types.plan import Plan

CATEGORIES = {
    "parameters_bytes": "parameters",
    "gradients_bytes": "gradients",
    "optimizer_bytes": "optimizer states",
    "activations_bytes": "activations",
    "buffers_bytes": "communication buffers and unsharded parameters",
    "temporaries_bytes": "temporaries (cast copies, optimizer and library workspace)",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """One part of a whole; `amount` is bytes or seconds, `share` a fraction of the whole."""

    name: str
    amount: float
    share: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Explanation:
    """Shares of memory at the peak, peaks by phase, shares of step time, and the plans that lost with their reasons.

    `device` adds up to what NVML would show at most; `seconds` to the step, with communication only where nothing
    hides it.
    """

    categories: tuple[Share, ...]
    phases: tuple[Share, ...]
    device: tuple[Share, ...]
    seconds: tuple[Share, ...]
    hidden_communication_seconds: float
    lost: tuple[tuple[str, str], ...]


def explain(plan: Plan) -> Explanation:
    """The explanation of a plan, from the plan alone."""
    memory, time = plan.memory, plan.time
    categories = {label: getattr(memory, name) for name, label in CATEGORIES.items()}
    device = {
        "allocated by tensors": memory.peak_allocated_bytes,
        "held by the allocator beyond them": memory.peak_reserved_bytes - memory.peak_allocated_bytes,
        "context and communicators": memory.device_overhead_bytes,
        "allowance up to the bound": memory.device_used_upper_bytes - memory.device_used_bytes,
    }
    seconds = {
        "compute": time.compute_seconds,
        "communication not hidden": time.exposed_communication_seconds,
        "offload": time.offload_seconds,
        "optimizer": time.optimizer_seconds,
        "pipeline bubble": time.bubble_seconds,
    }
    return Explanation(
        categories=_shares(categories, memory.peak_allocated_bytes),
        phases=_shares(dict(memory.phases), memory.peak_allocated_bytes),
        device=_shares(device, memory.device_used_upper_bytes),
        seconds=_shares(seconds, time.step_seconds),
        hidden_communication_seconds=time.communication_seconds - time.exposed_communication_seconds,
        lost=tuple((str(item["strategy"]), str(item["reason"])) for item in plan.alternatives),
    )


def _shares(parts: dict[str, float] | dict[str, int], whole: float) -> tuple[Share, ...]:
    return tuple(
        Share(name=name, amount=amount, share=amount / whole if whole else 0.0) for name, amount in parts.items()
    )
