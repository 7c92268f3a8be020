"""Memos for functions of immutable values that are too costly, or not able, to be hashed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import wraps
from operator import attrgetter
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from planner.types.job import Job

Key = TypeVar("Key")
Value = TypeVar("Value")
Others = ParamSpec("Others")

_KEPT = 64
_KEPT_OF_JOBS = 512
"""Results of one function: a search asks for some hundred."""


def memo_by_identity(function: Callable[[Key], Value]) -> Callable[[Key], Value]:
    """Remember the results for the last 64 objects, told apart by identity.

    A catalogue entry has some ninety fields, some of them mappings: hashing it costs more than the arithmetic that is
    saved. The entry holds its key, so an identity cannot be reused while it is remembered.
    """
    seen: dict[int, tuple[Key, Value]] = {}

    def remembered(key: Key) -> Value:
        entry = seen.get(id(key))
        if entry is None or entry[0] is not key:
            if len(seen) >= _KEPT:
                seen.clear()
            entry = seen[id(key)] = (key, function(key))
        return entry[1]

    return remembered


def memo_by_fields(
    *names: str,
) -> Callable[[Callable[Concatenate[Job, Others], Value]], Callable[Concatenate[Job, Others], Value]]:
    """Remember the results of a function for jobs that differ only in what it does not read of their configuration.

    A search prices hundreds of configurations of one model on one cluster, of which a part of a step reads few fields:
    shards are alike whatever the micro-batch, compute is alike whatever the strategy. `names` are the fields and
    properties of the configuration that the function reads, all of them
    (`tests/planner/cost/test_memo.py` records what is read). Model, counts, workload, cluster and further arguments
    are told apart by identity; each entry holds them, so that no identity is reused while it is remembered.
    """
    fields_of = attrgetter(*names)

    def remember(function: Callable[Concatenate[Job, Others], Value]) -> Callable[Concatenate[Job, Others], Value]:
        seen: dict[Hashable, tuple[Value, Job, tuple[object, ...]]] = {}
        plain: Callable[..., Value] = function

        @wraps(function)
        def remembered(job: Job, *others: Any) -> Value:
            same = (id(job.facts), id(job.counts), id(job.workload), id(job.cluster), *map(id, others))
            key = (fields_of(job.configuration), job.stage, same)
            entry = seen.get(key)
            if entry is None:
                if len(seen) >= _KEPT_OF_JOBS:
                    seen.clear()
                entry = seen[key] = (plain(job, *others), job, others)
            return entry[0]

        remembered.__dict__["fields"] = names
        return cast("Callable[Concatenate[Job, Others], Value]", remembered)

    return remember
