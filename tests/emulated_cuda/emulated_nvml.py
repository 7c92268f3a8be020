"""NVML at the level of the C library: played back from recordings, and live for the emulated cards.

pynvml, torch and dsplan reach every C function as an attribute of the library that ctypes loads, and hand it ctypes
arguments. `RecordedNvml` stands where that library would be, reads the input arguments and fills the output arguments
from a recording of

    about     where its values come from
    system    answers of functions without a device
    missing   functions this driver does not have
    common    answers of every device, by function, or by function and its input: "nvmlDeviceGetClockInfo 1"
    devices   for each device the answers that differ; under "mig" those of its slices
    pairs     answers of functions of two devices: "default", a pair "0-1", or every pair with "3"

An answer is the output value, a list of output values, a mapping of struct fields, or {"error": nvmlReturn_t}. A
question that the recording does not answer raises KeyError.

`EmulatedNvml` has the machine of EMULATED_CUDA, whose `nvml` is such a recording, and answers memory, processes and
utilisation from what the processes of the machine hold of its cards. `install` puts it in the driver's place.
"""

from __future__ import annotations

import ctypes
import json
import os
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_SUCCESS, _INSUFFICIENT_SIZE, _NOT_FOUND, _NOT_SUPPORTED = 0, 7, 6, 3
_DEVICE, _SLICE = 0x1000, 0x10  # handles are invented addresses: device 3 is 0x4000, its first slice 0x4010


class RecordedNvml:
    """Stands in for the loaded libnvidia-ml."""

    def __init__(self, recording: dict[str, Any]) -> None:
        self._recording = recording

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name in self._recording["missing"] or not name.startswith("nvml"):
            raise AttributeError(name)
        return lambda *arguments: self._call(name, arguments)

    def _call(self, name: str, arguments: tuple[Any, ...]) -> int:
        if name in ("nvmlInit", "nvmlInit_v2", "nvmlInitWithFlags", "nvmlShutdown"):
            return _SUCCESS
        handles = [address for argument in arguments if (address := _address(argument)) is not None]
        inputs = [plain for argument in arguments if (plain := _plain(argument)) is not None]
        outputs = [argument for argument in arguments if _is_output(argument)]
        answer = self._answer(name, handles, inputs)
        if name.startswith("nvmlDeviceGetComputeRunningProcesses"):
            return _fill_processes(arguments[1]._obj, arguments[2], answer)
        return _fill(outputs, answer)

    def _answer(self, name: str, handles: list[int], inputs: list[Any]) -> Any:
        if name == "nvmlDeviceGetHandleByIndex_v2":
            if inputs[0] >= len(self._recording["devices"]):
                return {"error": 2}
            return self._device(inputs[0]).get(name, {"handle": _DEVICE * (inputs[0] + 1)})
        if name == "nvmlDeviceGetHandleByUUID":
            return next(({"handle": handle} for handle in self._handles() if self._uuid(handle) == inputs[0]), _ABSENT)
        if name == "nvmlDeviceGetMigDeviceHandleByIndex":
            slices = len(self._device(handles[0] // _DEVICE - 1)["mig"])
            return {"handle": handles[0] + _SLICE * (inputs[0] + 1)} if inputs[0] < slices else _ABSENT
        return _pick(self._answers(handles), name, inputs)

    def _handles(self) -> Iterator[int]:
        """Return the handles of all devices and slices."""
        for index, device in enumerate(self._recording["devices"], start=1):
            yield index * _DEVICE
            yield from (index * _DEVICE + _SLICE * part for part in range(1, len(device.get("mig", ())) + 1))

    def _uuid(self, handle: int) -> bytes:
        return str(self._answers([handle])["nvmlDeviceGetUUID"]).encode()

    def _device(self, index: int) -> dict[str, Any]:
        answers: dict[str, Any] = self._recording["devices"][index]
        return answers

    def _answers(self, handles: list[int]) -> dict[str, Any]:
        """Return the answers that apply to a device, a slice or a pair, the special ones over the common ones."""
        if not handles:
            answers: dict[str, Any] = self._recording["system"]
            return answers
        indexes = [handle // _DEVICE - 1 for handle in handles]
        if len(handles) == 2:
            pairs = self._recording["pairs"]
            keys = ("default", str(indexes[0]), str(indexes[1]), f"{indexes[0]}-{indexes[1]}")
            return {key: given for name in keys for key, given in pairs.get(name, {}).items()}
        device = self._device(indexes[0])
        part = handles[0] % _DEVICE // _SLICE
        if part:
            slices: list[dict[str, Any]] = device["mig"]
            return slices[part - 1]
        common = {
            key: given.format(index=indexes[0]) if isinstance(given, str) else given
            for key, given in self._recording["common"].items()
        }
        return {**common, **device}


_ABSENT = {"error": _NOT_FOUND}


def _pick(answers: dict[str, Any], name: str, inputs: list[Any]) -> Any:
    """Return the answer to exactly these inputs if there is one, else the function's answer to any input."""
    exact = " ".join([name, *map(str, inputs[:1])])
    return answers[exact] if exact in answers else answers[name]


def _is_output(argument: Any) -> bool:
    return hasattr(argument, "_obj") or isinstance(argument, ctypes.Array)


def _address(argument: Any) -> int | None:
    """Return the invented address in a device handle, None for any other argument."""
    if isinstance(argument, (ctypes._Pointer, ctypes.c_void_p)):
        return ctypes.cast(argument, ctypes.c_void_p).value
    return None


def _plain(argument: Any) -> int | bytes | None:
    """Return the number or the name in an input argument, None for handles and outputs."""
    if isinstance(argument, (ctypes.Array, ctypes.c_void_p)):
        return None
    value = getattr(argument, "value", argument)
    return value if isinstance(value, int | bytes) else None


def _fill(outputs: list[Any], answer: Any) -> int:
    if isinstance(answer, dict) and "error" in answer:
        return int(answer["error"])
    for output, value in zip(outputs, answer if isinstance(answer, list) else [answer], strict=True):
        if isinstance(output, ctypes.Array):
            output.value = str(value).encode()
        elif isinstance(value, dict) and "handle" in value:
            address = ctypes.c_void_p(value["handle"])
            ctypes.memmove(output, ctypes.byref(address), ctypes.sizeof(address))
        elif isinstance(value, dict):
            for field, number in value.items():
                setattr(output._obj, field, number)
        else:
            output._obj.value = value
    return _SUCCESS


def _fill_processes(count: Any, array: Any, answer: Any) -> int:
    """Fill a list as NVML does: say how many there are, and fill the array once it is large enough."""
    if isinstance(answer, dict):
        return int(answer["error"])
    room, count.value = count.value, len(answer)
    if array is None or room < len(answer):
        return _INSUFFICIENT_SIZE if answer else _SUCCESS
    for position, process in enumerate(answer):
        for field, number in process.items():
            setattr(array[position], field, number)
    return _SUCCESS


# The cards of an emulated machine.
_MOST_CARDS = 16  # of a file that a process keeps beside the allocator
_TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


class EmulatedNvml(RecordedNvml):
    """NVML of the machine that EMULATED_CUDA names; a question that it knows no answer to is not supported."""

    def __init__(self, machine: dict[str, Any]) -> None:
        super().__init__(machine["nvml"])
        self._cards: list[dict[str, Any]] = machine["devices"]
        self._use = Path(machine["shared"])
        self._cpu_seconds: dict[int, tuple[float, float]] = {}

    def _answer(self, name: str, handles: list[int], inputs: list[Any]) -> Any:
        if len(handles) == 1 and name in _LIVE:
            recorded = self._answers(handles).get(name)
            if isinstance(recorded, dict) and "error" in recorded:
                return recorded
            return _LIVE[name](self, handles[0])
        try:
            return super()._answer(name, handles, inputs)
        except KeyError:
            return {"error": _NOT_SUPPORTED}

    def _cards_of(self, handle: int) -> list[int]:
        """Return the cards behind a handle: itself, or for a card in slices those that are in the machine's file."""
        uuid = self._uuid(handle).decode()
        slices = [part["nvmlDeviceGetUUID"] for part in self._answers([handle]).get("mig", ())]
        return [i for i, card in enumerate(self._cards) if card["uuid"] in (uuid, *slices)]

    def _memory(self, handle: int) -> dict[str, int]:
        cards = self._cards_of(handle)
        total = int(self._cards[cards[0]]["total_memory"])
        used = sum(int(self._cards[card]["used"]) for card in cards)
        used = min(total, used + sum(held for card in cards for held in self._held(card).values()))
        return {"total": total, "free": total - used, "used": used}

    def _processes(self, handle: int) -> list[dict[str, int]]:
        recorded = self._answers([handle]).get(_PROCESSES, [])
        held = [item for card in self._cards_of(handle) for item in self._held(card).items()]
        return [*recorded, *({"pid": process, "usedGpuMemory": bytes_} for process, bytes_ in held)]

    def _utilisation(self, handle: int) -> dict[str, int]:
        """Return the processors' time of a card's processes since the last question, of one core, in per cent."""
        if handle % _DEVICE:  # a slice
            return {"error": _NOT_SUPPORTED}
        processes = {process for card in self._cards_of(handle) for process in self._held(card)}
        now, spent = time.monotonic(), sum(map(_cpu_seconds, processes))
        since, before = self._cpu_seconds.get(handle, (now, spent))
        self._cpu_seconds[handle] = now, spent
        busy = max(0.0, spent - before) / max(now - since, 1e-3)
        total = self._memory(handle)
        return {"gpu": min(100, round(100 * busy)), "memory": round(100 * total["used"] / total["total"])}

    def _held(self, card: int) -> dict[int, int]:
        """Return the bytes that each live process holds of a card; a process with a context alone holds 0."""
        held = {}
        for path in self._use.iterdir():
            if path.name.isdecimal() and Path("/proc", path.name).exists():
                words = path.read_bytes().ljust(8 * _MOST_CARDS, b"\0")
                bytes_ = struct.unpack_from(f"{_MOST_CARDS}Q", words)[card]
                if bytes_:
                    held[int(path.name)] = bytes_ - 1
        return held


_PROCESSES = "nvmlDeviceGetComputeRunningProcesses_v3"
_LIVE: dict[str, Callable[[EmulatedNvml, int], Any]] = {
    "nvmlDeviceGetMemoryInfo": EmulatedNvml._memory,
    _PROCESSES: EmulatedNvml._processes,
    "nvmlDeviceGetUtilizationRates": EmulatedNvml._utilisation,
}


def _cpu_seconds(process: int) -> float:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS


def install() -> None:
    """Have ctypes load the emulated machine's driver libraries; those that it lacks are not to be had."""
    own = ctypes.CDLL

    class _Library(own):  # type: ignore[misc,valid-type]
        def __new__(cls, name: Any = None, *arguments: Any, **options: Any) -> Any:
            if name in ("libnvidia-ml.so.1", "libnvidia-ml.so", "libcuda.so.1", "libcuda.so"):
                return _driver_library(name)
            return super().__new__(cls)

    ctypes.CDLL = _Library  # type: ignore[misc]
    ctypes.cdll = ctypes.LibraryLoader(_Library)


def _driver_library(name: str) -> Any:
    machine = json.loads(Path(os.environ["EMULATED_CUDA"]).read_text(encoding="utf-8"))
    if name.startswith("libnvidia-ml") and machine.get("nvml") is not None:
        return EmulatedNvml(machine)
    if name.startswith("libcuda") and any("torch" in card["seen_by"] for card in machine["devices"]):
        return SimpleNamespace(cuInit=lambda flags: 0)
    raise OSError(f"{name}: cannot open shared object file: No such file or directory")
