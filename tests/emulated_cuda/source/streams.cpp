#include "streams.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdio>
#include <list>
#include <map>
#include <unordered_map>

namespace emulated {
namespace {

constexpr int kPool = 32;              // streams of one priority on one device, handed out in turn
constexpr int kPerDevice = 1 + 2 * kPool;

struct Use {
  int slot;
  uint64_t number;
};

// The last uses of a range of memory.
struct Uses {
  uintptr_t end = 0;
  Use writer{-1, 0};
  std::vector<Use> readers;
};

struct Pending {
  uint64_t id;
  int slot;
  uint64_t number;
  std::vector<Range> ranges;
  std::function<void()> run;
};

struct State {
  int devices = 1;
  uint64_t launched = 0;
  std::vector<Clock> clocks;       // by slot
  std::vector<uint64_t> seen_host; // by slot: version of the host's clock that it has joined
  Clock host;
  uint64_t host_version = 0;
  std::map<uintptr_t, Uses> memory;
  std::list<Pending> pending;    // of device memory
  std::list<Pending> deliveries; // of pinned memory
  std::vector<std::function<void()>> ended;
  uint64_t pending_ids = 0;
  std::vector<std::string> races;
  std::vector<std::array<int, 2>> next; // by device: the next stream of each priority
};

State& state() {
  static State* one = new State(); // never destroyed: streams are used at exit
  return *one;
}

uint64_t at(const Clock& clock, int slot) {
  return slot < static_cast<int>(clock.size()) ? clock[slot] : 0;
}

void raise_to(Clock& clock, int slot, uint64_t number) {
  if (static_cast<int>(clock.size()) <= slot) clock.resize(slot + 1, 0);
  clock[slot] = std::max(clock[slot], number);
}

void join(Clock& into, const Clock& other) {
  if (into.size() < other.size()) into.resize(other.size(), 0);
  for (size_t i = 0; i < other.size(); ++i) into[i] = std::max(into[i], other[i]);
}

Clock& clock_of(int slot) {
  auto& s = state();
  if (static_cast<int>(s.clocks.size()) <= slot) {
    s.clocks.resize(slot + 1);
    s.seen_host.resize(slot + 1, 0);
  }
  return s.clocks[slot];
}

std::string stream_name(int slot) {
  return "stream " + std::to_string(slot % kPerDevice) + " of cuda:" + std::to_string(slot / kPerDevice);
}

bool overlaps(const Range& a, const Range& b) { return a.begin < b.end && b.begin < a.end; }

// Runs what is due; the closures are destroyed later, with no lock held, since a tensor's end may need Python's lock.
void run_all(std::vector<std::function<void()>>& due) {
  for (auto& run : due) {
    run();
    state().ended.push_back(std::move(run));
  }
}

// What the host has waited for is over when a stream is asked for something after that.
Clock& clock_after_host(int slot) {
  auto& s = state();
  auto& clock = clock_of(slot);
  if (s.seen_host[slot] != s.host_version) {
    join(clock, s.host);
    s.seen_host[slot] = s.host_version;
  }
  return clock;
}

// The host has seen all that `clock` covers: late copies of it arrive.
void host_joins(const Clock& clock) {
  auto& s = state();
  join(s.host, clock);
  ++s.host_version;
  std::vector<std::function<void()>> due;
  for (auto* list : {&s.pending, &s.deliveries})
    for (auto it = list->begin(); it != list->end();)
      if (at(s.host, it->slot) >= it->number) {
        due.push_back(std::move(it->run));
        it = list->erase(it);
      } else {
        ++it;
      }
  run_all(due);
}

void finish_overlapping(std::list<Pending>& list, const Range& range) {
  std::vector<std::function<void()>> due;
  for (auto it = list.begin(); it != list.end();)
    if (std::any_of(it->ranges.begin(), it->ranges.end(), [&](const Range& r) { return overlaps(r, range); })) {
      due.push_back(std::move(it->run));
      it = list.erase(it);
    } else {
      ++it;
    }
  run_all(due);
}

// Cuts the map at `address`, so that a range can be treated as whole nodes.
void cut(std::map<uintptr_t, Uses>& memory, uintptr_t address) {
  auto it = memory.upper_bound(address);
  if (it == memory.begin()) return;
  --it;
  if (it->first < address && address < it->second.end) {
    Uses right = it->second;
    it->second.end = address;
    memory.emplace(address, std::move(right));
  }
}

thread_local int t_device = 0;
thread_local std::vector<c10::StreamId> t_streams;

} // namespace

Lock::Lock() : guard_(mutex()) {}

std::recursive_mutex& Lock::mutex() {
  static auto* one = new std::recursive_mutex();
  return *one;
}

Manner& manner() {
  static Manner one;
  return one;
}

std::vector<std::string> races() {
  Lock lock;
  return state().races;
}

int device_count() { return state().devices; }
void set_device_count(int count) { state().devices = count; }
int current_device() { return t_device; }
void set_current_device(int device) {
  TORCH_CHECK(device >= 0 && device < device_count(), "CUDA error: invalid device ordinal");
  t_device = device;
}

c10::Stream default_stream(int device) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, device), 0);
}

c10::Stream current_stream(int device) {
  c10::StreamId id = device < static_cast<int>(t_streams.size()) ? t_streams[device] : 0;
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, device), id);
}

void set_current_stream(c10::Stream stream) {
  auto device = stream.device_index();
  if (static_cast<int>(t_streams.size()) <= device) t_streams.resize(device + 1, 0);
  t_streams[device] = stream.id();
}

c10::Stream new_stream(int device, bool high_priority) {
  auto& s = state();
  Lock lock;
  if (static_cast<int>(s.next.size()) <= device) s.next.resize(device + 1, {0, 0});
  int index = s.next[device][high_priority]++ % kPool;
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(c10::kCUDA, device), 1 + kPool * high_priority + index);
}

int slot_of(c10::Stream stream) {
  return stream.device_index() * kPerDevice + static_cast<int>(stream.id() % kPerDevice);
}

Launch::Launch(c10::Stream stream, const char* name) : slot_(slot_of(stream)), name_(name) {
  auto& s = state();
  std::vector<std::function<void()>> ended; // destroyed after the lock is let go
  Lock lock;
  ended.swap(s.ended);
  auto& clock = clock_after_host(slot_);
  number_ = at(clock, slot_) + 1;
  raise_to(clock, slot_, number_);
  ++s.launched;
}

void Launch::race(const char* verb, const char* other_verb, int other) {
  std::string text = std::string(name_) + " on " + stream_name(slot_) + " " + verb + " memory that " + stream_name(other) + " " +
      other_verb + ", and has not waited for it";
  auto& s = state();
  if (s.races.size() < 1000) s.races.push_back(text);
  ordered_ = false;
  TORCH_CHECK(manner().on_race != OnRace::Raise, "emulated CUDA: ", text);
}

namespace {

// What is late of a range arrives, and its nodes end where the range does.
Range settle(const void* pointer, size_t bytes) {
  auto& s = state();
  const auto begin = reinterpret_cast<uintptr_t>(pointer);
  const Range range{begin, begin + bytes};
  if (!s.pending.empty()) finish_overlapping(s.pending, range);
  cut(s.memory, range.begin);
  cut(s.memory, range.end);
  return range;
}

} // namespace

void Launch::read(const void* pointer, size_t bytes) {
  if (bytes == 0 || pointer == nullptr) return;
  auto& s = state();
  Lock lock;
  const Range range = settle(pointer, bytes);
  auto& clock = clock_after_host(slot_); // a kernel is launched after its outputs were allocated, which may wait
  int racing = -1;
  for (auto it = s.memory.lower_bound(range.begin); it != s.memory.end() && it->first < range.end; ++it) {
    auto& uses = it->second;
    if (uses.writer.slot >= 0 && uses.writer.slot != slot_ && at(clock, uses.writer.slot) < uses.writer.number)
      racing = uses.writer.slot;
    auto mine = std::find_if(uses.readers.begin(), uses.readers.end(), [&](const Use& u) { return u.slot == slot_; });
    if (mine == uses.readers.end())
      uses.readers.push_back({slot_, number_});
    else
      mine->number = number_;
  }
  if (racing >= 0 && manner().on_race != OnRace::Ignore) race("reads", "writes", racing);
}

void Launch::write(const void* pointer, size_t bytes) {
  if (bytes == 0 || pointer == nullptr) return;
  auto& s = state();
  Lock lock;
  const Range range = settle(pointer, bytes);
  auto& clock = clock_after_host(slot_); // a kernel is launched after its outputs were allocated, which may wait
  int racing = -1;
  const char* verb = "writes";
  auto it = s.memory.lower_bound(range.begin);
  while (it != s.memory.end() && it->first < range.end) {
    auto& uses = it->second;
    if (uses.writer.slot >= 0 && uses.writer.slot != slot_ && at(clock, uses.writer.slot) < uses.writer.number)
      racing = uses.writer.slot;
    for (const auto& reader : uses.readers)
      if (reader.slot != slot_ && at(clock, reader.slot) < reader.number) {
        racing = reader.slot;
        verb = "reads";
      }
    it = s.memory.erase(it);
  }
  Uses uses;
  uses.end = range.end;
  uses.writer = {slot_, number_};
  s.memory.emplace(range.begin, std::move(uses));
  if (racing >= 0 && manner().on_race != OnRace::Ignore) race("writes", verb, racing);
}

uint64_t add_pending(c10::Stream stream, std::vector<Range> ranges, std::function<void()> finish) {
  auto& s = state();
  Lock lock;
  int slot = slot_of(stream);
  s.pending.push_back({++s.pending_ids, slot, at(clock_of(slot), slot), std::move(ranges), std::move(finish)});
  return s.pending_ids;
}

void drop_pending(uint64_t number) {
  auto& s = state();
  Lock lock;
  auto it = std::find_if(s.pending.begin(), s.pending.end(), [&](const Pending& p) { return p.id == number; });
  if (it == s.pending.end()) return;
  s.ended.push_back(std::move(it->run));
  s.pending.erase(it);
}

void add_delivery(c10::Stream stream, Range host, std::function<void()> deliver) {
  auto& s = state();
  Lock lock;
  int slot = slot_of(stream);
  s.deliveries.push_back({0, slot, at(clock_of(slot), slot), {host}, std::move(deliver)});
}

void deliver_overlapping(Range host) {
  auto& s = state();
  Lock lock;
  finish_overlapping(s.deliveries, host);
  finish_overlapping(s.pending, host);
}

Event record(c10::Stream stream) {
  auto& s = state();
  Lock lock;
  Event event;
  event.slot = slot_of(stream);
  event.clock = clock_of(event.slot);
  if (s.seen_host[event.slot] != s.host_version) join(event.clock, s.host);
  event.number = at(event.clock, event.slot);
  event.launched = s.launched;
  event.nanoseconds =
      std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
  return event;
}

void wait(c10::Stream stream, const Event& event) {
  auto& s = state();
  Lock lock;
  join(clock_of(slot_of(stream)), event.clock);
}

void wait_on_host(const Event& event) {
  Lock lock;
  host_joins(event.clock);
}

bool query(const Event& event) {
  auto& s = state();
  Lock lock;
  if (event.slot < 0 || at(s.host, event.slot) >= event.number) return true;
  if (s.launched >= event.launched + manner().lag) {
    host_joins(event.clock);
    return true;
  }
  ++s.launched; // whoever polls gets there
  return false;
}

void synchronize_stream(c10::Stream stream) {
  Lock lock;
  Clock clock = clock_of(slot_of(stream));
  host_joins(clock);
}

void synchronize_device(int device) {
  auto& s = state();
  Lock lock;
  Clock all;
  for (int slot = device * kPerDevice; slot < (device + 1) * kPerDevice && slot < static_cast<int>(s.clocks.size()); ++slot)
    join(all, s.clocks[slot]);
  host_joins(all);
}

void forget(Range range) {
  auto& s = state();
  Lock lock;
  finish_overlapping(s.pending, range);
  cut(s.memory, range.begin);
  cut(s.memory, range.end);
  s.memory.erase(s.memory.lower_bound(range.begin), s.memory.lower_bound(range.end));
}

} // namespace emulated
