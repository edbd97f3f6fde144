#include <torch/csrc/autograd/function.h>
#include <torch/csrc/utils/pybind.h>

#include "groups.h"
#include "operators.h"
#include "places.h"

namespace sim {

std::string node() {
  auto running = torch::autograd::get_current_node();
  return running ? running->name() : std::string();
}

namespace {

py::list described(const Place& place) {
  py::list frames;
  for (const Frame* frame : place) frames.append(py::make_tuple(frame->file, frame->line, frame->function));
  return frames;
}

py::tuple described(const Operation& operation, bool writes) {
  return py::make_tuple(operation.name, order().name(operation.actor), writes, described(operation.place),
                        operation.node);
}

py::list races() {
  py::list all;
  for (const Race& race : order().races()) {
    all.append(py::make_tuple(described(*race.first, race.first_writes), described(*race.second, race.second_writes),
                              race.bytes, race.count));
  }
  return all;
}

py::list stops() {
  py::list all;
  for (const Stop& stop : take_stops()) all.append(py::make_tuple(stop.what, described(stop.place), stop.node));
  return all;
}

py::list all_launches() {
  py::list all;
  const auto launches = take_launches();
  for (auto launch = launches.begin(); launch != launches.end(); ++launch) {
    py::list behind;
    for (auto earlier = launches.begin(); earlier != launch; ++earlier) {
      if (launch->behind(*earlier)) behind.append(earlier - launches.begin());
    }
    all.append(py::make_tuple(launch->group, launch->operation, launch->elements, order().name(launch->stream),
                              py::tuple(behind)));
  }
  return all;
}

void check(bool enabled) {
  order().check(enabled);
  watch_host(enabled);
}

void drain_all() {
  py::gil_scoped_release released;
  for (int device = 0; device < options().devices; ++device) drain(static_cast<c10::DeviceIndex>(device));
}

}  // namespace
}  // namespace sim

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using namespace sim;
  register_device();
  m.def("pass_over", &pass_over);
  m.def("races", &races);
  m.def("take_stops", &stops);
  m.def("take_launches", &all_launches);
  m.def("check", &check);
  m.def("drain", &drain_all);
  m.def("take_failure", &take_failure);
  m.def("close", [] { close(); });
  m.def("make_group", &make_group, py::call_guard<py::gil_scoped_release>());
  m.def("host_access", [](const at::Tensor& t, bool write) {
    std::vector<Range> ranges;
    add_ranges(ranges, t, write);
    order().on_host(write ? "write by the host" : "read by the host", ranges);
  });
  m.def("set_seed", [](uint64_t seed) { options().seed = seed; });
  m.def("set_longest_delay", [](int64_t microseconds) { options().longest_delay = microseconds; });
  m.def("set_devices", [](int count) {
    TORCH_CHECK(count >= 0 && count <= 16, "0 to 16 devices, got ", count);
    options().devices = count;
  });
  m.def("device_count", [] { return options().devices.load(); });
  m.def("set_capacity", [](int64_t bytes) { options().capacity = bytes; });
  m.def("set_raise_on_stop", [](bool enabled) { options().raise_on_stop = enabled; });
  m.def("exchange_device", [](int device) {
    const int before = current_device();
    if (device >= 0) set_current_device(static_cast<c10::DeviceIndex>(device));
    return before;
  });
  m.def("default_generator", [](int device) { return default_generator(static_cast<c10::DeviceIndex>(device)); });
}
