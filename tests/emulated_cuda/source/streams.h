// Streams as vector clocks: operations run at once, and the order that the program asked for is checked.
//
// An operation on a stream gets that stream's next number. A stream's clock holds, for every other stream, the number up to
// which it has waited; the host has such a clock too. Memory remembers who wrote and read it last. An operation that touches
// memory whose last use its stream has not waited for is a race: on a card it may read what is not there yet.
#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace emulated {

// One lock for streams and memory. Whoever holds it never waits for Python's.
class Lock {
 public:
  Lock();

 private:
  static std::recursive_mutex& mutex();
  std::lock_guard<std::recursive_mutex> guard_;
};

using Clock = std::vector<uint64_t>; // by slot: the number of the last operation known to have ended

struct Event {
  Clock clock;
  int slot = -1;           // the stream that it was recorded on
  uint64_t number = 0;     // of that stream's operation
  uint64_t launched = 0;   // operations launched by the process when it was recorded
  int64_t nanoseconds = 0; // of the host's clock, for elapsed time
};

struct Range {
  uintptr_t begin = 0;
  uintptr_t end = 0;
};

enum class OnRace { Raise, Poison, Ignore };

// What is done about a race, and how many operations later an event that nobody waited for is seen as complete.
struct Manner {
  OnRace on_race = OnRace::Raise;
  uint64_t lag = 64;
};
Manner& manner();
std::vector<std::string> races();

// Current device and streams of this thread.
int device_count();
void set_device_count(int count);
int current_device();
void set_current_device(int device);
c10::Stream current_stream(int device);
void set_current_stream(c10::Stream stream);
c10::Stream default_stream(int device);
c10::Stream new_stream(int device, bool high_priority);

int slot_of(c10::Stream stream);

// An operation on a stream: number it, then name what it reads and writes.
class Launch {
 public:
  Launch(c10::Stream stream, const char* name);
  void read(const void* pointer, size_t bytes);
  void write(const void* pointer, size_t bytes);
  // False when a race was found and results have to be spoilt.
  bool ordered() const { return ordered_; }

 private:
  void race(const char* verb, const char* other_verb, int other);
  int slot_;
  uint64_t number_;
  const char* name_;
  bool ordered_ = true;
};

// A copy or a collective whose effect is late: `finish` runs when its memory is touched or its stream is waited for. Returns
// a number for `drop_pending`, once it has been finished otherwise.
uint64_t add_pending(c10::Stream stream, std::vector<Range> ranges, std::function<void()> finish);
void drop_pending(uint64_t number);
// Copies to pinned memory become visible only to whoever waits: `ranges` are of the host, not looked at by kernels.
void add_delivery(c10::Stream stream, Range host, std::function<void()> deliver);
// Before the device reads pinned memory, or the host gives it back.
void deliver_overlapping(Range host);

Event record(c10::Stream stream);
void wait(c10::Stream stream, const Event& event); // cudaStreamWaitEvent
void wait_on_host(const Event& event);             // cudaEventSynchronize
bool query(const Event& event);                    // completes it after the lag
void synchronize_stream(c10::Stream stream);
void synchronize_device(int device);
void forget(Range range); // memory given back to the system: the device was synchronised

} // namespace emulated
