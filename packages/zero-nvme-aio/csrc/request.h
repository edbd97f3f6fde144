// One transfer between a file interval and a list of memory segments, shared by the caller and the lanes that carry it.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <vector>

#include "checksum.h"
#include "file.h"
#include "op.h"

namespace zaio {

struct Segment {
    char* address;
    uint64_t nbytes;
    // Its owner may free it while the request runs (a tensor whose storage can be resized): it is copied by the kernel,
    // which answers with an error where a copy of our own would be a segmentation fault.
    bool guarded = false;
};

class Request {
public:
    Request(OpKind kind, std::shared_ptr<File> file, std::vector<Segment> segments, uint64_t offset, bool checksum);

    const OpKind kind;
    const std::shared_ptr<File> file;
    const std::vector<Segment> segments;
    const uint64_t offset;
    uint64_t nbytes() const { return starts_.back(); }
    // Index of the segment that holds byte `position` of the request, and where that segment begins.
    size_t segment_at(uint64_t position) const;
    uint64_t segment_start(size_t index) const { return starts_[index]; }
    // Copies between one contiguous range and the segments, hashing what passes when `hash` is given. False when guarded
    // memory is gone.
    bool gather(char* out, uint64_t position, uint64_t n, Checksum* hash) const;
    bool scatter(const char* in, uint64_t position, uint64_t n) const;
    bool hash(uint64_t position, uint64_t n);
    Checksum* checksum() { return checksum_.get(); }

    // Lanes.
    // False when the file is being closed.
    bool start(unsigned parts);
    void finish_part();
    void fail(const Failure& failure);
    bool failed() const { return failed_.load(std::memory_order_acquire); }

    // Caller.
    bool done() const { return done_.load(std::memory_order_acquire); }
    bool wait_for(std::chrono::nanoseconds timeout);
    void cancel() { fail({kCancelled, offset, nbytes(), 0}); }
    Failure failure() const;
    // When it was submitted and when it ended, of the steady clock; the second is 0 until it is done.
    std::chrono::nanoseconds started_at() const { return started_at_; }
    std::chrono::nanoseconds ended_at() const;
    // Writes to the eventfd when the request is done; false (and nothing is kept) when it already is.
    bool notify(int event_fd);
    void forget_notify(int event_fd);

private:
    template <typename Visit>
    bool visit(uint64_t position, uint64_t n, Visit&& visit) const;

    std::vector<uint64_t> starts_;
    std::unique_ptr<Checksum> checksum_;
    std::atomic<unsigned> parts_{0};
    std::atomic<bool> done_{false}, failed_{false};
    uint64_t write_epoch_ = 0;
    std::chrono::nanoseconds started_at_{0}, ended_at_{0};

    mutable std::mutex mutex_;
    std::condition_variable finished_;
    Failure failure_;
    std::vector<int> event_fds_;
};

}  // namespace zaio
