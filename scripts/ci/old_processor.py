"""A processor without 16-bit units, as far as software asks: `site` imports this in every process of the suite.

oneDNN, ATen and MKL are limited by variables that `hostile.sh` sets. What is left are those that do not ask them:
DeepSpeed's CPU accelerator, which takes bf16 for granted, and the probe, which reads /proc/cpuinfo.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

_HIDDEN = ("avx512", "amx", "avx_ne_convert", "avx_vnni")


def _accelerator(module: ModuleType) -> None:
    kind: Any = module.CPU_Accelerator  # type: ignore[attr-defined]
    kind.is_fp16_supported = kind.is_bf16_supported = lambda self: False
    kind.supported_dtypes = lambda self: [sys.modules["torch"].float]


def _probe(module: ModuleType) -> None:
    blocks: Callable[[Path], list[dict[str, str]]] = module._cpu_blocks  # type: ignore[attr-defined]

    def without_16_bits(root: Path) -> list[dict[str, str]]:
        found = blocks(root)
        if root == Path("/"):
            for block in found:
                block["flags"] = " ".join(f for f in block.get("flags", "").split() if not f.startswith(_HIDDEN))
        return found

    module._cpu_blocks = without_16_bits  # type: ignore[attr-defined]


_CHANGES = {"deepspeed.accelerator.cpu_accelerator": _accelerator, "hardware_db.probe.host": _probe}


class _Changing(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _CHANGES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            change, execute = _CHANGES[fullname], spec.loader.exec_module

            def changed(module: ModuleType) -> None:
                execute(module)
                change(module)

            spec.loader.exec_module = changed  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Changing())
