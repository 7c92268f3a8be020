#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace emulated {

const at::Generator& default_generator(int device);
at::Generator new_generator(int device);
// A generator of the CPU for the next random operation of `card`, whose offset moves on.
at::Generator host_generator(const at::Generator& card);

// The CPU's default generator, seeded for one operation of a card and put back as it was.
class BorrowedGenerator {
 public:
  explicit BorrowedGenerator(int device);
  ~BorrowedGenerator();

 private:
  at::Tensor kept_;
};

} // namespace emulated
