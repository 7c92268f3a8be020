// The device itself: guard, hooks, profiler and timer, registered as CUDA's.
#include "allocator.h"
#include "generator.h"
#include "streams.h"

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/profiler/stubs/base.h>

#include <chrono>

namespace emulated {
void register_attention();
namespace {

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device device) const override {
    auto old = getDevice();
    set_current_device(device.index());
    return old;
  }
  c10::Device getDevice() const override { return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(current_device())); }
  void setDevice(c10::Device device) const override { set_current_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0 && device.index() < device_count()) set_current_device(device.index());
  }
  c10::Stream getStream(c10::Device device) const override { return current_stream(device.index()); }
  c10::Stream getDefaultStream(c10::Device device) const override { return default_stream(device.index()); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    return new_stream(index_of(device), high_priority);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override { return new_stream(index_of(device), priority < 0); }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto old = current_stream(stream.device_index());
    set_current_stream(stream);
    return old;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(device_count()); }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex, const c10::EventFlag) const override {
    auto* made = static_cast<Event*>(*event);
    if (made == nullptr) made = new Event();
    *made = emulated::record(stream);
    *event = made;
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) wait(stream, *static_cast<Event*>(event));
  }
  bool queryEvent(void* event) const override { return event == nullptr || query(*static_cast<Event*>(event)); }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryStream(const c10::Stream& stream) const override { return query(emulated::record(stream)); }
  void synchronizeStream(const c10::Stream& stream) const override { synchronize_stream(stream); }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) wait_on_host(*static_cast<Event*>(event));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override { synchronize_device(device); }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    device_allocator()->recordStream(pointer, stream);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(first != nullptr && second != nullptr, "Both events must be recorded before calculating elapsed time.");
    return static_cast<double>(static_cast<Event*>(second)->nanoseconds - static_cast<Event*>(first)->nanoseconds) / 1e6;
  }

 private:
  static int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device(); }
};

struct Hooks final : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return device_count() > 0; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasCUDART() const override { return true; }
  long versionCUDART() const override { return 13000; }
  int getNumGPUs() const override { return device_count(); }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(device_count()); }
  c10::DeviceIndex current_device() const override { return static_cast<c10::DeviceIndex>(emulated::current_device()); }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    auto old = current_device();
    if (device >= 0) set_current_device(device);
    return old;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? emulated::current_device() : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return new_generator(device < 0 ? emulated::current_device() : device);
  }
  c10::Device getDeviceFromPtr(void* pointer) const override {
    int device = device_of(pointer);
    TORCH_CHECK(device >= 0, "The specified pointer resides on host memory and is not registered with any CUDA device.");
    return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device));
  }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  c10::Allocator* getCUDADeviceAllocator() const override { return device_allocator(); }
  void deviceSynchronize(c10::DeviceIndex device) const override { synchronize_device(device); }
};

// Events of the profiler and of DDP's timing are the host's time.
struct Profiler final : torch::profiler::impl::ProfilerStubs {
  void record(c10::DeviceIndex* device, torch::profiler::impl::ProfilerVoidEventStub* event, int64_t* nanoseconds) const override {
    if (device != nullptr) *device = static_cast<c10::DeviceIndex>(current_device());
    *event = std::shared_ptr<void>(new int64_t(now()), [](void* p) { delete static_cast<int64_t*>(p); });
    if (nanoseconds != nullptr) *nanoseconds = now();
  }
  float elapsed(
      const torch::profiler::impl::ProfilerVoidEventStub* first,
      const torch::profiler::impl::ProfilerVoidEventStub* second) const override {
    return static_cast<float>(*static_cast<int64_t*>(second->get()) - *static_cast<int64_t*>(first->get())) / 1000.0F;
  }
  void mark(const char*) const override {}
  void rangePush(const char*) const override {}
  void rangePop() const override {}
  bool enabled() const override { return true; }
  void onEachDevice(std::function<void(int)> op) const override {
    for (int device = 0; device < device_count(); ++device) op(device);
  }
  void synchronize() const override { synchronize_device(current_device()); }
};

class Timer final : public c10d::Timer {
 public:
  explicit Timer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const int64_t from = getTimeRef(start), to = getTimeRef(end);
    if (from < 0 || to < from) return std::nullopt;
    return to - from;
  }
};

} // namespace

void register_device() {
  c10::SetAllocator(c10::kCUDA, device_allocator(), 1);
  c10::impl::registerDeviceGuard(c10::kCUDA, new Guard());
  static Profiler profiler;
  torch::profiler::impl::registerCUDAMethods(&profiler);
  register_attention();
}

} // namespace emulated

namespace c10d {
using EmulatedCudaTimer = emulated::Timer;
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, EmulatedCudaTimer)
} // namespace c10d

namespace at {
using EmulatedCudaHooks = emulated::Hooks;
C10_REGISTER_CLASS(CUDAHooksRegistry, CUDAHooks, EmulatedCudaHooks)
} // namespace at
