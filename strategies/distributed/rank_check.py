"""The rank checks: whether all ranks have come and belong together, and whether they hold the same model.

Every rank writes who it is into the store, and rank 0 what is wrong among them. A model that one rank builds otherwise
makes collectives of other sizes, which hang, or mix what does not belong together. DDP compares shapes for that reason;
here every strategy does, by name. A hash of 32 bytes per rank travels, and descriptions only where hashes differ.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import DistError

from hardware_db.notices import notice
from hardware_db.units import format_seconds
from strategies.distributed.consensus import objects_of_all
from strategies.errors import CannotMeet, CannotRun
from strategies.run_directory.heartbeat import PULSE
from strategies.torch_compat.distributed import Store
from strategies.variables import RENDEZVOUS_SECONDS

FIRST_SECONDS = 20.0
"""Ranks that never met: with the seconds of importing torch, a mistake in their start ends within half a minute."""
AGAIN_SECONDS = 600.0
"""Ranks that are known to be there; one may load a model longer than another."""
LOOK_SECONDS = 0.02
READ_SECONDS = 2.0
_LATER_SECONDS = 7.0
"""By which a rank 0 that is there may have begun later than others; they still end within half a minute."""
_REMARK_SECONDS = 20.0
_AGREED = "agreed"
_MOST_RANKS_NAMED = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Presence:
    """A rank's own line in the store."""

    rank: int
    world_size: int
    host: str
    process_id: int
    local_rank: int
    device: str
    complaint: str = ""
    """What is wrong with its own place."""
    advice: str = ""
    """What may be wrong with it."""
    is_elsewhere: bool = False
    """Whether rank 0's address is none of the host that this rank 0 runs on."""

    @property
    def where(self) -> str:
        """The process and its host, in words."""
        return f"process {self.process_id} on {self.host}"


class Patience:
    """Seconds that ranks wait: `usual_seconds`, or the limit that the environment names where it is above `least`.

    Raises:
        CannotMeet: the environment names none that can be waited.
    """

    def __init__(self, usual_seconds: float, *, least: float = 0.0) -> None:
        text = os.environ.get(RENDEZVOUS_SECONDS, "")
        try:
            seconds = float(text or usual_seconds)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds < math.inf:
            raise CannotMeet(
                f"the environment variable {RENDEZVOUS_SECONDS} is {text!r}; it must be a number of seconds above 0"
            )
        self.seconds = max(seconds, least)
        self._begun = time.monotonic()

    def is_over_by(self, seconds: float = 0.0) -> bool:
        """Return whether the limit, and so many seconds more, have passed."""
        return self._passed >= self.seconds + seconds

    @property
    def left(self) -> float:
        """Seconds left; never so few that an answer that is on its way would be missed."""
        return max(READ_SECONDS, self.seconds - self._passed)

    @property
    def deserves_remark(self) -> bool:
        """True once people should be told for whom a rank waits."""
        return self._passed >= _REMARK_SECONDS

    @property
    def _passed(self) -> float:
        return time.monotonic() - self._begun


def check_ranks(store: Store, own: Presence, patience: Patience) -> None:
    """Come back once every rank has written its line and rank 0 found nothing wrong among them.

    Raises:
        CannotMeet: something is wrong, or a rank did not come; on every rank that is there.
        DistError: rank 0 is gone.
    """
    _announce(store, own)
    if own.rank == 0:
        verdict = _judge(store, own, patience)
    else:
        with PULSE.waiting_for(0):
            verdict = _await_verdict(store, own, patience)
    if verdict != _AGREED:
        raise CannotMeet(verdict)


def _announce(store: Store, own: Presence) -> None:
    """Write this rank's line; the first of two processes with one rank keeps it."""
    text = json.dumps(asdict(own))
    first = store.compare_set(f"rank-{own.rank}", "", text).decode()
    if first == text:
        return
    other = Presence(**json.loads(first))
    advice = "".join(f": {text}" for text in {presence.advice: None for presence in (other, own) if presence.advice})
    if own.rank == 0:
        advice += "; if they are two jobs, give each its own MASTER_PORT"
    refusal = (
        f"{other.where} and {own.where} are both rank {own.rank} of {own.world_size}; give every process its own"
        f" RANK{advice}"
    )
    store.set("refusal", refusal)  # for those who wait for the rank that this process should have been
    raise CannotMeet(refusal)


def _judge(store: Store, own: Presence, patience: Patience) -> str:
    """Wait, as rank 0, for everyone, and write the verdict where everyone reads it."""
    present: dict[int, Presence] = {}
    remarked = False
    verdict = ""
    while not verdict:
        missing = _look(store, own.world_size, present)
        verdict = _find_objection(store, own, present) or ("" if missing else _AGREED)
        if not verdict and patience.is_over_by():
            verdict = _too_late(own, missing, patience)
        elif not verdict and patience.deserves_remark and not remarked:
            remarked = True
            notice(f"{_wait_text(own, missing)}; still waiting")
        if not verdict:
            time.sleep(LOOK_SECONDS)
    store.set("verdict", verdict)
    if verdict != _AGREED:
        # The store ends with this process, which is to print its line first.
        atexit.register(_let_read, store, own.world_size - 1, time.monotonic() + READ_SECONDS)
    return verdict


def _look(store: Store, world_size: int, present: dict[int, Presence]) -> list[int]:
    """Add the lines that have come to `present`, and return the ranks that have none."""
    missing = []
    for rank in range(world_size):
        if rank in present:
            continue
        # `check` answers at once whether a key is there; `get` would wait for it.
        if store.check([f"rank-{rank}"]):
            present[rank] = Presence(**json.loads(store.get(f"rank-{rank}")))
        else:
            missing.append(rank)
    return missing


def _find_objection(store: Store, own: Presence, present: dict[int, Presence]) -> str | None:
    """Return what is wrong among the ranks that are there; None where all agree."""
    if store.check(["refusal"]):
        return str(store.get("refusal").decode())
    seen: dict[tuple[str, str], Presence] = {}
    for rank in sorted(present):
        presence = present[rank]
        if presence.complaint:
            return f"rank {rank} ({presence.where}): {presence.complaint}"
        if presence.world_size != own.world_size:
            return (
                f"rank {own.rank} ({own.where}) counts {own.world_size} ranks and rank {rank} ({presence.where}) counts"
                f" {presence.world_size}; give all of them one WORLD_SIZE"
            )
        other = seen.setdefault((presence.host, presence.device), presence)
        if other is not presence and presence.device != "cpu":
            return (
                f"rank {other.rank} and rank {rank} both use {presence.device} of {presence.host};"
                " set LOCAL_RANK to count the ranks of each node from 0"
            )
    return None


def _await_verdict(store: Store, own: Presence, patience: Patience) -> str:
    """Wait, as another rank, for rank 0's verdict."""
    # Rank 0 may have begun later: its verdict, which names who is missing, is worth a moment more.
    while not store.check(["verdict"]):
        if not store.check(["rank-0"]) and store.check(["refusal"]):  # rank 0, which would say so, will not come
            return str(store.get("refusal").decode())
        if patience.is_over_by(_LATER_SECONDS if store.check(["rank-0"]) else READ_SECONDS):
            return (
                f"{_wait_text(own, [0])} within {format_seconds(patience.seconds)}; start it, with the same MASTER_ADDR"
            )
        time.sleep(LOOK_SECONDS)
    verdict = str(store.get("verdict").decode())
    if verdict != _AGREED:
        store.add("read", 1)
    return verdict


def _let_read(store: Store, others: int, until: float) -> None:
    """Give the other ranks, and those that are just coming, a moment to read why."""
    with contextlib.suppress(DistError):
        while time.monotonic() < until and store.add("read", 0) < others:
            time.sleep(LOOK_SECONDS)


def _too_late(own: Presence, missing: list[int], patience: Patience) -> str:
    remedy = f"start {own.world_size} processes, or correct WORLD_SIZE"
    if own.advice:
        remedy = f"{remedy}; {own.advice}"
    longer = f"ranks that need longer: set {RENDEZVOUS_SECONDS}"
    return f"{_wait_text(own, missing)} within {format_seconds(patience.seconds)}; {remedy} ({longer})"


def _wait_text(own: Presence, missing: list[int]) -> str:
    return f"rank {own.rank} of {own.world_size} on {own.host} is ready and {_name_ranks(missing)} not come"


def _name_ranks(ranks: Sequence[int]) -> str:
    numbers = ", ".join(map(str, ranks[:_MOST_RANKS_NAMED])) + (" ..." if len(ranks) > _MOST_RANKS_NAMED else "")
    return f"rank {numbers} has" if len(ranks) == 1 else f"ranks {numbers} have"


# Whether all ranks hold the same model, before the first collective over its tensors.
def require_same_model(model: nn.Module) -> None:
    """Compare names, shapes and dtypes of parameters and buffers over all ranks, and which of them are trained.

    Every rank of the process group calls it together. From here on meetings are counted alike on all of them,
    whatever each has done before: alone, in another process group, or before the others came.

    Raises:
        CannotRun: they differ; the same line on every rank names who differs and the first difference.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    own = _describe_model(model)
    digests = objects_of_all((hashlib.sha256("\n".join(own).encode()).digest(), PULSE.number))
    hashes = [digest for digest, _ in digests]
    if len({number for _, number in digests}) > 1:
        PULSE.renumber(max(number for _, number in digests))
    if len(set(hashes)) == 1:
        return
    usual, odd = _split(hashes)
    dist.broadcast_object_list(there := [own], src=odd[0])
    dist.broadcast_object_list(elsewhere := [own], src=usual)
    raise CannotRun(
        f"{_name_ranks(odd)} another model than rank {usual}: {_difference(there[0], elsewhere[0], odd[0], usual)};"
        " build the same model on every rank"
    )


def _split(hashes: Sequence[bytes]) -> tuple[int, list[int]]:
    """Return the first rank of the most that agree, with rank 0 where as many do, and the ranks that differ."""
    counts = Counter(hashes)  # in the order of ranks, and `max` takes the first of equals
    most = max(counts, key=lambda digest: counts[digest])
    return hashes.index(most), [rank for rank, digest in enumerate(hashes) if digest != most]


def _describe_model(model: nn.Module) -> list[str]:
    """Return a line for every tensor of the model, in its order; before the colon is the tensor's name."""
    parameters = (f"{name}: {_form(parameter)}, {_use(parameter)}" for name, parameter in model.named_parameters())
    return [*parameters, *(f"{name}: {_form(buffer)}, a buffer" for name, buffer in model.named_buffers())]


def _use(parameter: nn.Parameter) -> str:
    return "trained" if parameter.requires_grad else "frozen"


def _form(tensor: torch.Tensor) -> str:
    if isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer)):
        return "of no shape yet"
    # DeepSpeed leaves an empty tensor where it has split a parameter.
    shape = getattr(tensor, "ds_shape", tensor.shape)
    return f"{list(shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _difference(odd: Sequence[str], usual: Sequence[str], rank: int, other: int) -> str:
    """Return the first difference of two descriptions, in words."""
    both = zip(odd, usual, strict=False)
    at = next((at for at, (line, expected) in enumerate(both) if line != expected), min(len(odd), len(usual)))
    if at >= len(odd):
        return f"it has no {_name(usual[at])}"
    if at >= len(usual):
        return f"that of rank {other} has no {_name(odd[at])}"
    if _name(odd[at]) == _name(usual[at]):
        return f"{odd[at]} on rank {rank}, {usual[at].partition(': ')[2]} on rank {other}"
    return f"its tensor {at + 1} is {odd[at]} on rank {rank}, {usual[at]} on rank {other}"


def _name(line: str) -> str:
    return line.rpartition(": ")[0]
