#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <functional>
#include <map>
#include <memory>

#include "streams.h"

namespace emulated {

struct NcclOptions : c10d::Backend::Options {
  explicit NcclOptions(bool high_priority) : Options("nccl"), is_high_priority_stream(high_priority) {}
  bool is_high_priority_stream;
};

// What gloo was asked for, and what is left to do with its result.
struct Started {
  c10::intrusive_ptr<c10d::Work> work;
  std::function<void()> after;
};

class NcclGroup final : public c10d::Backend {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPointer = c10::intrusive_ptr<c10d::Work>;

  NcclGroup(int rank, int size, c10::intrusive_ptr<c10d::Backend> gloo, c10::intrusive_ptr<NcclOptions> options)
      : Backend(rank, size), gloo_(std::move(gloo)), options_(std::move(options)) {}

  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return options_; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return sequence_; }
  void waitForPendingWorks() override {}
  void startCoalescing() override;
  WorkPointer endCoalescing() override;

  WorkPointer broadcast(Tensors&, const c10d::BroadcastOptions&) override;
  WorkPointer allreduce(Tensors&, const c10d::AllreduceOptions&) override;
  WorkPointer allreduce_coalesced(Tensors&, const c10d::AllreduceCoalescedOptions&) override;
  WorkPointer reduce(Tensors&, const c10d::ReduceOptions&) override;
  WorkPointer allgather(std::vector<Tensors>&, Tensors&, const c10d::AllgatherOptions&) override;
  WorkPointer _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions&) override;
  WorkPointer allgather_into_tensor_coalesced(Tensors&, Tensors&, const c10d::AllgatherOptions&) override;
  WorkPointer gather(std::vector<Tensors>&, Tensors&, const c10d::GatherOptions&) override;
  WorkPointer scatter(Tensors&, std::vector<Tensors>&, const c10d::ScatterOptions&) override;
  WorkPointer reduce_scatter(Tensors&, std::vector<Tensors>&, const c10d::ReduceScatterOptions&) override;
  WorkPointer _reduce_scatter_base(at::Tensor&, at::Tensor&, const c10d::ReduceScatterOptions&) override;
  WorkPointer reduce_scatter_tensor_coalesced(Tensors&, Tensors&, const c10d::ReduceScatterOptions&) override;
  WorkPointer alltoall_base(
      at::Tensor&, at::Tensor&, std::vector<int64_t>&, std::vector<int64_t>&, const c10d::AllToAllOptions&) override;
  WorkPointer alltoall(Tensors&, Tensors&, const c10d::AllToAllOptions&) override;
  WorkPointer send(Tensors&, int, int) override;
  WorkPointer recv(Tensors&, int, int) override;
  WorkPointer barrier(const c10d::BarrierOptions&) override;

 private:
  // Launches a collective on this group's stream (the current one where it is not asynchronous).
  WorkPointer run(
      const Tensors& read_from, const Tensors& written, bool async, const char* name, const std::function<Started()>& start,
      bool host_waits = false);
  WorkPointer reduced(
      const Tensors&, const c10d::ReduceOp&, bool async, const char* name, const std::function<WorkPointer(Tensors&)>& start);
  Started scattered(at::Tensor to, const at::Tensor& whole, const c10d::ReduceScatterOptions&);
  c10::Stream stream_of(int device);

  c10::intrusive_ptr<c10d::Backend> gloo_;
  c10::intrusive_ptr<NcclOptions> options_;
  std::map<int, c10::Stream> streams_;
  std::vector<std::shared_ptr<void>> coalesced_;
  bool coalescing_ = false;
  uint64_t sequence_ = 0;
};

} // namespace emulated
