// Where in Python the host is.
#pragma once

#include <string>
#include <vector>

#include "order.h"

namespace sim {

// Frames of files below these folders are passed over.
void pass_over(std::vector<std::string> folders);

}  // namespace sim
