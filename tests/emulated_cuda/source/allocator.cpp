#include "allocator.h"
#include "streams.h"

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <unordered_map>
#include <unordered_set>

namespace emulated {
namespace {

using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatType;

constexpr size_t kMinBlockSize = 512;
constexpr size_t kSmallSize = 1 << 20;
constexpr size_t kSmallBuffer = 2 << 20;
constexpr size_t kLargeBuffer = 20 << 20;
constexpr size_t kMinLargeAlloc = 10 << 20;
constexpr size_t kRoundLarge = 2 << 20;
constexpr int kMostDevices = 16;

struct DeviceBlock;

struct BySize {
  bool operator()(const DeviceBlock* a, const DeviceBlock* b) const;
};

struct Pool {
  bool small;
  std::set<DeviceBlock*, BySize> free;     // mapped and free
  std::set<DeviceBlock*, BySize> unmapped; // of expandable segments
};

struct Expandable {
  int device;
  c10::StreamId stream;
  char* base;
  size_t reach;       // bytes of address space
  size_t granularity; // bytes mapped at once
};

struct DeviceBlock {
  int device;
  c10::StreamId stream;
  size_t size;
  size_t requested = 0;
  Pool* pool;
  char* pointer;
  bool allocated = false;
  bool mapped = true;
  Expandable* expandable = nullptr;
  DeviceBlock* previous = nullptr;
  DeviceBlock* next = nullptr;
  int events = 0;
  std::vector<c10::Stream> stream_uses;
  bool is_split() const { return previous != nullptr || next != nullptr; }
};

bool BySize::operator()(const DeviceBlock* a, const DeviceBlock* b) const {
  if (a->stream != b->stream) return a->stream < b->stream;
  if (a->size != b->size) return a->size < b->size;
  return reinterpret_cast<uintptr_t>(a->pointer) < reinterpret_cast<uintptr_t>(b->pointer);
}

size_t round_up(size_t bytes, size_t unit) { return (bytes + unit - 1) / unit * unit; }

size_t round_size(size_t bytes) { return bytes < kMinBlockSize ? kMinBlockSize : round_up(bytes, kMinBlockSize); }

size_t segment_size(size_t size) {
  if (size <= kSmallSize) return kSmallBuffer;
  if (size < kMinLargeAlloc) return kLargeBuffer;
  return round_up(size, kRoundLarge);
}

std::string human(size_t bytes) {
  std::ostringstream out;
  out.precision(2);
  out << std::fixed;
  if (bytes <= 1024)
    out << bytes << " bytes";
  else if (bytes <= 1048576)
    out << bytes / 1024.0 << " KiB";
  else if (bytes <= 1073741824ULL)
    out << bytes / 1048576.0 << " MiB";
  else
    out << bytes / 1073741824.0 << " GiB";
  return out.str();
}

// What every process holds of every card, in a file of its own that others read.
class Shared {
 public:
  void open(const std::string& folder) {
    folder_ = folder;
    mine_ = nullptr;
    owner_ = 0;
  }

  void set(int device, size_t bytes) {
    if (folder_.empty()) return;
    if (mine_ == nullptr || owner_ != getpid()) create();
    if (mine_ != nullptr) mine_[device] = bytes;
  }

  size_t others(int device) const {
    if (folder_.empty()) return 0;
    size_t sum = 0;
    std::error_code error;
    for (const auto& entry : std::filesystem::directory_iterator(folder_, error)) {
      const auto name = entry.path().filename().string();
      char* end = nullptr;
      long process = std::strtol(name.c_str(), &end, 10);
      if (*end != '\0' || process == getpid() || kill(static_cast<pid_t>(process), 0) != 0) continue;
      std::ifstream file(entry.path(), std::ios::binary);
      uint64_t bytes[kMostDevices] = {};
      file.read(reinterpret_cast<char*>(bytes), sizeof bytes);
      sum += bytes[device];
    }
    return sum;
  }

 private:
  void create() {
    owner_ = getpid();
    const auto path = folder_ + "/" + std::to_string(owner_);
    int file = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (file < 0) return;
    if (ftruncate(file, kMostDevices * sizeof(uint64_t)) == 0) {
      void* memory = mmap(nullptr, kMostDevices * sizeof(uint64_t), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
      mine_ = memory == MAP_FAILED ? nullptr : static_cast<uint64_t*>(memory);
    }
    close(file);
  }

  std::string folder_;
  uint64_t* mine_ = nullptr;
  pid_t owner_ = 0;
};

class CudaAllocator;
void give_back(void* context);

class CudaAllocator final : public c10::DeviceAllocator {
 public:
  void set_memory(std::vector<DeviceMemory> devices, const std::string& shared_folder) {
    Lock lock;
    while (cards_.size() < devices.size()) cards_.emplace_back();
    for (size_t i = 0; i < devices.size(); ++i) cards_[i].memory = devices[i];
    shared_.open(shared_folder);
  }

  void set_expandable(bool on) { expandable_ = on; }

  void set_fraction(double fraction, int device) {
    Lock lock;
    card(device).limit = static_cast<size_t>(fraction * static_cast<double>(card(device).memory.total));
  }

  c10::DataPtr allocate(size_t bytes) override {
    int device = current_device();
    if (bytes == 0) return {nullptr, nullptr, &give_back, c10::Device(c10::kCUDA, device)};
    auto* block = malloc(device, bytes, current_stream(device).id());
    return {block->pointer, block, &give_back, c10::Device(c10::kCUDA, device)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }

  void copy_data(void* to, const void* from, std::size_t count) const override { std::memcpy(to, from, count); }

  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t) override {
    Lock lock;
    for (size_t device = 0; device < cards_.size(); ++device) release_cached(static_cast<int>(device));
  }

  void recordStream(const c10::DataPtr& pointer, c10::Stream stream) override {
    if (pointer.get() == nullptr || pointer.get_deleter() != &give_back) return;
    Lock lock;
    auto* block = static_cast<DeviceBlock*>(pointer.get_context());
    if (stream.id() == block->stream && stream.device_index() == block->device) return;
    auto& uses = block->stream_uses;
    if (std::find(uses.begin(), uses.end(), stream) == uses.end()) uses.push_back(stream);
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    Lock lock;
    return card(device).stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    Lock lock;
    auto& stats = card(device).stats;
    for (auto* array : arrays(stats))
      for (auto& stat : *array) stat.reset_accumulated();
    stats.num_alloc_retries = stats.num_ooms = stats.num_sync_all_streams = 0;
    stats.num_device_alloc = stats.num_device_free = 0;
    stats.oversize_allocations.reset_accumulated();
    stats.oversize_segments.reset_accumulated();
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    Lock lock;
    auto& stats = card(device).stats;
    for (auto* array : arrays(stats))
      for (auto& stat : *array) stat.reset_peak();
    stats.oversize_allocations.reset_peak();
    stats.oversize_segments.reset_peak();
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    Lock lock;
    auto& c = card(device);
    return {free_of(c, device), c.memory.total};
  }

  void free(DeviceBlock* block) {
    Lock lock;
    auto& c = card(block->device);
    block->allocated = false;
    count(c.stats.allocation, *block, -1);
    count(c.stats.allocated_bytes, *block, -static_cast<int64_t>(block->size));
    count(c.stats.requested_bytes, *block, -static_cast<int64_t>(block->requested));
    if (!block->stream_uses.empty()) {
      for (const auto& stream : block->stream_uses) {
        ++block->events;
        c.events.emplace_back(record(stream), block);
      }
      block->stream_uses.clear();
    } else {
      free_block(c, block);
    }
  }

  int device_of(const void* pointer) {
    Lock lock;
    auto it = owners_.upper_bound(reinterpret_cast<uintptr_t>(pointer));
    if (it == owners_.begin()) return -1;
    --it;
    return reinterpret_cast<uintptr_t>(pointer) < it->second.first ? it->second.second : -1;
  }

  std::vector<Segment> snapshot() {
    Lock lock;
    std::vector<Segment> segments;
    for (auto& c : cards_) {
      std::vector<DeviceBlock*> heads;
      for (auto* block : c.blocks)
        if (block->previous == nullptr || !block->previous->mapped)
          if (block->mapped) heads.push_back(block);
      std::sort(heads.begin(), heads.end(), [](auto* a, auto* b) { return a->pointer < b->pointer; });
      for (auto* head : heads) {
        Segment segment{head->device,      head->stream,               0, reinterpret_cast<uintptr_t>(head->pointer),
                        head->pool->small, head->expandable != nullptr, {}};
        for (auto* block = head; block != nullptr && block->mapped; block = block->next) {
          segment.size += block->size;
          segment.blocks.push_back({block->device, block->stream, block->size, block->requested,
                                    reinterpret_cast<uintptr_t>(block->pointer), block->allocated,
                                    block->allocated || block->events > 0});
        }
        segments.push_back(std::move(segment));
      }
    }
    return segments;
  }

 private:
  struct Card {
    DeviceMemory memory;
    size_t limit = SIZE_MAX;
    size_t reserved = 0;
    Pool small{true, {}, {}};
    Pool large{false, {}, {}};
    std::unordered_set<DeviceBlock*> blocks;
    std::deque<std::pair<Event, DeviceBlock*>> events;
    std::vector<Expandable*> expandables;
    c10::CachingDeviceAllocator::DeviceStats stats;
  };

  static std::vector<c10::CachingAllocator::StatArray*> arrays(c10::CachingDeviceAllocator::DeviceStats& stats) {
    return {&stats.allocation,      &stats.segment,        &stats.active,       &stats.inactive_split,
            &stats.allocated_bytes, &stats.reserved_bytes, &stats.active_bytes, &stats.inactive_split_bytes,
            &stats.requested_bytes};
  }

  Card& card(int device) {
    TORCH_CHECK(device >= 0 && device < static_cast<int>(cards_.size()), "Invalid device argument ", device);
    return cards_[device];
  }

  static void count(c10::CachingAllocator::StatArray& stats, const DeviceBlock& block, int64_t amount) {
    auto own = static_cast<size_t>(block.pool->small ? StatType::SMALL_POOL : StatType::LARGE_POOL);
    for (size_t type : {static_cast<size_t>(StatType::AGGREGATE), own})
      if (amount > 0)
        stats[type].increase(static_cast<size_t>(amount));
      else
        stats[type].decrease(static_cast<size_t>(-amount));
  }

  size_t free_of(Card& c, int device) {
    size_t taken = c.memory.used + c.reserved + shared_.others(c.memory.card);
    return taken < c.memory.total ? c.memory.total - taken : 0;
  }

  // cudaMalloc's arithmetic, without the memory.
  bool take(Card& c, int device, size_t bytes) {
    if (c.reserved + bytes > c.limit || bytes > free_of(c, device)) return false;
    c.reserved += bytes;
    shared_.set(c.memory.card, c.reserved + 1); // a process that holds a context is seen though it holds nothing
    return true;
  }

  void return_bytes(Card& c, int device, size_t bytes) {
    c.reserved -= bytes;
    shared_.set(c.memory.card, c.reserved + 1);
  }

  // Of free blocks of one size the first by address is taken. Addresses go up here, so that no luck of the host's decides.
  char* map(size_t bytes, int device) {
    static auto next = uintptr_t{1} << 44;
    auto* hint = reinterpret_cast<void*>(next);
    next += round_up(bytes, kSmallBuffer);
    void* memory = mmap(hint, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(memory != MAP_FAILED, "emulated CUDA: the host has no address space left");
    auto begin = reinterpret_cast<uintptr_t>(memory);
    owners_[begin] = {begin + bytes, device};
    return static_cast<char*>(memory);
  }

  DeviceBlock* malloc(int device, size_t bytes, c10::StreamId stream) {
    Lock lock;
    auto& c = card(device);
    process_events(c);
    const size_t size = round_size(bytes);
    auto& pool = size <= kSmallSize ? c.small : c.large;
    const size_t wanted = segment_size(size);
    DeviceBlock* block = find_free(pool, stream, size);
    if (block == nullptr) block = grow(c, device, stream, pool, size, wanted);
    if (block == nullptr) {
      ++c.stats.num_alloc_retries;
      release_cached(device);
      block = grow(c, device, stream, pool, size, wanted);
    }
    if (block == nullptr) {
      ++c.stats.num_ooms;
      out_of_memory(c, device, wanted);
    }
    return hand_out(c, pool, block, size, bytes);
  }

  DeviceBlock* find_free(Pool& pool, c10::StreamId stream, size_t size) {
    DeviceBlock key{0, stream, size, 0, &pool, nullptr};
    auto it = pool.free.lower_bound(&key);
    if (it == pool.free.end() || (*it)->stream != stream) return nullptr;
    if ((*it)->expandable != nullptr) {
      if (expandable_) {
        auto reach = [](DeviceBlock* b) { return b->size + (b->next != nullptr && !b->next->mapped ? b->next->size : 0); };
        auto next = std::next(it);
        while ((*it)->expandable != nullptr && next != pool.free.end() && (*next)->stream == stream && reach(*next) < reach(*it))
          it = next++;
      } else {
        do {
          ++it;
        } while (it != pool.free.end() && (*it)->expandable != nullptr && (*it)->stream == stream);
        if (it == pool.free.end() || (*it)->stream != stream) return nullptr;
      }
    }
    auto* block = *it;
    pool.free.erase(it);
    return block;
  }

  DeviceBlock* grow(Card& c, int device, c10::StreamId stream, Pool& pool, size_t size, size_t wanted) {
    if (expandable_) return expand(c, device, stream, pool, size);
    if (!take(c, device, wanted)) return nullptr;
    auto* block = new DeviceBlock{device, stream, wanted, 0, &pool, map(wanted, device)};
    c.blocks.insert(block);
    count(c.stats.segment, *block, 1);
    count(c.stats.reserved_bytes, *block, static_cast<int64_t>(wanted));
    ++c.stats.num_device_alloc;
    return block;
  }

  // -- expandable segments: one range of addresses for a stream and pool, mapped as far as is needed --

  DeviceBlock* find_expandable(Card& c, int device, c10::StreamId stream, Pool& pool, size_t size) {
    DeviceBlock key{device, stream, 0, 0, &pool, nullptr};
    for (auto it = pool.unmapped.lower_bound(&key); it != pool.unmapped.end() && (*it)->stream == stream; ++it) {
      auto* block = *it;
      auto* before = block->previous;
      if (before != nullptr && before->mapped && !before->allocated && before->events == 0 && before->stream_uses.empty()) {
        if (before->size + block->size >= size) return before; // free, then unmapped
      } else if (block->size >= size) {
        return block;
      }
    }
    const size_t granularity = pool.small ? kSmallBuffer : kLargeBuffer;
    const size_t reach = round_up(c.memory.total + c.memory.total / 8, granularity);
    auto* expandable = new Expandable{device, stream, map(reach, device), reach, granularity};
    c.expandables.push_back(expandable);
    auto* block = new DeviceBlock{device, stream, reach, 0, &pool, expandable->base};
    block->mapped = false;
    block->expandable = expandable;
    c.blocks.insert(block);
    pool.unmapped.insert(block);
    return block;
  }

  bool map_block(Card& c, DeviceBlock* block, size_t size) {
    auto& pool = *block->pool;
    const size_t granularity = block->expandable->granularity;
    const size_t bytes = std::min(round_up(size, granularity), block->size);
    if (!take(c, block->device, bytes)) return false;
    pool.unmapped.erase(block);
    if (bytes < block->size) {
      auto* rest = new DeviceBlock{block->device, block->stream, block->size - bytes, 0, &pool, block->pointer + bytes};
      rest->mapped = false;
      rest->expandable = block->expandable;
      rest->previous = block;
      rest->next = block->next;
      if (rest->next != nullptr) rest->next->previous = rest;
      block->next = rest;
      block->size = bytes;
      c.blocks.insert(rest);
      pool.unmapped.insert(rest);
    }
    block->mapped = true;
    count(c.stats.segment, *block, block->previous == nullptr || !block->previous->mapped ? 1 : 0);
    count(c.stats.reserved_bytes, *block, static_cast<int64_t>(bytes));
    ++c.stats.num_device_alloc;
    try_merge(c, block, block->previous);
    try_merge(c, block, block->next);
    pool.free.insert(block);
    return true;
  }

  DeviceBlock* expand(Card& c, int device, c10::StreamId stream, Pool& pool, size_t size) {
    auto* candidate = find_expandable(c, device, stream, pool, size);
    if (!candidate->mapped && !map_block(c, candidate, std::min(candidate->size, size))) return nullptr;
    while (candidate->size < size) {
      auto* next = candidate->next;
      if (!map_block(c, next, std::min(size - candidate->size, next->size))) return nullptr;
      candidate = next;
    }
    pool.free.erase(candidate);
    return candidate;
  }

  // -- splitting and merging --

  bool should_split(const DeviceBlock* block, size_t size) const {
    const size_t remaining = block->size - size;
    if (block->pool->small || block->expandable != nullptr) return remaining >= kMinBlockSize;
    return remaining > kSmallSize;
  }

  DeviceBlock* hand_out(Card& c, Pool& pool, DeviceBlock* block, size_t size, size_t requested) {
    const bool was_split = block->is_split();
    if (should_split(block, size)) {
      auto* rest = block;
      block = new DeviceBlock{rest->device, rest->stream, size, 0, &pool, rest->pointer};
      block->expandable = rest->expandable;
      block->previous = rest->previous;
      if (block->previous != nullptr) block->previous->next = block;
      block->next = rest;
      rest->previous = block;
      rest->pointer += size;
      rest->size -= size;
      pool.free.insert(rest);
      c.blocks.insert(block);
      if (rest->expandable == nullptr) {
        if (was_split)
          count(c.stats.inactive_split_bytes, *block, -static_cast<int64_t>(size));
        else {
          count(c.stats.inactive_split_bytes, *rest, static_cast<int64_t>(rest->size));
          count(c.stats.inactive_split, *rest, 1);
        }
      }
    } else if (was_split && block->expandable == nullptr) {
      count(c.stats.inactive_split_bytes, *block, -static_cast<int64_t>(block->size));
      count(c.stats.inactive_split, *block, -1);
    }
    block->allocated = true;
    block->requested = requested;
    count(c.stats.allocation, *block, 1);
    count(c.stats.allocated_bytes, *block, static_cast<int64_t>(block->size));
    count(c.stats.active, *block, 1);
    count(c.stats.active_bytes, *block, static_cast<int64_t>(block->size));
    count(c.stats.requested_bytes, *block, static_cast<int64_t>(requested));
    return block;
  }

  size_t try_merge(Card& c, DeviceBlock* into, DeviceBlock* other) {
    if (other == nullptr || other->allocated || other->events > 0 || !other->stream_uses.empty() || into->mapped != other->mapped)
      return 0;
    if (into->previous == other) {
      into->pointer = other->pointer;
      into->previous = other->previous;
      if (into->previous != nullptr) into->previous->next = into;
    } else {
      into->next = other->next;
      if (into->next != nullptr) into->next->previous = into;
    }
    const size_t size = other->size;
    (other->mapped ? into->pool->free : into->pool->unmapped).erase(other);
    into->size += size;
    c.blocks.erase(other);
    delete other;
    return size;
  }

  void free_block(Card& c, DeviceBlock* block) {
    auto& pool = *block->pool;
    const size_t size = block->size;
    int64_t split_blocks = 0, split_bytes = 0;
    for (auto* neighbour : {block->previous, block->next}) {
      const size_t merged = try_merge(c, block, neighbour);
      if (merged > 0) {
        split_blocks -= 1;
        split_bytes -= static_cast<int64_t>(merged);
      }
    }
    pool.free.insert(block);
    if (block->is_split()) {
      split_blocks += 1;
      split_bytes += static_cast<int64_t>(block->size);
    }
    if (block->expandable == nullptr) {
      count(c.stats.inactive_split, *block, split_blocks);
      count(c.stats.inactive_split_bytes, *block, split_bytes);
    }
    count(c.stats.active, *block, -1);
    count(c.stats.active_bytes, *block, -static_cast<int64_t>(size));
  }

  void process_events(Card& c) {
    for (auto it = c.events.begin(); it != c.events.end();) {
      if (!query(it->first)) break;
      auto* block = it->second;
      it = c.events.erase(it);
      if (--block->events == 0) free_block(c, block);
    }
  }

  void finish_events(Card& c) {
    ++c.stats.num_sync_all_streams;
    auto events = std::move(c.events);
    c.events.clear();
    for (auto& [event, block] : events) {
      wait_on_host(event);
      if (--block->events == 0) free_block(c, block);
    }
  }

  void release_cached(int device) {
    auto& c = card(device);
    synchronize_device(device);
    finish_events(c);
    for (auto* pool : {&c.large, &c.small}) {
      std::vector<DeviceBlock*> all(pool->free.begin(), pool->free.end());
      for (auto* block : all) {
        if (block->expandable != nullptr)
          unmap(c, block);
        else if (!block->is_split())
          release(c, block);
      }
    }
  }

  void release(Card& c, DeviceBlock* block) {
    auto begin = reinterpret_cast<uintptr_t>(block->pointer);
    forget({begin, begin + block->size});
    munmap(block->pointer, block->size);
    owners_.erase(begin);
    return_bytes(c, block->device, block->size);
    count(c.stats.segment, *block, -1);
    count(c.stats.reserved_bytes, *block, -static_cast<int64_t>(block->size));
    ++c.stats.num_device_free;
    block->pool->free.erase(block);
    c.blocks.erase(block);
    delete block;
  }

  void unmap(Card& c, DeviceBlock* block) {
    const auto& segment = *block->expandable;
    const size_t from = round_up(static_cast<size_t>(block->pointer - segment.base), segment.granularity);
    const size_t to = static_cast<size_t>(block->pointer - segment.base + block->size) / segment.granularity * segment.granularity;
    if (to <= from) return;
    auto& pool = *block->pool;
    char* begin = segment.base + from;
    const size_t bytes = to - from;
    pool.free.erase(block);
    auto part = [&](char* pointer, size_t size, bool mapped) {
      auto* piece = new DeviceBlock{block->device, block->stream, size, 0, &pool, pointer};
      piece->mapped = mapped;
      piece->expandable = block->expandable;
      c.blocks.insert(piece);
      return piece;
    };
    const size_t before = static_cast<size_t>(begin - block->pointer);
    const size_t after = block->size - before - bytes;
    if (before > 0) {
      auto* piece = part(block->pointer, before, true);
      piece->previous = block->previous;
      if (piece->previous != nullptr) piece->previous->next = piece;
      piece->next = block;
      block->previous = piece;
      pool.free.insert(piece);
    }
    if (after > 0) {
      auto* piece = part(begin + bytes, after, true);
      piece->next = block->next;
      if (piece->next != nullptr) piece->next->previous = piece;
      piece->previous = block;
      block->next = piece;
      pool.free.insert(piece);
    }
    block->pointer = begin;
    block->size = bytes;
    block->mapped = false;
    auto address = reinterpret_cast<uintptr_t>(begin);
    forget({address, address + bytes});
    madvise(begin, bytes, MADV_DONTNEED);
    return_bytes(c, block->device, bytes);
    count(c.stats.reserved_bytes, *block, -static_cast<int64_t>(bytes));
    if (before == 0 && after == 0) count(c.stats.segment, *block, -1);
    ++c.stats.num_device_free;
    try_merge(c, block, block->previous);
    try_merge(c, block, block->next);
    pool.unmapped.insert(block);
  }

  [[noreturn]] void out_of_memory(Card& c, int device, size_t wanted) {
    const auto allocated = static_cast<size_t>(c.stats.allocated_bytes[0].current);
    const auto reserved = static_cast<size_t>(c.stats.reserved_bytes[0].current);
    std::string allowed;
    if (c.limit != SIZE_MAX) allowed = human(c.limit) + " allowed; ";
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", human(wanted), ". GPU ", device,
        " has a total capacity of ", human(c.memory.total), " of which ", human(free_of(c, device)),
        " is free. Including non-PyTorch memory, this process has ", human(c.reserved + c.memory.used), " memory in use. ", allowed,
        "Of the allocated memory ", human(allocated), " is allocated by PyTorch, and ", human(reserved - allocated),
        " is reserved by PyTorch but unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation for Memory Management  "
        "(https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf)");
  }

  std::deque<Card> cards_; // pools are pointed at: addresses stay
  std::map<uintptr_t, std::pair<uintptr_t, int>> owners_;
  Shared shared_;
  bool expandable_ = false;
};

CudaAllocator& allocator() {
  static auto* one = new CudaAllocator(); // never destroyed: tensors outlive the end of main
  return *one;
}

void give_back(void* context) {
  if (context != nullptr) allocator().free(static_cast<DeviceBlock*>(context));
}

// Pinned memory: powers of two, kept for the next allocation, as CachingHostAllocator does.
class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, nullptr, &PinnedAllocator::give_back_pinned, c10::Device(c10::kCPU)};
    size_t size = 1;
    while (size < bytes) size *= 2;
    std::lock_guard<std::mutex> lock(mutex_);
    void* pointer = nullptr;
    auto& ready = cache_[size];
    if (!ready.empty()) {
      pointer = ready.back();
      ready.pop_back();
    } else {
      pointer = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      TORCH_CHECK(pointer != MAP_FAILED, "emulated CUDA: no host memory to pin");
      stats_.reserved += static_cast<int64_t>(size);
      stats_.reserved_peak = std::max(stats_.reserved_peak, stats_.reserved);
    }
    stats_.allocated += static_cast<int64_t>(size);
    stats_.allocated_peak = std::max(stats_.allocated_peak, stats_.allocated);
    ++stats_.allocations;
    live_[reinterpret_cast<uintptr_t>(pointer)] = size;
    return {pointer, pointer, &PinnedAllocator::give_back_pinned, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &PinnedAllocator::give_back_pinned; }
  void copy_data(void* to, const void* from, std::size_t count) const override { std::memcpy(to, from, count); }

  bool owns(const void* pointer) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto address = reinterpret_cast<uintptr_t>(pointer);
    auto it = live_.upper_bound(address);
    if (it == live_.begin()) return false;
    --it;
    return address < it->first + it->second;
  }

  HostStats stats() {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }

  void reset_peak() {
    std::lock_guard<std::mutex> lock(mutex_);
    stats_.allocated_peak = stats_.allocated;
    stats_.reserved_peak = stats_.reserved;
  }

  void empty() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& [size, pointers] : cache_)
      for (auto* pointer : pointers) {
        munmap(pointer, size);
        stats_.reserved -= static_cast<int64_t>(size);
      }
    cache_.clear();
  }

 private:
  static void give_back_pinned(void* pointer);

  void free(void* pointer) {
    auto address = reinterpret_cast<uintptr_t>(pointer);
    size_t size = 0;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      size = live_.at(address);
    }
    deliver_overlapping({address, address + size}); // a copy in flight keeps the memory
    std::lock_guard<std::mutex> lock(mutex_);
    live_.erase(address);
    stats_.allocated -= static_cast<int64_t>(size);
    cache_[size].push_back(pointer);
  }

  std::mutex mutex_;
  std::map<uintptr_t, size_t> live_;
  std::map<size_t, std::vector<void*>> cache_;
  HostStats stats_;
};

PinnedAllocator& pinned() {
  static auto* one = new PinnedAllocator();
  return *one;
}

void PinnedAllocator::give_back_pinned(void* pointer) {
  if (pointer != nullptr) pinned().free(pointer);
}

} // namespace

void set_memory(std::vector<DeviceMemory> devices, const std::string& shared_folder) {
  TORCH_CHECK(devices.size() <= kMostDevices, "emulated CUDA: at most ", kMostDevices, " cards");
  allocator().set_memory(std::move(devices), shared_folder);
}
void set_expandable_segments(bool on) { allocator().set_expandable(on); }
void set_memory_fraction(double fraction, int device) { allocator().set_fraction(fraction, device); }
void reset_host_allocator() { pinned().empty(); }
c10::DeviceAllocator* device_allocator() { return &allocator(); }
c10::Allocator* pinned_allocator() { return &pinned(); }
bool is_pinned(const void* pointer) { return pinned().owns(pointer); }
int device_of(const void* pointer) { return allocator().device_of(pointer); }
std::vector<Segment> snapshot() { return allocator().snapshot(); }
HostStats host_stats() { return pinned().stats(); }
void reset_host_peak() { pinned().reset_peak(); }

} // namespace emulated
