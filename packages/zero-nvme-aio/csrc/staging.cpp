#include "staging.h"

#include <algorithm>

namespace zaio {

Staging::Staging(Backend& backend, size_t slot_bytes, unsigned slots)
    : backend_(backend), slot_bytes_(slot_bytes), memory_(slot_bytes * slots, MappingOptions{}) {
    for (int slot = static_cast<int>(slots) - 1; slot >= 0; --slot) free_.push_back(slot);
    if ((backend.capabilities() & kRegisteredBuffers) == 0) return;
    size_t count = std::min<size_t>(slots, PinAllowance::limit() / slot_bytes);
    while (count > 0 && !PinAllowance::take(count * slot_bytes)) --count;
    if (count == 0) return;
    const iovec range{memory_.data(), count * slot_bytes};
    registration_error_ = -backend.register_buffers(&range, 1);
    if (registration_error_ == 0) {
        registered_ = count;
    } else {
        PinAllowance::give_back(count * slot_bytes);
    }
}

Staging::~Staging() {
    if (registered_ == 0) return;
    backend_.unregister_buffers();
    PinAllowance::give_back(registered_bytes());
}

int Staging::take() {
    if (free_.empty()) return -1;
    const auto lowest = std::min_element(free_.begin(), free_.end());
    const int slot = *lowest;
    free_.erase(lowest);
    return slot;
}

}  // namespace zaio
