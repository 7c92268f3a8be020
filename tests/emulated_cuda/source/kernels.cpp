// Kernels of the CUDA key: memory and copies here, all else by the CPU's kernel on the same memory.
#include "kernels.h"
#include "allocator.h"
#include "generator.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <torch/library.h>

#include <cmath>
#include <cstring>
#include <unordered_set>

namespace emulated {

at::Tensor host_view(const at::Tensor& tensor) {
  auto* impl = tensor.unsafeGetTensorImpl();
  const auto& storage = impl->storage();
  c10::Storage host(
      c10::Storage::use_byte_size_t(), storage.nbytes(),
      c10::DataPtr(const_cast<void*>(storage.data()), c10::Device(c10::kCPU)), c10::GetAllocator(c10::kCPU), true);
  auto view = at::detail::make_tensor<at::TensorImpl>(
      std::move(host), c10::DispatchKeySet(c10::DispatchKey::CPU), impl->dtype());
  auto* made = view.unsafeGetTensorImpl();
  made->set_storage_offset(impl->storage_offset());
  made->set_sizes_and_strides(impl->sizes(), impl->strides());
  if (tensor.is_conj()) view._set_conj(true);
  if (tensor.is_neg()) view._set_neg(true);
  return view;
}

Range span(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  size_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += static_cast<size_t>((tensor.size(i) - 1) * tensor.stride(i));
  return {begin, begin + (last + 1) * tensor.itemsize()};
}

void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  c10::Device device = storage->device();
  c10::DeviceGuard guard(device);
  c10::DataPtr fresh = device_allocator()->allocate(bytes);
  const size_t kept = std::min(bytes, storage->nbytes());
  if (kept > 0 && storage->data() != nullptr) {
    Launch launch(current_stream(device.index()), "storage.resize_");
    launch.read(storage->data(), kept);
    launch.write(fresh.get(), kept);
    std::memcpy(fresh.get(), storage->data(), kept);
  }
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(bytes);
}

namespace {

void spoil(const at::Tensor& host) {
  if (host.numel() == 0) return;
  auto copy = host;
  if (at::isFloatingType(host.scalar_type()) || at::isComplexType(host.scalar_type()))
    copy.fill_(std::numeric_limits<double>::quiet_NaN());
}

// A tensor of the card with what a CPU kernel made.
at::Tensor to_card(const at::Tensor& host, int device, Launch& launch) {
  if (!host.defined()) return host;
  c10::DeviceGuard guard(c10::Device(c10::kCUDA, device));
  auto made = at::empty_strided(host.sizes(), host.strides(), host.options().device(c10::Device(c10::kCUDA, device)));
  write(launch, made);
  Range range = span(made);
  if (range.end > range.begin) std::memcpy(reinterpret_cast<void*>(range.begin), host.const_data_ptr(), range.end - range.begin);
  if (!launch.ordered()) spoil(host_view(made));
  return made;
}

// -- what a fallback may and may not mix --

// Operators whose small arguments may be on the CPU.
bool takes_host_indices(const std::string& name) {
  static const std::unordered_set<std::string> names = {
      "aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::_unsafe_index", "aten::_unsafe_index_put", "aten::index_put",
      "aten::_fused_adam_", "aten::_fused_adamw_", "aten::_fused_sgd_", "aten::_amp_foreach_non_finite_check_and_unscale_"};
  return names.count(name) > 0;
}

// Operators whose result's size depends on the data, or whose result is a number: the host waits.
bool makes_the_host_wait(const std::string& name) {
  static const std::unordered_set<std::string> names = {
      "aten::nonzero", "aten::masked_select", "aten::_unique", "aten::_unique2", "aten::unique_dim",
      "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::repeat_interleave", "aten::equal",
      "aten::_local_scalar_dense", "aten::bincount", "aten::histc", "aten::is_set_to"};
  return names.count(name) > 0;
}

struct Arguments {
  int device = -1;
  std::vector<at::Tensor> cards; // tensors of the card, as they came
  std::vector<at::Tensor> hosts; // their views
  std::vector<bool> written;
};

class Fallback {
 public:
  Fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) : op_(op), stack_(stack), schema_(op.schema()) {}

  void run() {
    const size_t count = schema_.arguments().size();
    const size_t first = stack_->size() - count;
    std::vector<c10::IValue> original(stack_->begin() + static_cast<std::ptrdiff_t>(first), stack_->end());
    for (size_t i = 0; i < count; ++i) find_device(original[i]);
    TORCH_CHECK(a_.device >= 0, "emulated CUDA: no card among the arguments of ", schema_.name());
    c10::DeviceGuard guard(c10::Device(c10::kCUDA, a_.device));
    Launch launch(current_stream(a_.device), schema_.name().c_str());
    for (size_t i = 0; i < count; ++i) {
      const auto* alias = schema_.arguments()[i].alias_info();
      (*stack_)[first + i] = convert(original[i], alias != nullptr && alias->isWrite());
    }
    for (size_t i = 0; i < a_.cards.size(); ++i)
      if (a_.written[i])
        write(launch, a_.cards[i]);
      else
        read(launch, a_.cards[i]);
    const bool random = op_.hasTag(at::Tag::nondeterministic_seeded) && !has_generator_;
    {
      at::AutoDispatchBelowADInplaceOrView below;
      std::optional<BorrowedGenerator> borrowed;
      if (random) borrowed.emplace(a_.device);
      const auto narrow = widen_product(first);
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
      if (narrow.defined()) {
        const auto wide = stack_->back().toTensor();
        stack_->back() = narrow.resize_(wide.sizes()).copy_(wide);
      }
    }
    for (size_t i = 0; i < a_.cards.size(); ++i)
      if (a_.written[i]) follow_resize(a_.cards[i], a_.hosts[i], launch);
    results(original, launch);
    if (makes_the_host_wait(schema_.name())) synchronize_stream(current_stream(a_.device));
  }

 private:
  void consider(const at::Tensor& tensor) {
    if (tensor.defined() && tensor.is_cuda() && a_.device < 0) a_.device = tensor.get_device();
  }

  // Products of 16-bit numbers are summed in fp32, as on a card; a CPU without 16-bit units takes 100 times as long else.
  // Returns where the narrow result belongs. Torch makes `mm` and the others of their forms with `out`.
  at::Tensor widen_product(size_t first) {
    static const std::unordered_set<std::string> products{"aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"};
    const auto type = a_.hosts.front().scalar_type();
    if (products.count(schema_.name()) == 0 || schema_.overload_name() != "out") return {};
    if (type != at::kBFloat16 && type != at::kHalf) return {};
    auto narrow = stack_->back().toTensor();
    for (size_t i = first; i + 1 < stack_->size(); ++i)
      if ((*stack_)[i].isTensor()) (*stack_)[i] = (*stack_)[i].toTensor().to(at::kFloat);
    stack_->back() = at::empty(narrow.sizes(), at::kFloat);
    return narrow;
  }

  void find_device(const c10::IValue& value) {
    if (value.isTensor()) consider(value.toTensor());
    else if (value.isTensorList())
      for (const auto& tensor : value.toTensorVector()) consider(tensor);
    else if (value.isOptionalTensorList())
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
        if (tensor.has_value()) consider(*tensor);
    if (value.isDevice() && value.toDevice().is_cuda() && a_.device < 0)
      a_.device = value.toDevice().has_index() ? value.toDevice().index() : current_device();
  }

  at::Tensor converted(const at::Tensor& tensor, bool written) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      TORCH_CHECK(
          !tensor.device().is_cpu() || tensor.dim() == 0 || tensor.numel() == 0 || takes_host_indices(schema_.name()),
          "Expected all tensors to be on the same device, but found at least two devices, cuda:", a_.device, " and ",
          tensor.device().str(), "! (when checking argument in method ", schema_.name(), ")");
      if (tensor.device().is_cpu() && is_pinned(tensor.const_data_ptr())) {
        Range range = span(tensor);
        deliver_overlapping(range);
      }
      return tensor;
    }
    TORCH_CHECK(
        tensor.get_device() == a_.device, "Expected all tensors to be on the same device, but found at least two devices, cuda:",
        a_.device, " and cuda:", tensor.get_device(), "! (when checking argument in method ", schema_.name(), ")");
    TORCH_CHECK(
        tensor.layout() == at::kStrided, "emulated CUDA: ", schema_.name(), " of a tensor of layout ", tensor.layout());
    a_.cards.push_back(tensor);
    a_.hosts.push_back(host_view(tensor));
    a_.written.push_back(written);
    return a_.hosts.back();
  }

  c10::IValue convert(const c10::IValue& value, bool written) {
    if (value.isTensor()) return converted(value.toTensor(), written);
    if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const auto& tensor : value.toTensorVector()) list.push_back(converted(tensor, written));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> list;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList())
        list.push_back(tensor.has_value() ? std::optional<at::Tensor>(converted(*tensor, written)) : std::nullopt);
      return list;
    }
    if (value.isDevice() && value.toDevice().is_cuda()) return c10::Device(c10::kCPU);
    if (value.isGenerator() && value.toGenerator().device().is_cuda()) {
      has_generator_ = true;
      return host_generator(value.toGenerator());
    }
    return value;
  }

  // A kernel that resized its output left the old memory of the card behind.
  void follow_resize(at::Tensor& card, const at::Tensor& host, Launch& launch) {
    if (!launch.ordered()) spoil(host);
    const bool moved = host.storage().data() != card.storage().data();
    if (!moved && host.sizes() == card.sizes() && host.strides() == card.strides()) return;
    card.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
    if (moved) {
      const size_t bytes = host.storage().nbytes();
      if (card.storage().nbytes() < bytes) resize_storage(card.storage().unsafeGetStorageImpl(), bytes);
      launch.write(card.storage().data(), bytes);
      std::memcpy(card.storage().mutable_data(), host.storage().data(), bytes);
    }
  }

  at::Tensor result(const at::Tensor& host, Launch& launch) {
    if (!host.defined() || !host.device().is_cpu()) return host;
    for (size_t i = 0; i < a_.hosts.size(); ++i) {
      if (host.is_same(a_.hosts[i])) return a_.cards[i];
      if (host.storage().data() == nullptr || host.storage().data() != a_.cards[i].storage().data()) continue;
      auto view = at::detail::make_tensor<at::TensorImpl>(
          c10::TensorImpl::VIEW, c10::Storage(a_.cards[i].storage()), a_.cards[i].key_set(), host.dtype());
      view.unsafeGetTensorImpl()->set_storage_offset(host.storage_offset());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides());
      return view;
    }
    return to_card(host, a_.device, launch);
  }

  void results(const std::vector<c10::IValue>& original, Launch& launch) {
    const size_t count = schema_.returns().size();
    const size_t first = stack_->size() - count;
    for (size_t i = 0; i < count; ++i) {
      auto& value = (*stack_)[first + i];
      const auto* alias = schema_.returns()[i].alias_info();
      if (alias != nullptr && alias->isWrite()) {
        for (size_t j = 0; j < original.size(); ++j) {
          const auto* other = schema_.arguments()[j].alias_info();
          if (other != nullptr && other->isWrite() && other->beforeSets() == alias->beforeSets()) value = original[j];
        }
        continue;
      }
      if (value.isTensor())
        value = result(value.toTensor(), launch);
      else if (value.isTensorList()) {
        c10::List<at::Tensor> list;
        for (const auto& tensor : value.toTensorVector()) list.push_back(result(tensor, launch));
        value = list;
      }
    }
  }

  const c10::OperatorHandle& op_;
  torch::jit::Stack* stack_;
  const c10::FunctionSchema& schema_;
  Arguments a_;
  bool has_generator_ = false;
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { Fallback(op, stack).run(); }

// -- memory --

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::CUDA);

c10::Device card_of(std::optional<c10::Device> device) {
  if (!device.has_value() || !device->has_index()) return c10::Device(c10::kCUDA, current_device());
  TORCH_CHECK(device->index() < device_count(), "CUDA error: invalid device ordinal");
  return *device;
}

at::Tensor empty(
    at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
    std::optional<bool> pin_memory, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(card_of(device));
  return at::detail::empty_generic(size, device_allocator(), kKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
    std::optional<at::Device> device, std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(card_of(device));
  return at::detail::empty_strided_generic(size, stride, device_allocator(), kKeys, c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  c10::DeviceGuard guard(self.device());
  impl->set_sizes_contiguous(size);
  if (format.has_value() && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  const size_t bytes = at::detail::computeStorageNbytes(impl->sizes(), impl->strides(), impl->itemsize(), impl->storage_offset());
  if (impl->storage().nbytes() < bytes) resize_storage(impl->storage().unsafeGetStorageImpl(), bytes);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  at::native::checkSetStorage(self, source, offset, size, stride, /*check_offset_in_bounds=*/false);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  if (stride.data() != nullptr)
    impl->set_sizes_and_strides(size, stride);
  else
    impl->set_sizes_contiguous(size);
  const size_t bytes = at::detail::computeStorageNbytes(impl->sizes(), impl->strides(), impl->itemsize(), offset);
  if (impl->numel() > 0 && impl->storage().nbytes() < bytes) resize_storage(impl->storage().unsafeGetStorageImpl(), bytes);
  return self;
}

at::Tensor& set_source(at::Tensor& self, at::Storage source) {
  auto elements = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage(self, std::move(source), 0, elements, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  c10::DeviceGuard guard(self.device());
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0), device_allocator(), true);
  return set_storage(self, std::move(storage), 0, {0}, {});
}

at::Tensor view(const at::Tensor& self, at::IntArrayRef size) { return at::native::view(self, size); }
at::Tensor as_strided(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}
at::Tensor reshape_alias(const at::Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}
at::Tensor unfold(const at::Tensor& self, int64_t dimension, int64_t size, int64_t step) {
  return at::native::unfold(self, dimension, size, step);
}

// -- copies --

void poison_bytes(const at::Tensor& host) {
  Range range = span(host);
  if (range.end > range.begin && host.is_non_overlapping_and_dense())
    std::memset(reinterpret_cast<void*>(range.begin), 0xff, range.end - range.begin);
}

void host_copy(const at::Tensor& to, const at::Tensor& from) {
  at::AutoDispatchBelowADInplaceOrView below;
  at::Tensor target = to;
  c10::InferenceMode mode(false);
  at::native::copy_(target, from, false);
}

void card_to_card(at::Tensor& self, const at::Tensor& src) {
  const int to = self.get_device(), from = src.get_device();
  auto stream = current_stream(from);
  if (to != from) wait(stream, record(current_stream(to)));
  {
    Launch launch(stream, "aten::copy_");
    read(launch, src);
    write(launch, self);
    auto host = host_view(self);
    host_copy(host, host_view(src));
    if (!launch.ordered()) spoil(host);
  }
  if (to != from) wait(current_stream(to), record(stream));
}

void card_to_host(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  auto stream = current_stream(src.get_device());
  const bool late = non_blocking && is_pinned(self.const_data_ptr()) && self.is_non_overlapping_and_dense();
  Range host = span(self);
  deliver_overlapping(host);
  {
    Launch launch(stream, "aten::copy_");
    read(launch, src);
    if (!launch.ordered()) {
      spoil(self);
      return;
    }
  }
  if (!late) {
    host_copy(self, host_view(src));
    synchronize_stream(stream);
    return;
  }
  auto content = at::empty_strided(self.sizes(), self.strides(), self.options().pinned_memory(false));
  host_copy(content, host_view(src));
  poison_bytes(self);
  add_delivery(stream, host, [host, content] {
    std::memcpy(reinterpret_cast<void*>(host.begin), content.const_data_ptr(), host.end - host.begin);
  });
}

void host_to_card(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  auto stream = current_stream(self.get_device());
  Range range = span(src);
  const bool pinned = is_pinned(src.const_data_ptr());
  if (pinned) deliver_overlapping(range);
  {
    Launch launch(stream, "aten::copy_");
    write(launch, self);
    if (!launch.ordered()) {
      spoil(host_view(self));
      return;
    }
  }
  if (!(non_blocking && pinned)) {
    host_copy(host_view(self), src);
    synchronize_stream(stream);
    return;
  }
  // The copy reads the host's memory late: it is to be left alone until then.
  auto source = at::from_blob(const_cast<void*>(src.const_data_ptr()), src.sizes(), src.strides(), src.options().pinned_memory(false));
  at::Tensor target = host_view(self);
  c10::Storage kept = self.storage();
  add_pending(stream, {span(self), range}, [target, source, kept] { host_copy(target, source); });
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& src, bool non_blocking) {
  if (self.is_same(src) || self.numel() == 0) return self;
  if (!self.is_cuda() && !self.is_cpu()) TORCH_CHECK(false, "emulated CUDA: copy to ", self.device());
  at::Tensor from = src;
  if (from.is_meta()) TORCH_CHECK(false, "Cannot copy out of meta tensor; no data!");
  if (from.sizes() != self.sizes()) from = from.expand_as(self);
  if (self.is_cuda() && from.is_cuda())
    card_to_card(self, from);
  else if (self.is_cuda())
    host_to_card(self, from, non_blocking);
  else
    card_to_host(self, from, non_blocking);
  return self;
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  auto stream = current_stream(self.get_device());
  Launch launch(stream, "aten::_local_scalar_dense");
  read(launch, self);
  synchronize_stream(stream);
  return at::_local_scalar_dense(host_view(self));
}

// CUDA counts integers too, the CPU does not.
at::Tensor histc(const at::Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  Launch launch(current_stream(self.get_device()), "aten::histc");
  read(launch, self);
  auto host = host_view(self);
  const bool counts_integers = at::isIntegralType(self.scalar_type(), false);
  auto counts = at::histc(counts_integers ? host.to(at::kDouble) : host, bins, min, max).to(self.scalar_type());
  if (min.toDouble() == max.toDouble()) synchronize_stream(current_stream(self.get_device())); // its range is the data's
  return to_card(counts, self.get_device(), launch);
}

void record_stream(at::Tensor& self, c10::Stream stream) { device_allocator()->recordStream(self.storage().data_ptr(), stream); }

// -- attention: the fused kernels' outputs, by the CPU's flash attention --

int64_t choose_attention(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& mask, double, bool,
    std::optional<double>, bool) {
  const auto& context = at::globalContext();
  const bool shaped = query.dim() == 4 && query.size(3) == value.size(3) && query.size(3) <= 256 && query.size(2) > 0;
  if (!shaped || query.scalar_type() == at::kDouble) return 0;
  const bool half = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  if (half && !mask.has_value() && context.userEnabledFlashSDP()) return 1;
  const bool heads = key.size(1) == query.size(1) && value.size(1) == query.size(1);
  if (heads && context.userEnabledMemEfficientSDP() && !(mask.has_value() && mask->requires_grad())) return 2;
  return 0;
}

at::Tensor repeated(const at::Tensor& heads, int64_t times) {
  return times == 1 ? heads : heads.repeat_interleave(times, 1);
}

at::Tensor summed(const at::Tensor& grad, int64_t times) {
  if (times == 1) return grad;
  return grad.view({grad.size(0), grad.size(1) / times, times, grad.size(2), grad.size(3)}).sum(2);
}

int64_t up(int64_t number, int64_t multiple) { return (number + multiple - 1) / multiple * multiple; }

// One call of attention, by views of the host.
struct Attention {
  at::Tensor q, k, v;
  std::optional<at::Tensor> mask;
  bool causal;
  std::optional<double> scale;
  double dropout;
  uint64_t seed;

  Attention(
      const at::Tensor& query, const at::Tensor& key, const at::Tensor& value, const std::optional<at::Tensor>& bias, bool is_causal,
      std::optional<double> by, double share, Launch& launch)
      : causal(is_causal), scale(by), dropout(share), seed(0), times_(query.size(1) / key.size(1)) {
    for (const auto& tensor : {query, key, value}) read(launch, tensor);
    q = host_view(query);
    k = repeated(host_view(key), times_);
    v = repeated(host_view(value), times_);
    if (bias.has_value() && bias->defined()) {
      read(launch, *bias);
      mask = host_view(*bias);
    }
  }

  std::tuple<at::Tensor, at::Tensor> forward() const {
    if (dropout == 0.0) {
      auto [out, lse] =
          at::_scaled_dot_product_flash_attention_for_cpu(wide(q), wide(k), wide(v), 0.0, causal, wide_mask(), scale);
      return {out.to(q.scalar_type()), lse};
    }
    auto [weights, lse] = softmax();
    auto out = at::matmul(weights * kept(), v.to(at::kFloat)).to(q.scalar_type());
    return {out.transpose(1, 2).contiguous().transpose(1, 2), lse};
  }

  std::tuple<at::Tensor, at::Tensor, at::Tensor> backward(const at::Tensor& grad, const at::Tensor& out, const at::Tensor& lse) const {
    if (dropout == 0.0) {
      auto [dq, dk, dv] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
          wide(grad), wide(q), wide(k), wide(v), wide(out), lse, 0.0, causal, wide_mask(), scale);
      auto type = q.scalar_type();
      return {dq.to(type), summed(dk, times_).to(type), summed(dv, times_).to(type)};
    }
    auto weights = std::get<0>(softmax());
    auto drops = kept();
    auto given = wide(grad);
    auto dv = at::matmul((weights * drops).transpose(2, 3), given);
    auto dweights = at::matmul(given, v.to(at::kFloat).transpose(2, 3)) * drops;
    auto dscores = weights * (dweights - (dweights * weights).sum(-1, true)) * factor();
    auto dq = at::matmul(dscores, k.to(at::kFloat)), dk = at::matmul(dscores.transpose(2, 3), q.to(at::kFloat));
    auto narrow = [&](const at::Tensor& wider) { return wider.to(q.scalar_type()).transpose(1, 2).contiguous().transpose(1, 2); };
    return {narrow(dq), narrow(summed(dk, times_)), narrow(summed(dv, times_))};
  }

  int64_t times() const { return times_; }

 private:
  // 16-bit numbers are multiplied in fp32, as on a card: a CPU without 16-bit units takes many times as long else.
  static at::Tensor wide(const at::Tensor& tensor) { return at::isReducedFloatingType(tensor.scalar_type()) ? tensor.to(at::kFloat) : tensor; }
  std::optional<at::Tensor> wide_mask() const { return mask.has_value() ? std::optional(wide(*mask)) : std::nullopt; }

  double factor() const { return scale.value_or(1.0 / std::sqrt(static_cast<double>(q.size(3)))); }

  std::tuple<at::Tensor, at::Tensor> softmax() const {
    auto scores = at::matmul(q.to(at::kFloat), k.to(at::kFloat).transpose(2, 3)) * factor();
    if (mask.has_value()) scores = scores + *mask;
    if (causal) {
      auto ahead = at::ones({q.size(2), k.size(2)}, at::TensorOptions().dtype(at::kBool)).triu(1);
      scores = scores.masked_fill(ahead, -std::numeric_limits<float>::infinity());
    }
    return {scores.softmax(-1), scores.logsumexp(-1)};
  }

  // 1 / (1 - dropout) where a weight is kept: the same again for the same seed, as Philox draws it.
  at::Tensor kept() const {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(seed);
    return at::empty({q.size(0), q.size(1), q.size(2), k.size(2)}, at::kFloat).bernoulli_(1 - dropout, generator).div_(1 - dropout);
  }

  int64_t times_;
};

using Stored = std::tuple<at::Tensor, at::Tensor>;

Stored attend(Attention& attention, const at::Tensor& q, int64_t padding, Launch& launch) {
  if (attention.dropout > 0.0) attention.seed = host_generator(default_generator(q.get_device())).current_seed();
  auto [out, lse] = attention.forward();
  auto made = to_card(out, q.get_device(), launch);
  auto sums = at::empty({q.size(0), q.size(1), up(q.size(2), padding)}, q.options().dtype(at::kFloat));
  write(launch, sums);
  host_view(sums).narrow(2, 0, q.size(2)).copy_(lse);
  return {made, sums};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> attend_backward(
    const Attention& attention, const at::Tensor& grad, const at::Tensor& out, const at::Tensor& sums, Launch& launch) {
  for (const auto& tensor : {grad, out, sums}) read(launch, tensor);
  auto lse = host_view(sums).narrow(2, 0, attention.q.size(2)).transpose(1, 2).contiguous().transpose(1, 2);
  auto [dq, dk, dv] = attention.backward(host_view(grad), host_view(out), lse);
  const int device = grad.get_device();
  return {to_card(dq, device, launch), to_card(dk, device, launch), to_card(dv, device, launch)};
}

// What says which weights were dropped: memory of the card that the backward pass reads.
at::Tensor seed_of(const Attention& attention, const at::Tensor& q, at::IntArrayRef size, at::ScalarType dtype, Launch& launch) {
  auto state = at::empty(size, q.options().dtype(dtype));
  write(launch, state);
  std::memcpy(state.mutable_data_ptr(), &attention.seed, sizeof attention.seed);
  return state;
}

uint64_t read_seed(const at::Tensor& state, Launch& launch) {
  if (!state.defined() || state.numel() == 0) return 0;
  uint64_t seed = 0;
  if (state.is_cuda()) read(launch, state);
  std::memcpy(&seed, state.const_data_ptr(), sizeof seed);
  return seed;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, c10::SymInt, c10::SymInt, at::Tensor, at::Tensor, at::Tensor> flash(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, double dropout, bool causal, bool, std::optional<double> scale) {
  c10::DeviceGuard guard(q.device());
  Launch launch(current_stream(q.get_device()), "aten::_scaled_dot_product_flash_attention");
  Attention attention(q, k, v, std::nullopt, causal, scale, dropout, launch);
  auto [out, sums] = attend(attention, q, 1, launch);
  auto state = seed_of(attention, q, {2}, at::kUInt64, launch);
  auto unused = at::empty({}, q.options().dtype(at::kUInt64));
  return {out, sums, at::Tensor(), at::Tensor(), q.sym_size(2), k.sym_size(2), state, unused, at::empty({0}, q.options())};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> flash_backward(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& out,
    const at::Tensor& sums, const at::Tensor&, const at::Tensor&, c10::SymInt, c10::SymInt, double dropout, bool causal,
    const at::Tensor& state, const at::Tensor&, std::optional<double> scale) {
  c10::DeviceGuard guard(q.device());
  Launch launch(current_stream(q.get_device()), "aten::_scaled_dot_product_flash_attention_backward");
  Attention attention(q, k, v, std::nullopt, causal, scale, dropout, launch);
  attention.seed = read_seed(state, launch);
  auto results = attend_backward(attention, grad, out, sums, launch);
  // What mha_bwd allocates beside its results (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp).
  const int64_t width = q.size(3), rows = up(q.size(2), 128);
  std::vector<at::Tensor> copies;
  for (const auto& tensor : {grad, out})
    if (!tensor.transpose(1, 2).is_contiguous()) copies.push_back(at::empty(tensor.sizes(), tensor.options()));
  auto wide = q.options().dtype(at::kFloat);
  std::vector<at::Tensor> scratch{at::empty({q.size(0), q.size(1), rows}, wide), at::empty({q.size(0), q.size(1), rows, up(width, width <= 128 ? 32 : 64)}, wide)};
  if (attention.times() > 1)
    for (int i = 0; i < 2; ++i) scratch.push_back(at::empty({q.size(0), q.size(1), k.size(2), width}, q.options()));
  return results;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> efficient(
    const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const std::optional<at::Tensor>& bias, bool, double dropout,
    bool causal, std::optional<double> scale) {
  c10::DeviceGuard guard(q.device());
  Launch launch(current_stream(q.get_device()), "aten::_scaled_dot_product_efficient_attention");
  Attention attention(q, k, v, bias, causal, scale, dropout, launch);
  auto [out, sums] = attend(attention, q, 32, launch);
  auto seed = seed_of(attention, q, {}, at::kLong, launch);
  return {out, sums, seed, at::empty({}, q.options().dtype(at::kLong))};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> efficient_backward(
    const at::Tensor& grad, const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& bias,
    const at::Tensor& out, const at::Tensor& sums, const at::Tensor& seed, const at::Tensor&, double dropout, std::array<bool, 4>,
    bool causal, std::optional<double> scale) {
  c10::DeviceGuard guard(q.device());
  Launch launch(current_stream(q.get_device()), "aten::_scaled_dot_product_efficient_attention_backward");
  Attention attention(q, k, v, bias, causal, scale, dropout, launch);
  attention.seed = read_seed(seed, launch);
  auto [dq, dk, dv] = attend_backward(attention, grad, out, sums, launch);
  // What _efficient_attention_backward allocates beside its results: of fp32 inputs a product whose rows it sums, then
  // a sum of the queries' gradient (aten/src/ATen/native/transformers/cuda/attention_backward.cu).
  auto wide = q.options().dtype(at::kFloat);
  if (q.scalar_type() == at::kFloat) at::empty(out.sizes(), wide);
  at::empty({q.size(0), q.size(1), up(q.size(2), 64), up(q.size(3), 32)}, wide);
  return {dq, dk, dv, at::Tensor()};
}

} // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_source);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("view", view);
  m.impl("as_strided", as_strided);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("unfold", unfold);
  m.impl("copy_", copy_);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", record_stream);
  m.impl("histc", histc);
  // A card has kernels of these; what torch composes where there are none makes more tensors.
  for (const char* name : {"silu_backward", "mish_backward", "native_layer_norm", "native_group_norm", "addr"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("_scaled_dot_product_flash_attention", flash);
  m.impl("_scaled_dot_product_flash_attention_backward", flash_backward);
  m.impl("_scaled_dot_product_efficient_attention", efficient);
  m.impl("_scaled_dot_product_efficient_attention_backward", efficient_backward);
}

void register_attention() { at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention); }

} // namespace emulated
