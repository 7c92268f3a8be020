// The caching allocator of CUDA devices over host memory, with the rules of c10/cuda/CUDACachingAllocator.cpp.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <string>
#include <utility>
#include <vector>

namespace emulated {

struct DeviceMemory {
  size_t total = 0; // bytes of the card
  size_t used = 0;  // bytes that others hold, and that a process takes before its first tensor
  int card = 0;     // index on the machine, which other processes may number differently
};

// Cards by index, and the folder through which processes see each other's use ("" when alone).
void set_memory(std::vector<DeviceMemory> devices, const std::string& shared_folder);
void set_expandable_segments(bool on);
void set_memory_fraction(double fraction, int device);
void reset_host_allocator();

c10::DeviceAllocator* device_allocator();
c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);
int device_of(const void* pointer); // -1: not of a card

struct Block {
  int device;
  c10::StreamId stream;
  size_t size;
  size_t requested;
  uintptr_t address;
  bool allocated;
  bool active;
};
struct Segment {
  int device;
  c10::StreamId stream;
  size_t size;
  uintptr_t address;
  bool small;
  bool expandable;
  std::vector<Block> blocks;
};
std::vector<Segment> snapshot();

struct HostStats {
  int64_t allocated = 0;
  int64_t allocated_peak = 0;
  int64_t reserved = 0;
  int64_t reserved_peak = 0;
  int64_t allocations = 0;
};
HostStats host_stats();
void reset_host_peak();

} // namespace emulated
