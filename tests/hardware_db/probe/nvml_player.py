"""Plays a recorded set of NVML answers back at the level of the C library, so that all of pynvml runs in between.

pynvml reaches every C function as an attribute of its loaded library and hands it ctypes arguments. `RecordedNvml`
stands where that library would be, reads the input arguments and fills the output arguments from a recording of

    about     where its values come from
    system    answers of functions without a device
    missing   functions this driver does not have
    common    answers of every device, by function, or by function and its input: "nvmlDeviceGetClockInfo 1"
    devices   for each device the answers that differ; under "mig" those of its slices
    pairs     answers of functions of two devices: "default", a pair "0-1", or every pair with "3"

An answer is the output value, a list of output values, a mapping of struct fields, or {"error": nvmlReturn_t}. A
question that the recording does not answer raises KeyError.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pynvml
import pytest

from hardware_db.probe import nvml

RECORDINGS = Path(__file__).parent / "recordings"
_SUCCESS, _INSUFFICIENT_SIZE, _NOT_FOUND = 0, 7, 6
_DEVICE, _SLICE = 0x1000, 0x10  # handles are made-up addresses: device 3 is 0x4000, its first slice 0x4010


class RecordedNvml:
    """Stands in for the loaded libnvidia-ml."""

    def __init__(self, recording: dict[str, Any]) -> None:
        self._recording = recording

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name in self._recording["missing"]:
            raise AttributeError(name)
        return lambda *arguments: self._call(name, arguments)

    def _call(self, name: str, arguments: tuple[Any, ...]) -> int:
        if name in ("nvmlInitWithFlags", "nvmlShutdown"):
            return _SUCCESS
        handles = [address for argument in arguments if (address := _address(argument)) is not None]
        inputs = [plain for argument in arguments if (plain := _plain(argument)) is not None]
        outputs = [argument for argument in arguments if _is_output(argument)]
        if name == "nvmlDeviceGetHandleByIndex_v2":
            answer = self._device(inputs[0]).get(name, {"handle": _DEVICE * (inputs[0] + 1)})
        elif name == "nvmlDeviceGetMigDeviceHandleByIndex":
            slices = len(self._device(handles[0] // _DEVICE - 1)["mig"])
            answer = {"handle": handles[0] + _SLICE * (inputs[0] + 1)} if inputs[0] < slices else {"error": _NOT_FOUND}
        else:
            answer = _pick(self._answers(handles), name, inputs)
        if name.startswith("nvmlDeviceGetComputeRunningProcesses"):
            return _fill_processes(arguments[1]._obj, arguments[2], answer)
        return _fill(outputs, answer)

    def _device(self, index: int) -> dict[str, Any]:
        answers: dict[str, Any] = self._recording["devices"][index]
        return answers

    def _answers(self, handles: list[int]) -> dict[str, Any]:
        """The answers that apply to a device, a slice or a pair of devices, the special ones over the common ones."""
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


def _pick(answers: dict[str, Any], name: str, inputs: list[int]) -> Any:
    """The answer to exactly these inputs if there is one, else the function's answer to any input."""
    exact = " ".join([name, *map(str, inputs[:1])])
    return answers[exact] if exact in answers else answers[name]


def _is_output(argument: Any) -> bool:
    return hasattr(argument, "_obj") or isinstance(argument, ctypes.Array)


def _address(argument: Any) -> int | None:
    """The made-up address in a device handle, None for any other argument."""
    return ctypes.cast(argument, ctypes.c_void_p).value if isinstance(argument, pynvml.c_nvmlDevice_t) else None


def _plain(argument: Any) -> int | None:
    """The number in an input argument, None for handles and outputs."""
    value = getattr(argument, "value", argument)
    return value if isinstance(value, int) else None


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
    """NVML's way with lists: say how many there are, and fill the array once it is large enough."""
    if isinstance(answer, dict):
        return int(answer["error"])
    room, count.value = count.value, len(answer)
    if array is None:
        return _INSUFFICIENT_SIZE if answer else _SUCCESS
    assert room >= len(answer)
    for position, process in enumerate(answer):
        for field, number in process.items():
            setattr(array[position], field, number)
    return _SUCCESS


@contextmanager
def playing(recording: str | dict[str, Any]) -> Iterator[None]:
    """pynvml talks to the recording (a name in recordings/, or one made by a test) while this is open."""
    if isinstance(recording, str):
        recording = json.loads((RECORDINGS / f"{recording}.json").read_text(encoding="utf-8"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pynvml, "nvmlLib", RecordedNvml(recording))
        patch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
        patch.setattr(nvml, "driver_library_loads", lambda: True)
        yield
