"""Runs for a public collection, without what tells of people, places and projects, and such runs of others."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hardware_db.errors import BrokenFile, DsplanError
from hardware_db.files import canonical_json, digest
from hardware_db.measurement import Measurement
from hardware_db.store.contract import Store
from hardware_db.store.transfer import SHARED, ImportCount, import_records, mark_shared, read_lines

MOST_BYTES = 256 * 2**20
"""Of a collection that is fetched: some 30,000 runs."""
_SECONDS = 30.0
_SECTIONS = ("schema_version", "model", "cluster", "workload", "plan", "memory", "time", "throughput", "verdict")
"""What a shared plan keeps: notes, alternatives and assumptions are sentences, which may name anything."""
_PLAIN_TARGETS = ("attention", "all-linear", None)


def shared_runs(store: Store, public_name: Callable[[Mapping[str, Any]], str | None]) -> tuple[list[Measurement], int]:
    """Return the runs of a store that can be shared, oldest first, and how many cannot.

    `public_name` is what a plan's model is called in public, None where its architecture is nobody else's. Left out are
    runs that others measured, those without a plan, and those of code or patterns of names of one's own.
    """
    own = [run for run in reversed(store.list()) if run.source in ("run", "bench")]
    stripped = [_strip(run, public_name) for run in own]
    shared = [run for run in stripped if run is not None]
    return shared, len(own) - len(shared)


def _strip(run: Measurement, public_name: Callable[[Mapping[str, Any]], str | None]) -> Measurement | None:
    plan: dict[str, Any] = {name: section for name, section in run.plan.items() if name in _SECTIONS}
    model, workload = dict(plan["model"]), plan.get("workload") or {}
    name = public_name(model)
    of_his_own = (
        workload.get("train_only"),
        workload.get("lora_targets") not in _PLAIN_TARGETS,
        not str(workload.get("code") or "transformers").replace("-", "").isalnum(),
    )
    if name is None or any(of_his_own):
        return None
    plan["model"] = model | {"name": name, "facts": _named(model.get("facts"), name)}
    plan["cluster"] = dict(plan["cluster"]) | {"assumed": ""}
    return replace(
        run,
        id=digest({SHARED: run.id}, 32),
        created_at=f"{run.created_at[:10]}T00:00:00.000000Z",
        plan_json=canonical_json(plan),
        source=SHARED,
        measured=replace(run.measured, first_loss=None, last_loss=None),
    )


def _named(facts: object, name: str) -> object:
    return facts | {"name": name} if isinstance(facts, dict) and "name" in facts else facts


def published_at(path: Path) -> str | None:
    """Return the address that a command line's path is, whose slashes paths write once; None for a file."""
    scheme, _, rest = str(path).partition(":/")
    return f"{scheme}://{rest}" if scheme in ("https", "http") and rest else None


def import_address(store: Store, address: str) -> ImportCount:
    """Add the records that are published at an address, all or none, each as a stranger's whatever it says.

    Raises:
        DsplanError: it cannot be fetched, or a line is no record.
    """
    return import_records(store, [mark_shared(record, address) for record in read_lines(_fetch(address), address)])


def _fetch(address: str) -> str:
    """Return the text at an address."""
    try:
        with urllib.request.urlopen(address, timeout=_SECONDS) as answer:
            content = answer.read(MOST_BYTES + 1)
    except (urllib.error.URLError, OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise DsplanError(f"{address}: cannot be fetched ({reason}); correct it, or import a file") from error
    if len(content) > MOST_BYTES:
        raise DsplanError(f"{address}: holds more than {MOST_BYTES >> 20} MiB; import it in parts, from files")
    try:
        return str(content.decode())
    except UnicodeDecodeError as error:
        raise BrokenFile(
            address, f"is not UTF-8 text (byte {error.start})", "name what `dsplan db share` wrote"
        ) from error
