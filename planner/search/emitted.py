"""A plan's configs as their trainers would run them: priced with each trainer's own modules and recomputation."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace

from hardware_db.errors import DsplanError
from hardware_db.records import dataclass
from hardware_db.units import format_bytes
from planner.cost.verdict import device_limit
from planner.emit import FORMATS, emit, fitting_formats
from planner.emit.common import DEFAULTS, EmitOptions, code_of_trainer, refuse, script_duties
from planner.errors import ContradictoryRequest
from planner.search.estimate import estimate
from planner.search.recall import recall
from planner.search.request import Request, request_of_plan
from planner.types.job import counts_of
from planner.types.plan import MemoryEstimate, Plan


@dataclass(frozen=True, kw_only=True, slots=True)
class Emitted:
    """A plan in a format."""

    files: Mapping[str, str]
    """Texts by name, the one to look at first before the others."""
    duties: tuple[str, ...]
    """What is left to the training script, and where the trainer does otherwise than the plan counts."""


def emit_priced(plan: Plan, format: str, options: EmitOptions = DEFAULTS) -> Emitted:
    """Return a plan in a format, with a note where the trainer's own modules have not the room that the plan has.

    Raises:
        UnknownName: the format is not in FORMATS.
        ContradictoryRequest: the format has no form of this plan, or what it says does not fit in the trainer.
    """
    files = emit(plan, format, options)
    note = _note_of_memory(plan, format)
    if note:
        options = replace(options, remarks=(*options.remarks, note))
        files = emit(plan, format, options)
    return Emitted(files=files, duties=script_duties(plan, format, options))


def fitting_configs(plan: Plan) -> dict[str, Emitted]:
    """Return a plan in each of its `fitting_formats`.

    Where its own trainer lacks something of it they are any formats that have a form of it.
    """
    return _configs(plan, fitting_formats(plan)) or _configs(plan, tuple(FORMATS))


def _configs(plan: Plan, formats: tuple[str, ...]) -> dict[str, Emitted]:
    configs = {}
    for format in formats:
        # ContradictoryRequest is how a format says that it has no form of this plan.
        with contextlib.suppress(ContradictoryRequest):
            configs[format] = emit_priced(plan, format)
    return configs


def _note_of_memory(plan: Plan, format: str) -> str:
    """Return what the trainer's own choice needs where that is not sure to fit; empty where it is, or is the plan's.

    Raises:
        ContradictoryRequest: it does not fit, and the plan does.
    """
    code = code_of_trainer(plan, format)
    request = None if code is None or plan.verdict == "does_not_fit" else request_of_plan(plan)
    if code is None or request is None:
        return ""
    try:
        own = _as_trained(recall(request), plan, code)
    except DsplanError:  # the modules cannot be counted with this code, or not split so
        return ""
    limit = device_limit(request.workload, request.cluster)
    need = _need(own.memory)
    sizes = f"{format_bytes(need)} of {format_bytes(limit)} per GPU"
    if own.verdict == "does_not_fit":
        reason = f"that needs {sizes} with the trainer's own modules"
        raise refuse(plan, format, reason, f"plan again with --code {code}")
    if own.verdict == "tight" and (plan.verdict == "fits" or need > limit):
        problem = "may not fit" if need > limit else "fits without room"
        planned = format_bytes(_need(plan.memory))
        return f"{problem}: the trainer's own modules and recomputation need up to {sizes}, those of the plan {planned}"
    return ""


def _as_trained(request: Request, plan: Plan, code: str) -> Plan:
    """Return the price of a plan's configuration with the modules of `code`."""
    workload = replace(request.workload, code=code)
    counted = replace(request, workload=workload, counts=counts_of(request.facts, workload), allow_unrunnable=True)
    chosen = plan.configuration
    if code in _FUSED_ADAM and chosen.optimizer == "adamw":
        chosen = replace(chosen, optimizer="adamw-fused")
    return estimate(counted, chosen)


_FUSED_ADAM = ("megatron", "nemo")
"""Code whose Adam is a fused one whatever its config says (NVIDIA/Megatron-LM@d98e8a64 megatron/core/optimizer)."""


def _need(memory: MemoryEstimate) -> int:
    return memory.device_needed_bytes or memory.device_used_upper_bytes
