"""Puts the emulated device where torch's own Python looks for CUDA.

A build of torch without CUDA has all of `torch.cuda`'s Python, and none of the functions under `torch._C` that it
calls. They are put there just before `torch.cuda` is imported, so that everything above them is torch's own code.
"""

from __future__ import annotations

import ctypes
import datetime
import importlib.util
import json
import os
import sys
import time
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from typing import Any


def install() -> None:
    """Have the emulated device put in place when torch is imported."""
    sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]


class _Finder:
    """Acts just before modules of torch are imported; finds nothing itself."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        if name == "torch._C":
            # Its hooks have to be registered before the first question about CUDA, which comes when this is loaded.
            ctypes.CDLL(os.environ["EMULATED_CUDA_LIBRARY"])
        elif name == "torch.cuda":
            _put_in_place()
        elif name in ("torch.distributed.constants", "torch.distributed.distributed_c10d") and hasattr(
            sys.modules["torch"]._C, "_cuda_init"
        ):
            _put_nccl_in_place()
        return None


class _Machine:
    """The cards of the file that EMULATED_CUDA names, as CUDA_VISIBLE_DEVICES leaves them."""

    def __init__(self) -> None:
        with open(os.environ["EMULATED_CUDA"], encoding="utf-8") as file:
            self.description: dict[str, Any] = json.load(file)
        devices = self.description["devices"]
        seen = [i for i, device in enumerate(devices) if "torch" in device.get("seen_by", ("torch",))]
        if os.environ.get("CUDA_DEVICE_ORDER", "FASTEST_FIRST") == "FASTEST_FIRST":
            seen.sort(key=lambda i: -devices[i].get("multi_processor_count", 0))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        chosen = seen if visible is None else self._chosen(visible, seen)
        slices = sorted(i for i in chosen if self._is_slice(i)) if visible is None else chosen[:1]
        self.cards = slices[:1] if slices and self._is_slice(slices[0]) else chosen  # one slice, and nothing beside it

    def _is_slice(self, card: int) -> bool:
        return str(self.description["devices"][card].get("uuid", "")).startswith("MIG-")

    def _chosen(self, visible: str, seen: list[int]) -> list[int]:
        """Return the cards that CUDA_VISIBLE_DEVICES names; CUDA stops at the first that it does not know."""
        chosen: list[int] = []
        for token in map(str.strip, visible.split(",")):
            uuids = {i: self.description["devices"][i].get("uuid", "") for i in seen}
            matches = [i for i, uuid in uuids.items() if uuid and uuid.startswith(token)] if token else []
            if token.isdecimal() and int(token) < len(seen):
                matches = [seen[int(token)]]
            if len(matches) != 1 or matches[0] in chosen:
                break
            chosen += matches
        return chosen

    def device(self, index: int) -> dict[str, Any]:
        return dict(self.description["devices"][self.cards[index]])


_native: Any = None
_machine: _Machine


def _load() -> Any:
    spec = importlib.util.spec_from_file_location("_emulated_cuda", os.environ["EMULATED_CUDA_LIBRARY"])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _put_in_place() -> None:
    """Fill `torch._C` with what `torch.cuda` calls, for the cards that this process sees."""
    global _native, _machine
    import torch

    _machine = _Machine()
    _native = native = _load()
    native.configure(
        [
            (_machine.device(i)["total_memory"], _machine.device(i).get("used", 0), card)
            for i, card in enumerate(_machine.cards)
        ],
        _machine.description.get("shared", ""),
    )
    native.set_on_race(os.environ.get("EMULATED_CUDA_RACES", "raise"))
    native.set_lag(int(os.environ.get("EMULATED_CUDA_LAG", "64")))
    _settings(os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "")
    for name, value in {**_functions(native), **_classes()}.items():
        setattr(torch._C, name, value)
    torch._C._has_cuda = True
    torch.version.cuda = "13.0"
    _mend_storages()
    os.register_at_fork(after_in_child=_forked)


def _settings(text: str) -> None:
    for item in text.split(","):
        key, _, value = item.partition(":")
        if key.strip() == "expandable_segments":
            _native.set_expandable_segments(value.strip().lower() == "true")


_has_begun = False
_is_in_bad_fork = False


def _forked() -> None:
    global _is_in_bad_fork
    _is_in_bad_fork = _has_begun


def _begin() -> None:
    global _has_begun
    import torch

    if not _machine.cards:
        raise RuntimeError("No CUDA GPUs are available")
    _has_begun = True
    torch.cuda.default_generators = tuple(_native.default_generator(i) for i in range(len(_machine.cards)))
    torch.cuda._get_device_properties = _properties  # type: ignore[attr-defined]


class _CudaDeviceProperties:
    """The return value of `torch.cuda.get_device_properties`, from the machine's file."""

    def __init__(self, device: dict[str, Any]) -> None:
        major, minor = device.get("capability", [9, 0])
        self.name: str = device["name"]
        self.major, self.minor = major, minor
        self.total_memory: int = device["total_memory"]
        self.multi_processor_count: int = device.get("multi_processor_count", 132)
        self.uuid: str = device.get("uuid", "").removeprefix("GPU-").removeprefix("MIG-")
        self.is_integrated = self.is_multi_gpu_board = 0
        self.max_threads_per_multi_processor, self.max_threads_per_block, self.warp_size = 2048, 1024, 32
        self.regs_per_multiprocessor = 65536
        self.shared_memory_per_block, self.shared_memory_per_block_optin = 49152, 232448
        self.shared_memory_per_multiprocessor = 233472
        self.L2_cache_size = 50 << 20
        self.clock_rate, self.memory_clock_rate, self.memory_bus_width = 1980000, 2619000, 5120
        self.pci_bus_id, self.pci_device_id, self.pci_domain_id = device.get("pci_bus", 0), 0, 0
        self.gcnArchName = ""

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor}, "
            f"total_memory={self.total_memory >> 20}MB, multi_processor_count={self.multi_processor_count})"
        )


def _properties(index: int) -> _CudaDeviceProperties:
    return _CudaDeviceProperties(_machine.device(index))


def _functions(native: Any) -> dict[str, Any]:
    """Return the functions of `torch._C`, by name."""

    def nothing(*arguments: Any, **options: Any) -> None:
        return None

    def set_memory_fraction(fraction: float, device: int) -> None:
        native.set_memory_fraction(fraction, device)

    def set_allocator_settings(text: str) -> None:
        _settings(text)

    return {
        "_cuda_init": _begin,
        "_cuda_isInBadFork": lambda: _is_in_bad_fork,
        "_cuda_getDeviceCount": lambda: native.device_count(),
        "_cuda_getDevice": lambda: native.get_device(),
        "_cuda_setDevice": lambda device: native.set_device(device),
        "_cuda_exchangeDevice": lambda device: native.exchange_device(device),
        "_cuda_maybeExchangeDevice": lambda device: native.exchange_device(device),
        "_cuda_hasPrimaryContext": lambda device: _has_begun,
        "_cuda_getCurrentStream": lambda device: native.current_stream(device),
        "_cuda_getCurrentRawStream": lambda device: native.current_stream(device)[0],
        "_cuda_getDefaultStream": lambda device: native.default_stream(device),
        "_cuda_getStreamFromExternal": lambda pointer, device: native.default_stream(device),
        "_cuda_setStream": lambda stream_id, device_index, device_type: native.set_stream(
            stream_id, device_index, device_type
        ),
        "_cuda_synchronize": lambda: native.synchronize(),
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_sleep": nothing,
        "_cuda_ipc_collect": nothing,
        "_cuda_canDeviceAccessPeer": lambda device, peer: device != peer,
        "_cuda_getArchFlags": lambda: "sm_80 sm_90 sm_100 sm_120",
        "_cuda_getCompiledVersion": lambda: 13000,
        "_cuda_getCurrentBlasHandle": lambda: 1,
        "_cuda_getCurrentSolverHandle": lambda: 1,
        "_cuda_clearCublasWorkspaces": nothing,
        "_cuda_set_sync_debug_mode": nothing,
        "_cuda_get_sync_debug_mode": lambda: 0,
        "_cuda_memoryStats": lambda device: native.memory_stats(device),
        "_cuda_memorySnapshot": lambda *options: native.memory_snapshot(),
        "_cuda_resetPeakMemoryStats": lambda device: native.reset_peak(device),
        "_cuda_resetAccumulatedMemoryStats": lambda device: native.reset_accumulated(device),
        "_cuda_hostMemoryStats": lambda: native.host_memory_stats(),
        "_cuda_resetPeakHostMemoryStats": lambda: native.reset_peak_host_memory_stats(),
        "_cuda_resetAccumulatedHostMemoryStats": nothing,
        "_cuda_emptyCache": lambda *pool: native.empty_cache(),
        "_cuda_setMemoryFraction": set_memory_fraction,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_record_memory_history": nothing,
        "_cuda_record_memory_history_legacy": nothing,
        "_cuda_isHistoryEnabled": lambda: False,
        "_cuda_attach_out_of_memory_observer": nothing,
        "_accelerator_setAllocatorSettings": set_allocator_settings,
        "_cuda_cudaCachingAllocator_set_allocator_settings": set_allocator_settings,
        "_host_emptyCache": lambda: native.host_empty_cache(),
        "_graph_pool_handle": lambda: (0, 1),
        "_nccl_version": lambda: (2 << 32) + (27 << 16) + 7,
        "_nccl_version_suffix": lambda: b"",
        "_nccl_unique_id": nothing,
    }


def _classes() -> dict[str, Any]:
    """Return the types of `torch._C`, by name."""
    import torch

    class _CudaStreamBase(torch._C.Stream):  # type: ignore[misc]
        def __new__(
            cls, priority: int = 0, stream_id: int = 0, device_index: int = 0, device_type: int = 0, stream_ptr: int = 0
        ) -> Any:
            if stream_id or device_type:
                return super().__new__(cls, stream_id=stream_id, device_index=device_index, device_type=device_type)
            return super().__new__(cls, device=torch.device("cuda", _native.get_device()), priority=priority)

        @property
        def cuda_stream(self) -> int:
            return int(self.stream_id)

        @property
        def priority(self) -> int:
            return -1 if int(self.stream_id) > 32 else 0

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return 0, -1

    class _CudaEventBase(torch._C.Event):  # type: ignore[misc]
        _nanoseconds = 0

        def __new__(
            cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, external: bool = False
        ) -> Any:
            event = super().__new__(
                cls, device="cuda", enable_timing=enable_timing, blocking=blocking, interprocess=interprocess
            )
            event._is_timed = enable_timing
            return event

        def record(self, stream: Any = None) -> None:
            super().record(stream)
            self._nanoseconds = time.monotonic_ns()

        def elapsed_time(self, end: Any) -> float:
            if not (self._is_timed and end._is_timed):
                raise ValueError("Both events must be created with argument 'enable_timing=True'.")
            if not (self._nanoseconds and end._nanoseconds):
                raise ValueError("Both events must be recorded before calculating elapsed time.")
            return (end._nanoseconds - self._nanoseconds) / 1e6

        @property
        def cuda_event(self) -> int:
            return id(self)

    class _CUDAGraph:
        def __new__(cls, *arguments: Any, **options: Any) -> Any:
            raise RuntimeError("the emulated CUDA device has no graphs")

    class cudaError:  # noqa: N801
        success = 0

    cudart = types.SimpleNamespace(
        cudaError=cudaError,
        cudaMemGetInfo=lambda device: _native.memory_info(device),
        cudaDeviceSynchronize=lambda: _native.synchronize() or 0,
        cudaHostRegister=lambda pointer, size, flags: 0,
        cudaHostUnregister=lambda pointer: 0,
        cudaProfilerStart=lambda: 0,
        cudaProfilerStop=lambda: 0,
        cudaGetErrorString=lambda code: "no error",
    )
    nvtx = types.SimpleNamespace(
        rangePushA=lambda message: 0,
        rangePop=lambda: 0,
        markA=lambda message: None,
        rangeStartA=lambda m: 0,
        rangeEnd=lambda r: None,
    )
    return {
        "_CudaStreamBase": _CudaStreamBase,
        "_CudaEventBase": _CudaEventBase,
        "_CudaDeviceProperties": _CudaDeviceProperties,
        "_CUDAGraph": _CUDAGraph,
        "_cudart": cudart,
        "_nvtx": nvtx,
    }


def _mend_storages() -> None:
    """Have storages made and resized on a card: the build's own code for that was left out when it was compiled."""
    import torch

    own_resize, own_new = torch.UntypedStorage.resize_, torch.UntypedStorage.__new__

    def resize_(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return own_resize(self, size)
        _native.resize_storage(self, size)
        return self

    def new(cls: Any, *arguments: Any, device: Any = None, **options: Any) -> Any:
        if device is None or torch.device(device).type != "cuda":
            return (
                own_new(cls, *arguments, **options)
                if device is None
                else own_new(cls, *arguments, device=device, **options)
            )
        if arguments and not isinstance(arguments[0], int):
            data = torch.tensor(list(arguments[0]), dtype=torch.uint8, device=device)
        else:
            data = torch.empty(arguments[0] if arguments else 0, dtype=torch.uint8, device=device)
        return data.untyped_storage()

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign]
    torch.UntypedStorage.__new__ = new  # type: ignore[method-assign,assignment]


def _put_nccl_in_place() -> None:
    import torch._C._distributed_c10d as c10d

    if hasattr(c10d, "ProcessGroupNCCL"):
        return
    _native.bind_nccl()
    c10d.ProcessGroupNCCL = _native.ProcessGroupNCCL  # type: ignore[attr-defined]
    c10d._DEFAULT_PG_NCCL_TIMEOUT = datetime.timedelta(minutes=10)
