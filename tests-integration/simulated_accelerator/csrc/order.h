// Which operations are ordered: vector clocks of the host and of every stream, and the last accesses to every byte.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace sim {

using Actor = uint32_t;  // the host, or a stream of a device
constexpr Actor kHost = 0;

struct Frame {
  std::string file;
  int line;
  std::string function;
};
// The innermost Python frames outside torch, in torch's lifetime at one address each; see places.cpp.
using Place = std::vector<const Frame*>;
Place here(size_t frames);
std::string node();  // the autograd node that runs on this thread, if one does; in bindings.cpp

class Clock {
 public:
  uint64_t at(Actor actor) const { return actor < times_.size() ? times_[actor] : 0; }
  bool covers(Actor actor, uint64_t time) const { return time <= at(actor); }
  uint64_t tick(Actor actor);
  void join(const Clock& other);

 private:
  std::vector<uint64_t> times_;
};

struct Operation {
  std::string name;
  Actor actor;
  uint64_t time;
  Place place;
  std::string node;
};
using OperationPtr = std::shared_ptr<const Operation>;

struct Range {  // of addresses
  uintptr_t begin;
  uintptr_t end;
  bool write;
};

struct Race {
  OperationPtr first;
  OperationPtr second;
  bool first_writes;
  bool second_writes;
  uint64_t bytes;  // of the first overlap that was found
  uint64_t count;  // of overlaps between these two places
};

// The happens-before relation. A stream's operations are ordered as they were queued; the host comes before what it
// queues from then on; events carry a stream's clock to other streams and to the host. Threads of the host count as one:
// what one of them does after another, by the interpreter's lock, is ordered.
class Order {
 public:
  Actor add_stream(const std::string& name);
  std::string name(Actor actor);

  // Queue an operation: the accesses that it makes when it runs.
  void enqueue(Actor stream, const std::string& name, const std::vector<Range>& ranges);
  // The host accesses memory at once.
  void on_host(const std::string& name, const std::vector<Range>& ranges);
  Clock record(Actor stream);
  void wait(Actor stream, const Clock& clock);
  void host_waited(const Clock& clock);
  Clock of(Actor stream);

  // Memory that ``stream`` allocates: a write of it. Freeing is one too, ordered behind the streams of ``recorded``.
  void allocate(Actor stream, uintptr_t begin, size_t size);
  void release(Actor stream, uintptr_t begin, size_t size, const std::set<Actor>& recorded);
  // Memory that nobody uses any more.
  void forget(uintptr_t begin, size_t size);

  void check(bool enabled);
  bool checks() const { return checks_; }
  std::vector<Race> races();

 private:
  struct Segment {
    uintptr_t end;
    OperationPtr write;
    std::vector<OperationPtr> reads;  // since the write, the last one of every actor
  };
  using Segments = std::map<uintptr_t, Segment>;

  OperationPtr operation(Actor actor, const std::string& name, Place place, std::string node, uint64_t time);
  void access(const OperationPtr& now, const Clock& clock, const Range& range, const std::set<Actor>& exempt);
  void compare(const OperationPtr& before, bool before_writes, const OperationPtr& now, const Clock& clock, bool write,
               uint64_t bytes, const std::set<Actor>& exempt);
  Segments::iterator split(uintptr_t address);
  void erase(uintptr_t begin, uintptr_t end);
  Clock& advance(Actor stream);

  std::mutex lock_;
  std::atomic<bool> checks_{false};
  std::vector<Clock> clocks_{Clock{}};
  std::vector<std::string> names_{"host"};
  Segments segments_;
  std::map<std::string, Race> races_;
};

Order& order();

}  // namespace sim
