// The extension module: what Python puts under torch._C in CUDA's place.
#include "allocator.h"
#include "generator.h"
#include "kernels.h"
#include "process_group.h"
#include "streams.h"

#include <torch/csrc/Generator.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/utils/pybind.h>

#include <pybind11/chrono.h>
#include <pybind11/stl.h>

namespace py = pybind11;

namespace emulated {
void register_device();

namespace {

using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;

py::dict stat_dict(const Stat& stat) {
  py::dict one;
  one["current"] = stat.current;
  one["peak"] = stat.peak;
  one["allocated"] = stat.allocated;
  one["freed"] = stat.freed;
  return one;
}

py::dict array_dict(const StatArray& array) {
  py::dict all;
  const char* names[] = {"all", "small_pool", "large_pool"};
  for (size_t i = 0; i < 3; ++i) all[names[i]] = stat_dict(array[i]);
  return all;
}

c10::CachingDeviceAllocator::DeviceStats device_stats(int device) {
  py::gil_scoped_release release;
  return device_allocator()->getDeviceStats(static_cast<c10::DeviceIndex>(device));
}

py::dict memory_stats(int device) {
  auto stats = device_stats(device);
  py::dict all;
  all["num_alloc_retries"] = stats.num_alloc_retries;
  all["num_ooms"] = stats.num_ooms;
  all["max_split_size"] = -1;
  all["num_sync_all_streams"] = stats.num_sync_all_streams;
  all["num_device_alloc"] = stats.num_device_alloc;
  all["num_device_free"] = stats.num_device_free;
  all["allocation"] = array_dict(stats.allocation);
  all["segment"] = array_dict(stats.segment);
  all["active"] = array_dict(stats.active);
  all["inactive_split"] = array_dict(stats.inactive_split);
  all["allocated_bytes"] = array_dict(stats.allocated_bytes);
  all["reserved_bytes"] = array_dict(stats.reserved_bytes);
  all["active_bytes"] = array_dict(stats.active_bytes);
  all["inactive_split_bytes"] = array_dict(stats.inactive_split_bytes);
  all["requested_bytes"] = array_dict(stats.requested_bytes);
  all["oversize_allocations"] = stat_dict(stats.oversize_allocations);
  all["oversize_segments"] = stat_dict(stats.oversize_segments);
  return all;
}

py::dict host_memory_stats() {
  auto stats = host_stats();
  auto part = [](int64_t current, int64_t peak) {
    py::dict one;
    one["current"] = current;
    one["peak"] = peak;
    one["allocated"] = peak;
    one["freed"] = peak - current;
    return one;
  };
  py::dict all;
  all["num_host_alloc"] = stats.allocations;
  all["allocated_bytes"] = part(stats.allocated, stats.allocated_peak);
  all["reserved_bytes"] = part(stats.reserved, stats.reserved_peak);
  return all;
}

py::dict memory_snapshot() {
  std::vector<Segment> segments;
  {
    py::gil_scoped_release release;
    segments = snapshot();
  }
  py::list list;
  for (const auto& segment : segments) {
    py::dict one;
    size_t allocated = 0, active = 0, requested = 0;
    py::list blocks;
    for (const auto& block : segment.blocks) {
      py::dict b;
      b["address"] = block.address;
      b["size"] = block.size;
      b["requested_size"] = block.requested;
      b["state"] = block.allocated ? "active_allocated" : block.active ? "active_pending_free" : "inactive";
      b["frames"] = py::list();
      blocks.append(b);
      if (block.allocated) allocated += block.size;
      if (block.active) active += block.size;
      requested += block.allocated ? block.requested : 0;
    }
    one["device"] = segment.device;
    one["address"] = segment.address;
    one["total_size"] = segment.size;
    one["allocated_size"] = allocated;
    one["active_size"] = active;
    one["requested_size"] = requested;
    one["stream"] = segment.stream;
    one["segment_type"] = segment.small ? "small" : "large";
    one["segment_pool_id"] = py::make_tuple(0, 0);
    one["is_expandable"] = segment.expandable;
    one["frames"] = py::list();
    one["blocks"] = blocks;
    list.append(one);
  }
  py::dict all;
  all["segments"] = list;
  all["device_traces"] = py::list();
  all["allocator_settings"] = py::dict();
  all["external_annotations"] = py::list();
  return all;
}

py::tuple stream_tuple(c10::Stream stream) {
  return py::make_tuple(stream.id(), stream.device_index(), static_cast<int64_t>(stream.device_type()));
}

c10::Storage storage_of(const py::object& object) { return THPStorage_Unpack(object.ptr()); }

} // namespace
} // namespace emulated

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace emulated;
  register_device();
  auto released = py::call_guard<py::gil_scoped_release>();

  m.def("configure", [](const std::vector<std::tuple<size_t, size_t, int>>& devices, const std::string& shared) {
    std::vector<DeviceMemory> memory;
    for (auto [total, used, card] : devices) memory.push_back({total, used, card});
    set_device_count(static_cast<int>(memory.size()));
    set_memory(std::move(memory), shared);
  });
  m.def("set_expandable_segments", &set_expandable_segments);
  m.def("set_on_race", [](const std::string& what) {
    TORCH_CHECK(what == "raise" || what == "poison" || what == "ignore", "on_race is raise, poison or ignore, not ", what);
    manner().on_race = what == "raise" ? OnRace::Raise : what == "poison" ? OnRace::Poison : OnRace::Ignore;
  });
  m.def("set_lag", [](uint64_t operations) { manner().lag = operations; });
  m.def("races", &races);

  m.def("device_count", &device_count);
  m.def("get_device", &current_device);
  m.def("set_device", [](int device) { if (device >= 0) set_current_device(device); });
  m.def("exchange_device", [](int device) {
    int old = current_device();
    if (device >= 0) set_current_device(device);
    return device < 0 ? -1 : old;
  });
  m.def("current_stream", [](int device) { return stream_tuple(current_stream(device)); });
  m.def("default_stream", [](int device) { return stream_tuple(default_stream(device)); });
  m.def("set_stream", [](int64_t id, int64_t device, int64_t) {
    set_current_device(static_cast<int>(device));
    set_current_stream(c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device)), id));
  });
  m.def("synchronize", [] { synchronize_device(current_device()); }, released);

  m.def("memory_stats", &memory_stats);
  m.def("memory_snapshot", &memory_snapshot);
  m.def("host_memory_stats", &host_memory_stats);
  m.def("reset_peak_host_memory_stats", &reset_host_peak);
  m.def("host_empty_cache", &reset_host_allocator);
  m.def("empty_cache", [] { device_allocator()->emptyCache({0, 0}); }, released);
  m.def("reset_peak", [](int d) { device_allocator()->resetPeakStats(static_cast<c10::DeviceIndex>(d)); }, released);
  m.def("reset_accumulated", [](int d) { device_allocator()->resetAccumulatedStats(static_cast<c10::DeviceIndex>(d)); }, released);
  m.def("memory_info", [](int d) { return device_allocator()->getMemoryInfo(static_cast<c10::DeviceIndex>(d)); }, released);
  m.def("set_memory_fraction", &set_memory_fraction, released);
  m.def("default_generator", [](int device) {
    return py::reinterpret_steal<py::object>(THPGenerator_initDefaultGenerator(default_generator(device)));
  });
  m.def("resize_storage", [](const py::object& object, size_t bytes) {
    auto storage = storage_of(object);
    py::gil_scoped_release release;
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  });

  // c10d's own types are there once torch.distributed has been imported.
  m.def("bind_nccl", [m]() mutable {
    auto nccl = py::class_<NcclGroup, c10::intrusive_ptr<NcclGroup>, c10d::Backend>(m, "ProcessGroupNCCL", py::dynamic_attr());
    py::class_<NcclOptions, c10::intrusive_ptr<NcclOptions>, c10d::Backend::Options>(nccl, "Options", py::dynamic_attr())
        .def(py::init([](bool high) { return c10::make_intrusive<NcclOptions>(high); }), py::arg("is_high_priority_stream") = false)
        .def_readwrite("is_high_priority_stream", &NcclOptions::is_high_priority_stream);
    nccl.def(py::init([](const py::object& store, int rank, int size, const c10::intrusive_ptr<NcclOptions>& options) {
      auto gloo = py::module_::import("torch._C._distributed_c10d").attr("ProcessGroupGloo")(store, rank, size, options->timeout);
      return c10::make_intrusive<NcclGroup>(rank, size, gloo.cast<c10::intrusive_ptr<c10d::Backend>>(), options);
    }));
  });
}
