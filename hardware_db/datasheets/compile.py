"""YAML catalogues into the compact JSON that is read at run time; `scripts/generate/catalogues.py` calls it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hardware_db.datasheets.loader import name_index
from hardware_db.datasheets.schema import check_row, check_sources
from hardware_db.device import Device, Link, NodeType
from hardware_db.errors import BrokenFile

HERE = Path(__file__).parent
DEVICE_SOURCES = (
    "tflops", "memory_bandwidth", "memory_total", "torch_total", "tdp", "l2", "nvlink", "compute_capability",
)  # fmt: skip
LINK_SOURCES = ("theoretical", "p2p", "busbw", "alpha")
NODE_SOURCES = ("cpu", "ram", "network", "nvme", "gpu")


def compile_devices(path: Path = HERE / "devices.yaml") -> str:
    """`devices.yaml` as JSON text: sources, rows, and the position of every name and alias.

    Raises:
        BrokenFile: the file is not YAML, or a row is not what `Device` takes.
    """
    data = read_yaml(path, {"sources", "devices"})
    return _json({"sources": data["sources"], "devices": _table(data, "devices", Device, DEVICE_SOURCES, path)})


def compile_interconnects(path: Path = HERE / "interconnects.yaml") -> str:
    """`interconnects.yaml` as JSON text: links, node types, and NCCL's latency constants.

    Raises:
        BrokenFile: the file is not YAML, or a row is not what `Link` or `NodeType` takes.
    """
    data = read_yaml(path, {"sources", "latency_constants", "links", "nodes"})
    links = _table(data, "links", Link, LINK_SOURCES, path)
    nodes = _table(data, "nodes", NodeType, NODE_SOURCES, path)
    for row in nodes["rows"]:
        for key in ("intra_link", "inter_link"):
            if key in row and row[key] not in {link["name"] for link in links["rows"]}:
                raise BrokenFile(
                    path, f"row {row['name']!r} key {key!r} names no link: {row[key]!r}", "name one of `links`"
                )
    return _json({**{key: data[key] for key in ("sources", "latency_constants")}, "links": links, "nodes": nodes})


def read_yaml(path: Path, keys: set[str]) -> dict[str, Any]:
    """A YAML mapping with exactly these top-level keys.

    Raises:
        BrokenFile: the file cannot be read, is not YAML, or has other keys.
    """
    import yaml  # slow to import, and only the compiler of catalogues needs it

    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    except OSError as error:
        raise BrokenFile(path, error.strerror or "cannot be read") from error
    except yaml.YAMLError as error:
        raise BrokenFile(path, f"is not YAML ({' '.join(str(error).split())})", "fix that line") from error
    if not isinstance(data, dict) or set(data) != keys:
        found = ", ".join(map(str, data)) if isinstance(data, dict) else type(data).__name__
        raise BrokenFile(path, f"holds {found}", f"the top level must be {', '.join(sorted(keys))}")
    return data


def _table(data: dict[str, Any], key: str, value_type: type, sources: tuple[str, ...], path: Path) -> dict[str, Any]:
    rows = [check_row(row, value_type, path, position) for position, row in enumerate(data[key])]
    for row in rows:
        priced = ("price",) if "usd_per_hour" in row else ()
        check_sources(row, (*sources, *priced), data["sources"], path)
    return {"names": name_index(rows, path), "rows": rows}


def _json(data: dict[str, Any]) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")) + "\n"
