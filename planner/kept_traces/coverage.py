"""Coverage: which step the tracer runs for a configuration, and what it does not run."""

from __future__ import annotations

from dataclasses import dataclass, replace

from planner.job import Job


@dataclass(frozen=True, kw_only=True, slots=True)
class Coverage:
    """`job` is the step that is traced, None where there is none; `partly` whether only its activations are taken.

    `remark` says in one line what the trace leaves to the closed forms; empty where it leaves nothing.
    """

    job: Job | None
    partly: bool = False
    remark: str = ""


def coverage_of(job: Job) -> Coverage:
    """The traced step is the asked one, or the same without offload, of which only the activations count."""
    asked = job.configuration
    if asked.tp > 1 or asked.pp > 1:
        remark = f"the trace does not cover tp {asked.tp} x pp {asked.pp}; the closed form is used, with a wider bound"
        return Coverage(job=None, remark=remark)
    if not asked.zero_stage and asked.offload == "none":
        return Coverage(job=job)
    what = asked.strategy if asked.offload == "none" else f"{asked.strategy} with --offload {asked.offload}"
    remark = f"the trace does not run {what}: its activations are traced, its states and buffers are closed forms"
    kept = replace(asked, offload="none", offload_ratio=1.0)
    return Coverage(job=replace(job, configuration=kept), partly=True, remark=remark)
