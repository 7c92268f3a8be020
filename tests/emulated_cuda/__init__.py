"""An emulated `cuda` device for builds of torch without CUDA: real numbers, the caching allocator, streams.

It is the test device of every line that only a GPU would reach. Memory is the host's, kernels are the CPU's, the
process group called nccl computes through gloo; `torch.cuda`, autograd, optimizers, FSDP, DeepSpeed and whatever else
stands on top are the installed ones. What an order of streams forgets to wait for is an error (`source/streams.h`).

A process gets the device through its environment: `environment(cards, folder)` returns the variables. They are read
by `startup/sitecustomize.py`, so that launchers, agents and ranks need nothing else. Beside torch's device there is the
driver's NVML (`emulated_nvml.py`), for whole machines too: `machine(name)` reads one from `machines.json`.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
_SOURCES = HERE / "source"
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-w", "-DTORCH_EXTENSION_NAME=_emulated_cuda")
_LIBRARIES = ("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python")
_CUDA = "13.0"
_HEALTHY = HERE.parent / "hardware_db/probe/recordings/8xh100_troubled.json"
"""A recording whose answers common to all cards are those of healthy ones."""


@dataclass(frozen=True)
class Card:
    """A card of an emulated machine; `used` are bytes that others hold, `nvml` NVML's answers that are its own.

    `seen_by` says who lists it: a card in MIG slices is listed by NVML and its slices by torch.
    """

    name: str = "NVIDIA H100 80GB HBM3"
    total_memory: int = 80 << 30
    used: int = 0
    capability: tuple[int, int] = (9, 0)
    multi_processor_count: int = 132
    uuid: str = ""
    nvml: dict[str, object] = field(default_factory=dict)
    seen_by: tuple[str, ...] = ("torch", "nvml")


@dataclass(frozen=True)
class Machine:
    """An emulated machine: its cards, and what NVML answers beside the cards' own, None where there is no NVML."""

    cards: tuple[Card, ...]
    driver: str = "580.65.06"
    nvml: Mapping[str, Any] | None = field(default_factory=dict)


def machine(name: str) -> Machine:
    """Read a machine of `machines.json`; a card with a `count` is there as often."""
    described = json.loads((HERE / "machines.json").read_text(encoding="utf-8"))[name]
    cards = [Card(**card) for row in described.pop("cards") for card in [row] * row.pop("count", 1)]
    del described["about"]
    return Machine(cards=tuple(cards), **described)


def why_not_here() -> str | None:
    """Return why the device cannot be built or used on this machine, None where it can."""
    if sys.platform != "linux":
        return f"needs Linux, this is {sys.platform}"
    if shutil.which("g++") is None:
        return "needs a C++ compiler (g++)"
    try:
        import torch
    except ImportError:
        return "needs torch"
    if torch.version.cuda is not None:
        return "this build of torch has CUDA: its own device is used"
    return None


def environment(cards: Sequence[Card] | Machine, folder: Path) -> dict[str, str]:
    """Return the variables that give a process these cards; `folder` keeps the machine's file and what processes share.

    Raises:
        RuntimeError: the device does not compile here.
    """
    here = cards if isinstance(cards, Machine) else Machine(cards=tuple(cards))
    described = describe(here, folder)
    (folder / "machine.json").write_text(json.dumps(described), encoding="utf-8")
    _describe_torch(folder / "packages")
    own = [str(HERE / "startup"), str(folder / "packages")]
    before = os.environ.get("PYTHONPATH")
    return {
        "EMULATED_CUDA": str(folder / "machine.json"),
        "EMULATED_CUDA_LIBRARY": str(build()),
        "PYTHONPATH": os.pathsep.join([*own, *([before] if before else [])]),
    }


def describe(here: Machine, folder: Path) -> dict[str, Any]:
    """Return what a machine's file has; processes share what they hold of its cards under `folder`."""
    shared = folder / "use"
    shared.mkdir(parents=True, exist_ok=True)
    devices = [
        asdict(card) | {"uuid": card.uuid or f"GPU-{i:08x}-0000-0000-0000-000000000000"}
        for i, card in enumerate(here.cards)
    ]
    return {"driver": here.driver, "devices": devices, "shared": str(shared), "nvml": _recording(here, devices)}


def _recording(here: Machine, devices: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return what NVML answers on a machine, as `emulated_nvml` reads it; None where there is no NVML."""
    if here.nvml is None:
        return None
    healthy = json.loads(_HEALTHY.read_text(encoding="utf-8"))
    listed = [device for device in devices if "nvml" in device["seen_by"]]
    major, minor = (int(part) for part in _CUDA.split("."))
    system = {
        "nvmlSystemGetDriverVersion": here.driver,
        "nvmlSystemGetCudaDriverVersion_v2": 1000 * major + 10 * minor,
        "nvmlDeviceGetCount_v2": len(listed),
    }
    own = [
        {
            "nvmlDeviceGetName": device["name"],
            "nvmlDeviceGetUUID": device["uuid"],
            "nvmlDeviceGetCudaComputeCapability": list(device["capability"]),
            **device["nvml"],
        }
        for device in listed
    ]
    return {
        "system": system | dict(here.nvml.get("system", {})),
        "missing": list(here.nvml.get("missing", ())),
        "common": healthy["common"] | dict(here.nvml.get("common", {})),
        "devices": own,
        "pairs": {"default": healthy["pairs"]["default"]} | dict(here.nvml.get("pairs", {})),
    }


def _describe_torch(packages: Path) -> None:
    """Write what is read of a package without importing it, for a torch that is built for CUDA."""
    version = importlib.metadata.version("torch").partition("+")[0]
    metadata = packages / f"torch-{version}.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True, exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n", encoding="utf-8")
    (packages / "torch").mkdir(exist_ok=True)  # without __init__.py, so that it hides nothing
    assigned = f"__version__ = '{version}'\ncuda: str | None = '{_CUDA}'\nhip: str | None = None\n"
    (packages / "torch" / "version.py").write_text(assigned, encoding="utf-8")


def build() -> Path:
    """Compile the device unless this version of it has been, and return the shared library's path.

    Raises:
        RuntimeError: the compiler refused, with its first error.
    """
    import torch

    root = Path(torch.__file__).parent
    sources = sorted(_SOURCES.glob("*.cpp"))
    digest = hashlib.sha256(f"{torch.__version__} {root} {sys.version} {_FLAGS}".encode())
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.read_bytes())
    cache = _cache()
    library = cache / f"{digest.hexdigest()[:20]}.so"
    if library.exists():
        return library
    with open(cache / "lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several test workers come here at once
        if not library.exists():
            for old in sorted(cache.glob("*.so"), key=lambda path: path.stat().st_mtime)[:-16]:
                old.unlink()
            with tempfile.TemporaryDirectory(dir=cache) as folder:
                _compile(sources, root, Path(folder)).replace(library)
    return library


def _cache() -> Path:
    """Return a folder that lasts, or one for temporary files where the home directory cannot be written."""
    lasting = Path(os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache") / "dsplan-emulated-cuda"
    passing = Path(tempfile.gettempdir()) / f"dsplan-emulated-cuda-{os.getuid()}"
    for folder in (lasting, passing):
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
    raise RuntimeError(f"the emulated CUDA device cannot be kept: neither {lasting} nor {passing} can be written")


def _compile(sources: Sequence[Path], torch_root: Path, folder: Path) -> Path:
    whole, library = folder / "whole.cpp", folder / "emulated_cuda.so"
    # One translation unit: torch's headers, which take most of the time, are read once.
    whole.write_text("".join(f'#include "{path}"\n' for path in sources))
    includes = (
        torch_root / "include",
        torch_root / "include/torch/csrc/api/include",
        Path(sysconfig.get_paths()["include"]),
    )
    command = ["g++", *_FLAGS, *(part for path in includes for part in ("-isystem", str(path)))]
    command += [
        "-shared",
        str(whole),
        "-o",
        str(library),
        f"-L{torch_root / 'lib'}",
        f"-Wl,-rpath,{torch_root / 'lib'}",
    ]
    result = subprocess.run([*command, *_LIBRARIES], stderr=subprocess.PIPE, text=True, check=False)
    if result.returncode != 0:
        errors = result.stderr.strip()
        first = next((line for line in errors.splitlines() if "error" in line), errors[:300])
        raise RuntimeError(f"the emulated CUDA device does not compile: {first}")
    return library
