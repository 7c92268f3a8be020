// Generators of a card: 16 bytes of state, a seed and an offset, as CUDA's Philox generators have.
#include "generator.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/GeneratorImpl.h>

#include <cstring>
#include <deque>
#include <mutex>

namespace emulated {
namespace {

constexpr uint64_t kStep = 4; // an operation moves the offset by a multiple of four

struct CardGenerator final : c10::GeneratorImpl {
  explicit CardGenerator(int device)
      : GeneratorImpl(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device)), c10::DispatchKeySet(c10::DispatchKey::CUDA)) {}

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }
  void set_offset(uint64_t offset) override { offset_ = offset; }
  uint64_t get_offset() const override { return offset_; }
  uint64_t current_seed() const override { return seed_; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return seed_;
  }
  void set_state(const c10::TensorImpl& state) override {
    at::detail::check_rng_state(state);
    TORCH_CHECK(state.numel() == 16 || state.numel() == 8, "RNG state is wrong size");
    const auto* bytes = static_cast<const char*>(state.data());
    std::memcpy(&seed_, bytes, 8);
    offset_ = 0;
    if (state.numel() == 16) std::memcpy(&offset_, bytes + 8, 8);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::empty({16}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    std::memcpy(state.data_ptr(), &seed_, 8);
    std::memcpy(static_cast<char*>(state.data_ptr()) + 8, &offset_, 8);
    return state.getIntrusivePtr();
  }
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& state) override {
    seed_ = state->current_seed();
    offset_ = state->get_offset();
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    return c10::intrusive_ptr<c10::GeneratorImpl>::reclaim(clone_impl());
  }

  uint64_t next_seed() {
    // SplitMix64 of seed and offset (Steele, Lea and Flood 2014)
    uint64_t z = seed_ + 0x9e3779b97f4a7c15ULL * (offset_ / kStep + 1);
    offset_ += kStep;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  }

 private:
  CardGenerator* clone_impl() const override {
    auto* copy = new CardGenerator(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }
  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

uint64_t draw(const at::Generator& card) {
  auto* impl = static_cast<CardGenerator*>(card.unsafeGetGeneratorImpl());
  std::lock_guard<std::mutex> lock(impl->mutex_);
  return impl->next_seed();
}

} // namespace

at::Generator new_generator(int device) { return at::make_generator<CardGenerator>(device); }

const at::Generator& default_generator(int device) {
  static auto* mutex = new std::mutex();
  static auto* all = new std::deque<at::Generator>();
  std::lock_guard<std::mutex> lock(*mutex);
  while (static_cast<int>(all->size()) <= device) all->push_back(new_generator(static_cast<int>(all->size())));
  return (*all)[device];
}

at::Generator host_generator(const at::Generator& card) {
  return at::make_generator<at::CPUGeneratorImpl>(draw(card));
}

BorrowedGenerator::BorrowedGenerator(int device) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  std::lock_guard<std::mutex> lock(generator.mutex());
  kept_ = generator.get_state();
  generator.unsafeGetGeneratorImpl()->set_current_seed(draw(default_generator(device)));
}

BorrowedGenerator::~BorrowedGenerator() {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.unsafeGetGeneratorImpl()->set_state(*kept_.unsafeGetTensorImpl());
}

} // namespace emulated
