#pragma once

#include <ATen/core/Tensor.h>

#include "streams.h"

namespace emulated {

// A CPU tensor over the same memory as `tensor`, which is of a card.
at::Tensor host_view(const at::Tensor& tensor);
// The bytes between a tensor's first and last element.
Range span(const at::Tensor& tensor);
inline void read(Launch& launch, const at::Tensor& tensor) {
  Range range = span(tensor);
  launch.read(reinterpret_cast<void*>(range.begin), range.end - range.begin);
}
inline void write(Launch& launch, const at::Tensor& tensor) {
  Range range = span(tensor);
  launch.write(reinterpret_cast<void*>(range.begin), range.end - range.begin);
}
void resize_storage(c10::StorageImpl* storage, size_t bytes);

} // namespace emulated
