"""`zero_optimization`: the stage, buckets, and what leaves the GPU."""

from __future__ import annotations

from planner.vocabulary import Offload
from strategies.config.fields import Fields
from strategies.config.values import ZeroSection
from strategies.errors import CannotRun

_DEVICES = {"none": "none", "cpu": "cpu", "nvme": "nvme"}


def zero_section(fields: Fields) -> ZeroSection:
    """The section as a value.

    Raises:
        CannotRun: a value is not of its kind, or NVMe has no path.
    """
    optimizer, param = fields.section("offload_optimizer"), fields.section("offload_param")
    default = ZeroSection()
    offload = _offload(optimizer, param)
    path = optimizer.maybe_text("nvme_path") or param.maybe_text("nvme_path")
    if offload == "nvme" and path is None:
        raise CannotRun(f"config: {optimizer.name('nvme_path')} is missing; name a directory on the NVMe drive")
    pinned = optimizer if optimizer.values else param
    return ZeroSection(
        stage=_stage(fields),
        reduce_bucket_size=fields.maybe_whole("reduce_bucket_size", least=1),
        param_persistence_threshold=_threshold(fields),
        offload=offload,
        offload_ratio=optimizer.number("ratio", default.offload_ratio, most=1.0),
        nvme_path=path,
        pin_memory=pinned.flag("pin_memory", default.pin_memory),
        buffer_count=optimizer.whole("buffer_count", default.buffer_count, least=1),
    )


def _stage(fields: Fields) -> int | None:
    if not fields.has("stage"):
        return None
    value = fields.values["stage"]
    if isinstance(value, bool) or value not in range(4):
        fields.refuse("stage", "0, 1, 2 or 3")
    return int(value)


def _threshold(fields: Fields) -> int | None:
    own = fields.maybe_whole("stage3_param_persistence_threshold")
    return fields.maybe_whole("param_persistence_threshold") if own is None else own


def _offload(optimizer: Fields, param: Fields) -> Offload | None:
    """The plan's word for the two devices; None where the section names neither.

    Raises:
        CannotRun: parameters leave the GPU and the optimizer does not.
    """
    of_optimizer, of_param = (fields.one_of("device", _DEVICES, None) for fields in (optimizer, param))
    if of_param in ("cpu", "nvme") and of_optimizer in (None, "none"):
        raise CannotRun(
            f"config: {param.name('device')} is {of_param!r} while the optimizer stays on the GPU; set"
            f" {optimizer.name('device')} too"
        )
    if "nvme" in (of_optimizer, of_param):
        return "nvme"
    if of_param == "cpu":
        return "all"
    if of_optimizer == "cpu":
        return "optimizer"
    return "none" if "none" in (of_optimizer, of_param) else None
