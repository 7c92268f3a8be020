// Matrix products of 16-bit numbers whose sums are given out wider: only CUDA has them, so the CPU's kernels take wider inputs.
#include "kernels.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

namespace emulated {
namespace {

// Runs `product` over host views and writes into `out`, which has the wider type.
template <typename Product>
at::Tensor& wide_into(at::Tensor& out, const char* name, std::initializer_list<at::Tensor> inputs, const Product& product) {
  c10::DeviceGuard guard(out.device());
  Launch launch(current_stream(out.get_device()), name);
  std::vector<at::Tensor> hosts;
  for (const auto& input : inputs) {
    read(launch, input);
    hosts.push_back(host_view(input).to(out.scalar_type()));
  }
  write(launch, out);
  auto host = host_view(out);
  host.copy_(product(hosts));
  return out;
}

at::Tensor& mm_into(const at::Tensor& a, const at::Tensor& b, at::ScalarType, at::Tensor& out) {
  return wide_into(out, "aten::mm", {a, b}, [](auto& t) { return at::mm(t[0], t[1]); });
}
at::Tensor mm_wide(const at::Tensor& a, const at::Tensor& b, at::ScalarType dtype) {
  auto out = at::empty({a.size(0), b.size(1)}, a.options().dtype(dtype));
  return mm_into(a, b, dtype, out);
}

at::Tensor& bmm_into(const at::Tensor& a, const at::Tensor& b, at::ScalarType, at::Tensor& out) {
  return wide_into(out, "aten::bmm", {a, b}, [](auto& t) { return at::bmm(t[0], t[1]); });
}
at::Tensor bmm_wide(const at::Tensor& a, const at::Tensor& b, at::ScalarType dtype) {
  auto out = at::empty({a.size(0), a.size(1), b.size(2)}, a.options().dtype(dtype));
  return bmm_into(a, b, dtype, out);
}

at::Tensor& addmm_into(
    const at::Tensor& self, const at::Tensor& a, const at::Tensor& b, at::ScalarType, const at::Scalar& beta, const at::Scalar& alpha,
    at::Tensor& out) {
  return wide_into(out, "aten::addmm", {self, a, b}, [&](auto& t) { return at::addmm(t[0], t[1], t[2], beta, alpha); });
}
at::Tensor addmm_wide(
    const at::Tensor& self, const at::Tensor& a, const at::Tensor& b, at::ScalarType dtype, const at::Scalar& beta,
    const at::Scalar& alpha) {
  auto out = at::empty({a.size(0), b.size(1)}, a.options().dtype(dtype));
  return addmm_into(self, a, b, dtype, beta, alpha, out);
}

at::Tensor& baddbmm_into(
    const at::Tensor& self, const at::Tensor& a, const at::Tensor& b, at::ScalarType, const at::Scalar& beta, const at::Scalar& alpha,
    at::Tensor& out) {
  return wide_into(out, "aten::baddbmm", {self, a, b}, [&](auto& t) { return at::baddbmm(t[0], t[1], t[2], beta, alpha); });
}
at::Tensor baddbmm_wide(
    const at::Tensor& self, const at::Tensor& a, const at::Tensor& b, at::ScalarType dtype, const at::Scalar& beta,
    const at::Scalar& alpha) {
  auto out = at::empty({a.size(0), a.size(1), b.size(2)}, a.options().dtype(dtype));
  return baddbmm_into(self, a, b, dtype, beta, alpha, out);
}

} // namespace

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("mm.dtype", mm_wide);
  m.impl("mm.dtype_out", mm_into);
  m.impl("bmm.dtype", bmm_wide);
  m.impl("bmm.dtype_out", bmm_into);
  m.impl("addmm.dtype", addmm_wide);
  m.impl("addmm.dtype_out", addmm_into);
  m.impl("baddbmm.dtype", baddbmm_wide);
  m.impl("baddbmm.dtype_out", baddbmm_into);
}

} // namespace emulated
