// Fault injection: a backend around a backend. Short transfers really are short, delayed completions really happened.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "op.h"

namespace zaio {

enum class FaultAction : uint8_t { shorten, fail, delay, reorder };

// Applies to transfers number `first`, `first + every`, … of its kind (counted from 0 over the whole engine), and only to
// those that touch a file at or beyond `min_offset`; `limit` bounds how often it fires.
struct FaultRule {
    FaultAction action;
    bool on_read, on_write, on_sync;
    uint64_t first, every, limit, min_offset;
    int error;            // fail: positive errno
    double fraction;      // shorten: share of the bytes that are transferred
    uint64_t delay_us;    // delay
    uint64_t seed;        // reorder
};

class FaultPlan {
public:
    explicit FaultPlan(std::vector<FaultRule> rules) : rules_(std::move(rules)), seen_(rules_.size()), fired_(rules_.size()) {}

    // The rules that apply to this transfer; advances the counters. Thread-safe.
    std::vector<FaultRule> match(bool read, bool write, bool sync, uint64_t offset);
    // Waits or fails in place of an fsync; 0 or a positive errno.
    int before_sync();
    uint64_t fired() const;

private:
    mutable std::mutex mutex_;
    const std::vector<FaultRule> rules_;
    std::vector<uint64_t> seen_, fired_;
};

std::unique_ptr<Backend> make_fault_backend(std::unique_ptr<Backend> inner, std::shared_ptr<FaultPlan> plan);

}  // namespace zaio
