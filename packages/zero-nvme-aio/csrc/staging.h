// The bounce buffers of one lane: block-sized slots in huge pages, the first of them registered with the kernel.
#pragma once

#include <memory>
#include <vector>

#include "memory.h"
#include "op.h"

namespace zaio {

class Staging {
public:
    Staging(Backend& backend, size_t slot_bytes, unsigned slots);
    ~Staging();
    Staging(const Staging&) = delete;
    Staging& operator=(const Staging&) = delete;

    size_t slot_bytes() const { return slot_bytes_; }
    // A free slot, registered ones first; -1 when all are in use.
    int take();
    void give_back(int slot) { free_.push_back(slot); }
    char* address(int slot) const { return memory_.data() + static_cast<size_t>(slot) * slot_bytes_; }
    int32_t buffer_index(int slot) const { return slot < static_cast<int>(registered_) ? 0 : -1; }
    unsigned free_slots() const { return static_cast<unsigned>(free_.size()); }
    size_t registered_bytes() const { return registered_ * slot_bytes_; }
    // Why the kernel refused to register, as errno; 0 when it did not, or was not asked.
    int registration_error() const { return registration_error_; }
    size_t charged_bytes() const { return memory_.charged_bytes(); }

private:
    Backend& backend_;
    const size_t slot_bytes_;
    Mapping memory_;
    size_t registered_ = 0;
    int registration_error_ = 0;
    std::vector<int> free_;
};

}  // namespace zaio
