// The choice of the instruction set.
#pragma once

#include <string>
#include <vector>

#include "kernels.hpp"

namespace zok {

// An instruction set that is compiled into this library.
struct Target {
    const Kernels* kernels;
    std::string unavailable;  // the reason why it cannot run here; empty when it can
};
// All of them, best first.
std::vector<Target> targets();

// The kernels that calls use: those of the instruction set that ZERO_ISA names, else of the best one that can run. Throws
// std::invalid_argument when ZERO_ISA is unknown or cannot run here. Decided once per process.
const Kernels& active();

}  // namespace zok
