#include "groups.h"

#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>

#include <map>
#include <mutex>

#include "operators.h"

namespace sim {
namespace {

using Tensors = std::vector<at::Tensor>;
using HostWork = c10::intrusive_ptr<c10d::Work>;

constexpr auto kFarewell = std::chrono::milliseconds(5000);

std::mutex launches_lock;
std::vector<Launch>& launches() {
  static auto* all = new std::vector<Launch>();
  return *all;
}

// Collectives of one group begin in the order in which the host launched them, in whichever streams they run.
struct Turns {
  std::mutex lock;
  std::condition_variable changed;
  uint64_t launched = 0;
  uint64_t begun = 0;
  uint64_t finished = 0;
  std::atomic<bool> aborted{false};

  bool await(uint64_t turn) {
    std::unique_lock<std::mutex> guard(lock);
    while (begun != turn && !aborted && !closing()) changed.wait_for(guard, std::chrono::milliseconds(100));
    return begun == turn && !aborted && !closing();
  }
  void next() {
    {
      std::lock_guard<std::mutex> guard(lock);
      ++begun;
    }
    changed.notify_all();
  }
  void finish() {
    {
      std::lock_guard<std::mutex> guard(lock);
      ++finished;
    }
    changed.notify_all();
  }
  void await_all() {
    std::unique_lock<std::mutex> guard(lock);
    while (finished < launched && !aborted && !closing()) changed.wait_for(guard, std::chrono::milliseconds(100));
  }
};

// As NCCL's: `wait` orders the current stream and returns at once. The tensors are held until then.
struct StreamWork final : c10d::Work {
  StreamWork(int rank, c10d::OpType type, c10::DeviceIndex device, Tensors held, Tensors outputs)
      : Work(rank, type), device_(device), held_(std::move(held)), outputs_(std::move(outputs)) {}
  bool isCompleted() override { return end->done; }
  bool isSuccess() const override { return end->done; }
  std::exception_ptr exception() const override { return nullptr; }
  void synchronize() override {
    Stream& current = current_stream(device_);
    current.wait(end);
    if (opType_ == c10d::OpType::BARRIER) {
      host_stop("wait for a barrier");
      current.drain();
    }
    held_.clear();
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  void blockCurrentStream() override { synchronize(); }
  Tensors result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future; }

  MomentPtr end;
  c10::intrusive_ptr<c10::ivalue::Future> future;

 private:
  c10::DeviceIndex device_;
  Tensors held_;
  Tensors outputs_;
};

Tensors flat(const std::vector<Tensors>& lists) {
  Tensors all;
  for (const auto& list : lists) all.insert(all.end(), list.begin(), list.end());
  return all;
}
Tensors seen_all(const Tensors& tensors) {
  Tensors all;
  for (const auto& t : tensors) all.push_back(seen(t));
  return all;
}
std::vector<Tensors> seen_all(const std::vector<Tensors>& lists) {
  std::vector<Tensors> all;
  for (const auto& list : lists) all.push_back(seen_all(list));
  return all;
}

struct Group final : c10d::Backend {
  Group(c10::intrusive_ptr<c10d::Backend> host, int rank, int size)
      : Backend(rank, size), host_(std::move(host)), turns_(std::make_shared<Turns>()) {}

  const std::string getBackendName() const override { return "simulated"; }
  void setTimeout(std::chrono::milliseconds timeout) override { host_->setTimeout(timeout); }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return turns_->launched; }
  void abort() override {
    turns_->aborted = true;
    host_->abort();
  }
  // As NCCL's: what was launched ends first, on the other ranks too, unless one of them is gone.
  void shutdown() override {
    turns_->await_all();
    if (turns_->aborted.exchange(true) || closing()) return;
    c10d::BarrierOptions options;
    options.timeout = kFarewell;
    try {
      host_->barrier(options)->wait();
    } catch (const std::exception& error) {
      TORCH_WARN("a rank left its process group before the others: ", error.what());
    }
  }

  // Queue a collective in the group's stream, behind the current one; in the current one if nobody waits for it.
  HostWork launch(c10d::OpType type, bool async, const Tensors& reads, const Tensors& writes,
                  std::function<HostWork()> call, std::function<void()> after = nullptr) {
    TORCH_CHECK(!turns_->aborted, "the process group was aborted");
    const Tensors& any = writes.empty() ? reads : writes;
    for (const Tensors* tensors : {&reads, &writes}) {
      for (const auto& t : *tensors) TORCH_CHECK(ours(t), "a collective of the device got a tensor on ", t.device());
    }
    const c10::DeviceIndex device = any.empty() ? current_device() : any[0].device().index();
    Stream& current = current_stream(device);
    if (streams_.count(device) == 0) streams_[device] = own_stream(device);
    Stream& stream = async ? stream_at(device, streams_[device]) : current;
    if (async) stream.wait(current.record());
    const std::string name = "collective " + c10d::opTypeToString(type);
    std::vector<Range> ranges;
    for (const auto& t : reads) add_ranges(ranges, t, false);
    for (const auto& t : writes) add_ranges(ranges, t, true);
    const uint64_t turn = turns_->launched++;
    stream.enqueue(name, ranges, [turns = turns_, turn, call = std::move(call), after = std::move(after)] {
      if (!turns->await(turn)) return;
      struct Finish {
        Turns& turns;
        ~Finish() { turns.finish(); }
      } finish{*turns};
      HostWork work;
      try {
        work = call();
      } catch (...) {
        turns->next();
        throw;
      }
      turns->next();
      work->wait();
      if (after) after();
    });
    Tensors held(reads);
    held.insert(held.end(), writes.begin(), writes.end());
    auto work = c10::make_intrusive<StreamWork>(rank_, type, device, std::move(held), writes);
    work->end = stream.record();
    work->future = future(device, stream.id, writes);
    note(name, any, *work->end);
    return work;
  }
  c10::intrusive_ptr<c10::ivalue::Future> future(c10::DeviceIndex device, c10::StreamId id, const Tensors& outputs) {
    const c10::Device where(kDevice, device);
    auto made = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                         std::vector<c10::Device>{where});
    c10::StreamGuard guard(c10::Stream(c10::Stream::UNSAFE, where, id));
    made->markCompleted(c10::IValue(outputs));
    return made;
  }
  void note(const std::string& name, const Tensors& tensors, const Moment& end) {
    if (!order().checks()) return;
    int64_t elements = 0;
    for (const auto& t : tensors) elements += t.numel();
    std::lock_guard<std::mutex> guard(launches_lock);
    launches().push_back({getGroupDesc().empty() ? getGroupUid() : getGroupDesc(), name, elements, end.stream,
                          end.clock});
  }
  // The host's backend cannot average: it adds, and the mean is taken afterwards.
  template <class O>
  std::function<void()> average(O& options, const Tensors& outputs) {
    if (options.reduceOp != c10d::ReduceOp::AVG) return nullptr;
    options.reduceOp = c10d::ReduceOp::SUM;
    return [outputs, size = size_] {
      for (const auto& t : outputs) t.div_(size);
    };
  }

  HostWork broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    const bool root = opts.rootRank == rank_;
    return launch(c10d::OpType::BROADCAST, opts.asyncOp, root ? tensors : Tensors{}, root ? Tensors{} : tensors,
                  [host = host_, t = seen_all(tensors), opts]() mutable { return host->broadcast(t, opts); });
  }
  HostWork allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    auto opts = options;
    auto t = seen_all(tensors);
    auto after = average(opts, t);
    return launch(c10d::OpType::ALLREDUCE, opts.asyncOp, {}, tensors,
                  [host = host_, t, opts]() mutable { return host->allreduce(t, opts); }, after);
  }
  HostWork allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    auto opts = options;
    auto t = seen_all(tensors);
    auto after = average(opts, t);
    return launch(c10d::OpType::ALLREDUCE_COALESCED, opts.asyncOp, {}, tensors,
                  [host = host_, t, opts]() mutable { return host->allreduce_coalesced(t, opts); }, after);
  }
  HostWork reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    auto opts = options;
    auto t = seen_all(tensors);
    auto after = opts.rootRank == rank_ ? average(opts, t) : (average(opts, {}), nullptr);
    return launch(c10d::OpType::REDUCE, opts.asyncOp, {}, tensors,
                  [host = host_, t, opts]() mutable { return host->reduce(t, opts); }, after);
  }
  HostWork allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return launch(c10d::OpType::ALLGATHER, opts.asyncOp, inputs, flat(outputs),
                  [host = host_, o = seen_all(outputs), i = seen_all(inputs), opts]() mutable {
                    return host->allgather(o, i, opts);
                  });
  }
  HostWork _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    return launch(c10d::OpType::_ALLGATHER_BASE, opts.asyncOp, {input}, {output},
                  [host = host_, o = seen(output), i = seen(input), opts]() mutable {
                    return host->_allgather_base(o, i, opts);
                  });
  }
  HostWork allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                           const c10d::AllgatherOptions& opts) override {
    return launch(c10d::OpType::COALESCED, opts.asyncOp, inputs, outputs,
                  [host = host_, o = seen_all(outputs), i = seen_all(inputs), opts]() mutable {
                    return host->allgather_into_tensor_coalesced(o, i, opts);
                  });
  }
  HostWork gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    return launch(c10d::OpType::GATHER, opts.asyncOp, inputs, flat(outputs),
                  [host = host_, o = seen_all(outputs), i = seen_all(inputs), opts]() mutable {
                    return host->gather(o, i, opts);
                  });
  }
  HostWork scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
    return launch(c10d::OpType::SCATTER, opts.asyncOp, flat(inputs), outputs,
                  [host = host_, o = seen_all(outputs), i = seen_all(inputs), opts]() mutable {
                    return host->scatter(o, i, opts);
                  });
  }
  HostWork reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                          const c10d::ReduceScatterOptions& options) override {
    auto opts = options;
    auto o = seen_all(outputs);
    auto after = average(opts, o);
    return launch(c10d::OpType::REDUCE_SCATTER, opts.asyncOp, flat(inputs), outputs,
                  [host = host_, o, i = seen_all(inputs), opts]() mutable { return host->reduce_scatter(o, i, opts); },
                  after);
  }
  HostWork _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                const c10d::ReduceScatterOptions& options) override {
    auto opts = options;
    auto o = seen(output);
    auto after = average(opts, {o});
    return launch(c10d::OpType::_REDUCE_SCATTER_BASE, opts.asyncOp, {input}, {output},
                  [host = host_, o, i = seen(input), opts]() mutable { return host->_reduce_scatter_base(o, i, opts); },
                  after);
  }
  HostWork reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                           const c10d::ReduceScatterOptions& options) override {
    auto opts = options;
    auto o = seen_all(outputs);
    auto after = average(opts, o);
    return launch(c10d::OpType::REDUCE_SCATTER_TENSOR_COALESCED, opts.asyncOp, inputs, outputs,
                  [host = host_, o, i = seen_all(inputs), opts]() mutable {
                    return host->reduce_scatter_tensor_coalesced(o, i, opts);
                  },
                  after);
  }
  HostWork alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_sizes,
                         std::vector<int64_t>& input_sizes, const c10d::AllToAllOptions& opts) override {
    return launch(c10d::OpType::ALLTOALL_BASE, opts.asyncOp, {input}, {output},
                  [host = host_, o = seen(output), i = seen(input), output_sizes, input_sizes, opts]() mutable {
                    return host->alltoall_base(o, i, output_sizes, input_sizes, opts);
                  });
  }
  // The host's backend has it for one tensor alone.
  HostWork alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    struct Buffers {
      at::Tensor received;
      at::Tensor sent;
    };
    auto buffers = std::make_shared<Buffers>();
    auto o = seen_all(outputs);
    auto call = [host = host_, o, i = seen_all(inputs), buffers, opts]() mutable {
      std::vector<int64_t> sent, received;
      Tensors pieces;
      int64_t total = 0;
      for (const auto& t : i) {
        sent.push_back(t.numel());
        pieces.push_back(t.reshape({-1}));
      }
      for (const auto& t : o) {
        received.push_back(t.numel());
        total += t.numel();
      }
      buffers->sent = at::cat(pieces);
      buffers->received = at::empty({total}, buffers->sent.options());
      return host->alltoall_base(buffers->received, buffers->sent, received, sent, opts);
    };
    auto after = [o, buffers] {
      int64_t offset = 0;
      for (const auto& t : o) {
        t.copy_(buffers->received.narrow(0, offset, t.numel()).view(t.sizes()));
        offset += t.numel();
      }
    };
    return launch(c10d::OpType::ALLTOALL, opts.asyncOp, inputs, outputs, std::move(call), std::move(after));
  }
  HostWork send(Tensors& tensors, int to, int tag) override {
    return launch(c10d::OpType::SEND, true, tensors, {},
                  [host = host_, t = seen_all(tensors), to, tag]() mutable { return host->send(t, to, tag); });
  }
  HostWork recv(Tensors& tensors, int from, int tag) override {
    return launch(c10d::OpType::RECV, true, {}, tensors,
                  [host = host_, t = seen_all(tensors), from, tag]() mutable { return host->recv(t, from, tag); });
  }
  HostWork barrier(const c10d::BarrierOptions& opts) override {
    auto plain = opts;
    plain.device = std::nullopt;
    plain.device_ids.clear();
    return launch(c10d::OpType::BARRIER, true, {}, {}, [host = host_, plain] { return host->barrier(plain); });
  }

 private:
  c10::intrusive_ptr<c10d::Backend> host_;
  std::shared_ptr<Turns> turns_;
  std::map<c10::DeviceIndex, c10::StreamId> streams_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> make_group(c10::intrusive_ptr<c10d::Backend> host, int rank, int size) {
  return c10::make_intrusive<Group>(std::move(host), rank, size);
}

std::vector<Launch> take_launches() {
  std::lock_guard<std::mutex> guard(launches_lock);
  return std::exchange(launches(), {});
}

}  // namespace sim
