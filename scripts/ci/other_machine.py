"""Another machine than this one, as far as software asks: of other cores, or with a processor without 16-bit units.

`site` imports this module in every process of the hostile check, which sets HOSTILE_CORES to a number of cores and
HOSTILE_OLD_PROCESSOR (`hostile.sh`). oneDNN, ATen and MKL are limited by variables of their own; what is left are
those that do not ask them: DeepSpeed's CPU accelerator, which takes bf16 for granted, and the probe, which reads
/proc/cpuinfo.

    python -m scripts.ci.other_machine CORES MODULE [ARGUMENT ...]

runs a module on a machine of so many cores of a processor that nothing was measured on.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

CORES = "HOSTILE_CORES"
OLD_PROCESSOR = "HOSTILE_OLD_PROCESSOR"
Blocks = list[dict[str, str]]
"""What /proc/cpuinfo says of each logical processor."""
_UNMEASURED = {"model name": "a processor that nothing was measured on", "cpu MHz": "1111.0", "flags": "sse2 avx"}
_16_BIT_FLAGS = ("avx512", "amx", "avx_ne_convert", "avx_vnni")


def report_cores(cores: int, processor: dict[str, str] | None = None) -> None:
    """Tell this process of so many cores, in Python, psutil, the probe and the control group's quota."""

    def count(*_: object, **__: object) -> int:
        return cores

    def allow(original: Callable[[int], set[int]]) -> Callable[[int], set[int]]:
        def allowed(process: int) -> set[int]:
            real = sorted(original(process))  # first: a process may be pinned to them
            return {*[*real, *(core for core in range(len(real) + cores) if core not in real)][:cores]}

        return allowed

    def blocks(original: Blocks) -> Blocks:
        first = {**(original[0] if original else {}), **(processor or {}), "physical id": "0"}
        return [{**first, "processor": str(core), "core id": str(core)} for core in range(cores)]

    def psutil(module: Any) -> None:
        module.cpu_count = count

    def quota(module: Any) -> None:
        read: Callable[[Path], int | None] = module._cpus
        module._cpus = lambda folder: cores if Path("/sys/fs/cgroup") in (folder, *folder.parents) else read(folder)

    os.cpu_count = count
    if hasattr(os, "process_cpu_count"):
        os.process_cpu_count = count
    if hasattr(os, "sched_getaffinity"):
        os.sched_getaffinity = allow(os.sched_getaffinity)
    _change("psutil", psutil)
    _change("hardware_db.probe.cgroup", quota)
    _change_processor(blocks)


def hide_16_bit_units() -> None:
    """Tell this process of no 16-bit units, in DeepSpeed's accelerator and the probe."""

    def accelerator(module: Any) -> None:
        kind = module.CPU_Accelerator
        kind.is_fp16_supported = kind.is_bf16_supported = lambda self: False
        kind.supported_dtypes = lambda self: [sys.modules["torch"].float]

    def blocks(original: Blocks) -> Blocks:
        for block in original:
            block["flags"] = " ".join(f for f in block.get("flags", "").split() if not f.startswith(_16_BIT_FLAGS))
        return original

    _change("deepspeed.accelerator.cpu_accelerator", accelerator)
    _change_processor(blocks)


def _change_processor(change: Callable[[Blocks], Blocks]) -> None:
    def probe(module: Any) -> None:
        read: Callable[[Path], Blocks] = module._cpu_blocks
        # Another root is a recording of another machine.
        module._cpu_blocks = lambda root: change(read(root)) if root == Path("/") else read(root)

    _change("hardware_db.probe.host", probe)


_CHANGES: dict[str, list[Callable[[ModuleType], None]]] = {}


def _change(module: str, change: Callable[[ModuleType], None]) -> None:
    """Change a module as soon as it is imported."""
    if not _CHANGES:
        sys.meta_path.insert(0, _Changing())
    _CHANGES.setdefault(module, []).append(change)


class _Changing(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _CHANGES:
            return None
        # Those behind it alone: the hostile check's own may stand there.
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def changed(module: ModuleType) -> None:
                execute(module)
                for change in _CHANGES[fullname]:
                    change(module)

            spec.loader.exec_module = changed  # type: ignore[method-assign]
        return spec


if __name__ == "__main__":
    report_cores(int(sys.argv[1]), _UNMEASURED)
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
else:
    if os.environ.get(OLD_PROCESSOR):
        hide_16_bit_units()
    if os.environ.get(CORES):
        report_cores(int(os.environ[CORES]))
