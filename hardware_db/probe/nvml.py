"""NVIDIA GPUs through NVML. Whatever the driver refuses becomes None and one sentence, never a traceback."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

from hardware_db.probe import nvml_words as words
from hardware_db.probe.machine import Gpu, GpuPair
from hardware_db.probe.nvml_gpu import read_gpu, read_pair
from hardware_db.probe.nvml_questions import Questions, sentences


@dataclass(frozen=True, kw_only=True, slots=True)
class NvmlAnswer:
    """What NVML told: GPUs in its own order, how pairs are joined, the driver, and what it refused, in sentences."""

    gpus: tuple[Gpu, ...] = ()
    pairs: tuple[GpuPair, ...] = ()
    driver: str | None = None
    driver_cuda: str | None = None
    messages: tuple[str, ...] = ()


def probe_nvidia() -> NvmlAnswer:
    """Every NVIDIA GPU here; none, with a sentence about why, where a driver is installed that cannot be asked."""
    if not driver_library_loads():
        return NvmlAnswer()
    try:
        import pynvml  # 40 ms; only machines with a driver pay for it
    except ImportError:
        return NvmlAnswer(
            messages=("an NVIDIA driver is here but nvidia-ml-py is not; run `pip install nvidia-ml-py`",)
        )
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        problem = words.INIT_ERRORS.get(error.value, f"the NVIDIA driver cannot be asked ({error})")
        return NvmlAnswer(messages=(problem,))
    try:
        return _read_machine(pynvml)
    finally:
        _quietly(pynvml, pynvml.nvmlShutdown)


def driver_library_loads() -> bool:
    """Whether the driver's NVML library is on this machine."""
    try:
        ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def _read_machine(nvml: Any) -> NvmlAnswer:
    system = Questions(nvml, index=-1)
    driver = system.ask("the driver version", nvml.nvmlSystemGetDriverVersion)
    cuda = system.ask("the CUDA version", nvml.nvmlSystemGetCudaDriverVersion_v2)
    count = system.ask("the number of GPUs", nvml.nvmlDeviceGetCount) or 0
    questions = [Questions(nvml, index=index) for index in range(count)]
    handles = [asked.ask("its handle", partial(nvml.nvmlDeviceGetHandleByIndex, asked.index)) for asked in questions]
    gpus = [read_gpu(asked, handle) for asked, handle in zip(questions, handles, strict=True)]
    pairs = [
        read_pair(questions[first], (first, second), (handles[first], handles[second]))
        for first, second in combinations(range(count), 2)
        if not (questions[first].lost or questions[second].lost)
    ]
    return NvmlAnswer(
        gpus=tuple(gpus),
        pairs=tuple(pairs),
        driver=driver,
        driver_cuda=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
        messages=(*sentences([system]), *sentences(questions)),
    )


def _quietly(nvml: Any, call: Callable[[], object]) -> None:
    """Shutting down can fail on a GPU that was lost meanwhile; nothing is left to be done about it."""
    try:
        call()
    except nvml.NVMLError:
        return
