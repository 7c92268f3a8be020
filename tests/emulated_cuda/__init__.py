"""An emulated `cuda` device for builds of torch without CUDA: real numbers, the caching allocator, streams.

It is the test device of every line that only a GPU would reach. Memory is the host's, kernels are the CPU's, the
process group called nccl computes through gloo; `torch.cuda`, autograd, optimizers, FSDP, DeepSpeed and whatever else
stands on top are the installed ones. What an order of streams forgets to wait for is an error (`source/streams.h`).

A process gets the device through its environment: `environment(cards, folder)` returns the variables. They are read
by `startup/sitecustomize.py`, so that launchers, agents and ranks need nothing else.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
_SOURCES = HERE / "source"
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-fvisibility=hidden", "-w", "-DTORCH_EXTENSION_NAME=_emulated_cuda")
_LIBRARIES = ("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python")


@dataclass(frozen=True)
class Card:
    """A card of an emulated machine; `used` are bytes that others hold."""

    name: str = "NVIDIA H100 80GB HBM3"
    total_memory: int = 80 << 30
    used: int = 0
    capability: tuple[int, int] = (9, 0)
    multi_processor_count: int = 132
    uuid: str = ""
    nvml: dict[str, object] = field(default_factory=dict)


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


def environment(cards: Sequence[Card], folder: Path, *, driver: str = "580.65.06") -> dict[str, str]:
    """Return the variables that give a process these cards; `folder` keeps the machine's file and what processes share.

    Raises:
        RuntimeError: the device does not compile here.
    """
    shared = folder / "use"
    shared.mkdir(parents=True, exist_ok=True)
    machine = folder / "machine.json"
    devices = [
        asdict(card) | {"uuid": card.uuid or f"GPU-{i:08x}-0000-0000-0000-000000000000"} for i, card in enumerate(cards)
    ]
    machine.write_text(json.dumps({"driver": driver, "devices": devices, "shared": str(shared)}))
    before = os.environ.get("PYTHONPATH")
    return {
        "EMULATED_CUDA": str(machine),
        "EMULATED_CUDA_LIBRARY": str(build()),
        "PYTHONPATH": os.pathsep.join([str(HERE / "startup"), *([before] if before else [])]),
    }


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
            for old in sorted(cache.glob("*.so"), key=lambda path: path.stat().st_mtime)[:-3]:
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
    includes = [
        torch_root / "include",
        torch_root / "include/torch/csrc/api/include",
        Path(sysconfig.get_paths()["include"]),
    ]
    common = ["g++", *_FLAGS, *(part for path in includes for part in ("-isystem", str(path)))]
    waiting = [(path, folder / f"{path.stem}.o") for path in sources]
    objects = [output for _, output in waiting]
    running: list[tuple[Path, subprocess.Popen[str]]] = []
    while waiting or running:
        while waiting and len(running) < max(1, min(4, os.cpu_count() or 1)):
            source, output = waiting.pop()
            command = [*common, "-c", str(source), "-o", str(output)]
            running.append((source, subprocess.Popen(command, stderr=subprocess.PIPE, text=True)))
        source, process = running.pop(0)
        _, errors = process.communicate()
        _raise_for(source.name, process.returncode, errors)
    library = folder / "emulated_cuda.so"
    where = str(torch_root / "lib")
    link = ["g++", "-shared", "-o", str(library), *map(str, objects), f"-L{where}", f"-Wl,-rpath,{where}", *_LIBRARIES]
    done = subprocess.run(link, stderr=subprocess.PIPE, text=True, check=False)
    _raise_for("linking", done.returncode, done.stderr)
    return library


def _raise_for(name: str, status: int, errors: str) -> None:
    if status != 0:
        first = next((line for line in errors.splitlines() if "error" in line), errors.strip()[:300])
        raise RuntimeError(f"the emulated CUDA device does not compile: {name}: {first}")
