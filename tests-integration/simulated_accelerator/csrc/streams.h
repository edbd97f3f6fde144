// Streams that really run later: a queue each, worked by a thread of its own with random delays; and their events.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include <c10/core/Stream.h>

#include "order.h"

namespace sim {

constexpr auto kDevice = c10::DeviceType::PrivateUse1;
constexpr int kStreamsPerDevice = 32;

using Task = std::function<void()>;

// One recording of an event: complete when the stream has come there.
struct Moment {
  std::atomic<bool> done{false};
  Clock clock;
  std::chrono::steady_clock::time_point time;
  Actor stream = kHost;
};
using MomentPtr = std::shared_ptr<Moment>;

class Stream {
 public:
  Stream(c10::DeviceIndex device, c10::StreamId id);
  // Queue what the stream runs in its turn, with the memory that it will read and write.
  void enqueue(const std::string& name, const std::vector<Range>& ranges, Task task);
  // Queue work of the device itself, which accesses nothing that anybody else has.
  void enqueue_unseen(Task task);
  MomentPtr record();
  void wait(const MomentPtr& moment);
  bool idle();
  void drain();  // blocks; the host is ordered behind everything that was queued

  const c10::DeviceIndex device;
  const c10::StreamId id;
  const Actor actor;

 private:
  void push(Task task);
  void work();
  void delay();

  std::mutex lock_;
  std::condition_variable changed_;
  std::deque<Task> queue_;
  uint64_t queued_ = 0;
  uint64_t done_ = 0;
  bool started_ = false;
  uint64_t seed_ = 0;
  std::mt19937_64 random_;
};

// Blocks until a moment has come; false if the process ends before.
bool await(const MomentPtr& moment);

struct Options {
  std::atomic<uint64_t> seed{0};           // of the delays; 0: none
  std::atomic<int64_t> longest_delay{200};  // microseconds
  std::atomic<int> devices{1};
  std::atomic<int64_t> capacity{int64_t(8) << 30};  // bytes of each device
  std::atomic<bool> raise_on_stop{false};
};
Options& options();

bool in_stream();  // whether this is the thread of a stream, so not the host's

Stream& stream_of(const c10::Stream& stream);
Stream& stream_at(c10::DeviceIndex device, c10::StreamId id);
Stream& current_stream(c10::DeviceIndex device);
c10::StreamId exchange_current_stream(c10::DeviceIndex device, c10::StreamId id);
c10::StreamId new_stream(c10::DeviceIndex device);
c10::StreamId own_stream(c10::DeviceIndex device);  // that nobody else is given
c10::DeviceIndex current_device();
void set_current_device(c10::DeviceIndex device);
std::vector<Stream*> streams(c10::DeviceIndex device);
void drain(c10::DeviceIndex device);
void close();  // nothing that is queued runs any more
bool closing();

// The first exception of a stream's thread; every call that waits for a stream raises it from then on.
void fail(const std::string& what);
void raise_failure();
std::string take_failure();

// The host waits for the device here. ``what`` says for what.
void host_stop(const std::string& what);
struct Stop {
  std::string what;
  Place place;
  std::string node;
};
std::vector<Stop> take_stops();

}  // namespace sim
