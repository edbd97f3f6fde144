// Which instruction set runs.
#pragma once

#include <string>
#include <vector>

#include "kernels.hpp"

namespace zok {

// Instruction sets compiled into this library, best first, with the reason why one cannot run here ("" when it can).
struct Target {
    const Kernels* kernels;
    std::string unavailable;
};
std::vector<Target> targets();

// The kernels that calls use: the one ZERO_ISA names, else the best one. Throws std::invalid_argument when ZERO_ISA names one that is
// unknown or cannot run. Decided once per process.
const Kernels& active();

}  // namespace zok
