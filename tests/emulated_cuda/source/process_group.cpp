// A process group called nccl: collectives by gloo over host views, ordered by streams as NCCL's are.
#include "kernels.h"
#include "process_group.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>

namespace emulated {
namespace {

using c10d::ReduceOp;
using Tensors = std::vector<at::Tensor>;
using WorkPointer = c10::intrusive_ptr<c10d::Work>;

// One collective in flight.
struct Operation {
  WorkPointer work;            // gloo's
  std::function<void()> after; // on host views, once gloo is done
  std::vector<c10::Storage> storages;
  Tensors outputs;
  Event end;
  uint64_t pending = 0;
  std::mutex mutex;
  bool finished = false;

  void finish() {
    {
      std::lock_guard<std::mutex> lock(mutex);
      if (finished) return;
      finished = true;
      if (work) work->wait();
      if (after) after();
    }
    drop_pending(pending);
  }
};

class NcclWork final : public c10d::Work {
 public:
  NcclWork(std::vector<std::shared_ptr<Operation>> operations, int device, bool host_waits)
      : operations_(std::move(operations)), device_(device), host_waits_(host_waits) {}

  bool isCompleted() override {
    for (auto& operation : operations_)
      if (operation->work && !operation->work->isCompleted()) return false;
    for (auto& operation : operations_)
      if (!query(operation->end)) return false;
    return true;
  }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void synchronize() override {
    for (auto& operation : operations_) {
      operation->finish();
      if (host_waits_)
        wait_on_host(operation->end);
      else
        emulated::wait(current_stream(device_), operation->end);
      operation->storages.clear();
    }
  }
  void blockCurrentStream() override { synchronize(); }
  Tensors result() override {
    Tensors all;
    for (auto& operation : operations_) all.insert(all.end(), operation->outputs.begin(), operation->outputs.end());
    return all;
  }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(
        c10::ListType::create(c10::TensorType::get()),
        std::vector<c10::Device>{c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device_))});
    // Complete on a stream that has waited: whoever takes the value waits for that.
    auto stream = new_stream(device_, false);
    for (auto& operation : operations_) {
      operation->finish();
      emulated::wait(stream, operation->end);
    }
    c10::DeviceGuard device(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device_)));
    c10::StreamGuard guard(stream);
    future->markCompleted(c10::IValue(result()));
    return future;
  }

 private:
  std::vector<std::shared_ptr<Operation>> operations_;
  int device_;
  bool host_waits_;
};

// gloo moves numbers of fewer types than NCCL does.
at::Tensor plain(const at::Tensor& host) {
  if (host.is_complex()) return at::view_as_real(host);
  if (host.scalar_type() == at::kBool) return host.view(at::kByte);
  if (host.element_size() == 1 && at::isFloatingType(host.scalar_type())) return host.view(at::kByte);
  return host;
}

at::Tensor host_of(const at::Tensor& card) { return plain(host_view(card)); }

Tensors hosts_of(const Tensors& cards) {
  Tensors all;
  for (const auto& card : cards) all.push_back(host_of(card));
  return all;
}

ReduceOp without_average(const ReduceOp& op) {
  return op == ReduceOp::AVG || op == ReduceOp::PREMUL_SUM ? ReduceOp(ReduceOp::SUM) : op;
}

double premultiplied(const ReduceOp& op) {
  if (op.op_ != ReduceOp::PREMUL_SUM) return 1.0;
  auto* supplement = dynamic_cast<c10d::PreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK(supplement != nullptr, "PREMUL_SUM without a factor");
  return supplement->tensor_factor.defined() ? host_view(supplement->tensor_factor).item<double>() : supplement->double_factor;
}

Tensors flattened(const std::vector<Tensors>& lists) {
  Tensors all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}

} // namespace

WorkPointer NcclGroup::run(
    const Tensors& read_from, const Tensors& written, bool async, const char* name, const std::function<Started()>& start,
    bool host_waits) {
  TORCH_CHECK(!read_from.empty() || !written.empty(), "No tensors in a collective");
  for (const auto* list : {&read_from, &written})
    for (const auto& tensor : *list) {
      TORCH_CHECK(tensor.is_cuda(), "No backend type associated with device type cpu");
      TORCH_CHECK(tensor.is_non_overlapping_and_dense(), "Tensors must be contiguous");
    }
  const int device = (read_from.empty() ? written : read_from).front().get_device();
  c10::DeviceGuard guard(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device)));
  auto stream = current_stream(device);
  if (async || coalescing_) {
    auto own = stream_of(device);
    emulated::wait(own, emulated::record(stream));
    stream = own;
  }
  ++sequence_;
  auto operation = std::make_shared<Operation>();
  {
    Launch launch(stream, name);
    for (const auto& tensor : read_from) emulated::read(launch, tensor);
    for (const auto& tensor : written) emulated::write(launch, tensor);
  }
  auto started = start();
  operation->work = started.work;
  operation->after = started.after;
  operation->outputs = written;
  std::vector<Range> ranges;
  for (const auto* list : {&read_from, &written})
    for (const auto& tensor : *list) {
      ranges.push_back(span(tensor));
      operation->storages.push_back(tensor.storage());
    }
  operation->end = emulated::record(stream);
  operation->pending = add_pending(stream, std::move(ranges), [operation] {
    // The list of pending work is being walked: it drops this entry itself.
    std::lock_guard<std::mutex> lock(operation->mutex);
    if (operation->finished) return;
    operation->finished = true;
    if (operation->work) operation->work->wait();
    if (operation->after) operation->after();
  });
  if (coalescing_) coalesced_.push_back(operation);
  return c10::make_intrusive<NcclWork>(std::vector<std::shared_ptr<Operation>>{operation}, device, host_waits);
}

c10::Stream NcclGroup::stream_of(int device) {
  auto it = streams_.find(device);
  if (it == streams_.end()) it = streams_.emplace(device, new_stream(device, options_->is_high_priority_stream)).first;
  return it->second;
}

void NcclGroup::startCoalescing() {
  coalescing_ = true;
  coalesced_.clear();
}

WorkPointer NcclGroup::endCoalescing() {
  coalescing_ = false;
  std::vector<std::shared_ptr<Operation>> all;
  for (auto& one : coalesced_) all.push_back(std::static_pointer_cast<Operation>(one));
  coalesced_.clear();
  return c10::make_intrusive<NcclWork>(std::move(all), current_device(), false);
}

WorkPointer NcclGroup::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const bool root = getRank() == opts.rootRank;
  return run(root ? tensors : Tensors{}, root ? Tensors{} : tensors, opts.asyncOp, "nccl:broadcast", [&]() -> Started {
    auto hosts = hosts_of(tensors);
    return {gloo_->broadcast(hosts, opts), nullptr};
  });
}

WorkPointer NcclGroup::reduced(
    const Tensors& tensors, const ReduceOp& op, bool async, const char* name, const std::function<WorkPointer(Tensors&)>& start) {
  return run(tensors, tensors, async, name, [&]() -> Started {
    auto hosts = hosts_of(tensors);
    const double factor = premultiplied(op);
    if (factor != 1.0)
      for (auto& host : hosts) host.mul_(factor);
    auto work = start(hosts);
    if (op != ReduceOp::AVG) return {work, nullptr};
    const int size = getSize();
    return {work, [hosts, size] {
              for (auto host : hosts) host.div_(size);
            }};
  });
}

WorkPointer NcclGroup::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  auto own = opts;
  own.reduceOp = without_average(opts.reduceOp);
  return reduced(tensors, opts.reduceOp, opts.asyncOp, "nccl:all_reduce", [&](Tensors& hosts) -> WorkPointer {
    if (hosts.size() == 1) return gloo_->allreduce(hosts, own);
    for (auto& host : hosts) {
      Tensors one{host};
      gloo_->allreduce(one, own)->wait();
    }
    return nullptr;
  });
}

WorkPointer NcclGroup::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  return allreduce(tensors, opts);
}

WorkPointer NcclGroup::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  auto own = opts;
  own.reduceOp = without_average(opts.reduceOp);
  return reduced(
      tensors, opts.reduceOp, opts.asyncOp, "nccl:reduce", [&](Tensors& hosts) { return gloo_->reduce(hosts, own); });
}

WorkPointer NcclGroup::allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  return run(inputs, flattened(outputs), opts.asyncOp, "nccl:all_gather", [&]() -> Started {
    auto from = hosts_of(inputs);
    // Outputs may differ in size from rank to rank: NCCL broadcasts then, gloo does not.
    bool even = true;
    for (const auto& list : outputs)
      for (const auto& tensor : list) even = even && tensor.sizes() == inputs[0].sizes();
    if (even) {
      std::vector<Tensors> to;
      for (const auto& list : outputs) to.push_back(hosts_of(list));
      return {gloo_->allgather(to, from, opts), nullptr};
    }
    for (int rank = 0; rank < getSize(); ++rank) {
      Tensors one{host_of(outputs[0][rank])};
      if (rank == getRank()) one[0].copy_(from[0]);
      c10d::BroadcastOptions each;
      each.rootRank = rank;
      gloo_->broadcast(one, each)->wait();
    }
    return {nullptr, nullptr};
  });
}

WorkPointer NcclGroup::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
  return run({input}, {output}, opts.asyncOp, "nccl:all_gather_into_tensor", [&]() -> Started {
    // The input is often a part of the output, which gloo writes while it sends.
    auto to = host_of(output), from = host_of(input).clone();
    return {gloo_->_allgather_base(to, from, opts), [from] {}};
  });
}

WorkPointer NcclGroup::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  return run(inputs, outputs, opts.asyncOp, "nccl:all_gather_into_tensor", [&]() -> Started {
    for (size_t i = 0; i < outputs.size(); ++i) {
      auto to = host_of(outputs[i]), from = host_of(inputs[i]).clone();
      gloo_->_allgather_base(to, from, opts)->wait();
    }
    return {nullptr, nullptr};
  });
}

WorkPointer NcclGroup::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
  return run(inputs, flattened(outputs), opts.asyncOp, "nccl:gather", [&]() -> Started {
    auto from = hosts_of(inputs);
    std::vector<Tensors> to;
    for (const auto& list : outputs) to.push_back(hosts_of(list));
    return {gloo_->gather(to, from, opts), nullptr};
  });
}

WorkPointer NcclGroup::scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) {
  return run(flattened(inputs), outputs, opts.asyncOp, "nccl:scatter", [&]() -> Started {
    auto to = hosts_of(outputs);
    std::vector<Tensors> from;
    for (const auto& list : inputs) from.push_back(hosts_of(list));
    return {gloo_->scatter(to, from, opts), nullptr};
  });
}

// The whole is summed, and every rank keeps its part.
Started NcclGroup::scattered(at::Tensor to, const at::Tensor& whole, const c10d::ReduceScatterOptions& opts) {
  auto sum = plain(whole.clone());
  const double factor = premultiplied(opts.reduceOp);
  if (factor != 1.0) sum.mul_(factor);
  c10d::AllreduceOptions own;
  own.reduceOp = without_average(opts.reduceOp);
  Tensors one{sum};
  auto work = gloo_->allreduce(one, own);
  const int size = getSize(), rank = getRank();
  const bool average = opts.reduceOp == ReduceOp::AVG;
  return {work, [to, sum, size, rank, average] {
            auto part = sum.view({-1}).chunk(size)[rank];
            auto target = to;
            if (average) part = part / size;
            target.view({-1}).copy_(part);
          }};
}

WorkPointer NcclGroup::_reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& opts) {
  return run({input}, {output}, opts.asyncOp, "nccl:reduce_scatter_tensor", [&]() -> Started {
    return scattered(host_of(output), host_view(input), opts);
  });
}

WorkPointer NcclGroup::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& opts) {
  return run(flattened(inputs), outputs, opts.asyncOp, "nccl:reduce_scatter", [&]() -> Started {
    Tensors parts;
    for (const auto& tensor : inputs[0]) parts.push_back(host_view(tensor).reshape({-1}));
    return scattered(host_of(outputs[0]), at::cat(parts), opts);
  });
}

WorkPointer NcclGroup::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  return run(inputs, outputs, opts.asyncOp, "nccl:reduce_scatter_tensor", [&]() -> Started {
    for (size_t i = 0; i < outputs.size(); ++i) {
      auto one = scattered(host_of(outputs[i]), host_view(inputs[i]), opts);
      one.work->wait();
      one.after();
    }
    return {nullptr, nullptr};
  });
}

WorkPointer NcclGroup::alltoall_base(
    at::Tensor& output, at::Tensor& input, std::vector<int64_t>& to_sizes, std::vector<int64_t>& from_sizes,
    const c10d::AllToAllOptions& opts) {
  return run({input}, {output}, opts.asyncOp, "nccl:all_to_all", [&]() -> Started {
    auto to = host_of(output), from = host_of(input);
    return {gloo_->alltoall_base(to, from, to_sizes, from_sizes, opts), nullptr};
  });
}

WorkPointer NcclGroup::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  return run(inputs, outputs, opts.asyncOp, "nccl:all_to_all", [&]() -> Started {
    Tensors parts;
    std::vector<int64_t> sent, received;
    int64_t total = 0;
    for (const auto& tensor : inputs) {
      parts.push_back(host_of(tensor).reshape({-1}));
      sent.push_back(parts.back().numel());
    }
    for (const auto& tensor : outputs) {
      received.push_back(host_of(tensor).numel());
      total += received.back();
    }
    auto from = at::cat(parts);
    auto to = at::empty({total}, from.options());
    auto work = gloo_->alltoall_base(to, from, received, sent, opts);
    auto targets = hosts_of(outputs);
    return {work, [to, from, targets, received] {
              int64_t at = 0;
              for (size_t i = 0; i < targets.size(); ++i) {
                auto target = targets[i];
                target.copy_(to.narrow(0, at, received[i]).view(target.sizes()));
                at += received[i];
              }
            }};
  });
}

WorkPointer NcclGroup::send(Tensors& tensors, int to, int tag) {
  return run(tensors, {}, true, "nccl:send", [&]() -> Started {
    auto hosts = hosts_of(tensors);
    return {gloo_->send(hosts, to, tag), [hosts] {}};
  });
}

WorkPointer NcclGroup::recv(Tensors& tensors, int from, int tag) {
  return run({}, tensors, true, "nccl:recv", [&]() -> Started {
    auto hosts = hosts_of(tensors);
    return {gloo_->recv(hosts, from, tag), [hosts] {}};
  });
}

WorkPointer NcclGroup::barrier(const c10d::BarrierOptions& opts) {
  auto own = opts;
  own.device_ids.clear();
  const int device = opts.device_ids.empty() ? current_device() : static_cast<int>(opts.device_ids.front());
  auto flag = at::zeros({1}, at::TensorOptions().dtype(at::kFloat).device(c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device))));
  return run({flag}, {}, true, "nccl:barrier", [&]() -> Started { return {gloo_->barrier(own), nullptr}; }, true);
}

} // namespace emulated
