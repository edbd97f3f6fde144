// Collectives of the device: in a stream of their own, by a backend of the CPU on the device's memory.
#pragma once

#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "order.h"

namespace sim {

// ``host``: the backend that carries them out, on tensors of the CPU.
c10::intrusive_ptr<c10d::Backend> make_group(c10::intrusive_ptr<c10d::Backend> host, int rank, int size);

struct Launch {  // of a collective, in the order in which the host launched them
  std::string group;
  std::string operation;
  int64_t elements;
  Actor stream;  // that runs it
  Clock clock;   // of that stream when it comes to the end of it
  bool behind(const Launch& other) const { return clock.covers(other.stream, other.clock.at(other.stream)); }
};
std::vector<Launch> take_launches();

}  // namespace sim
