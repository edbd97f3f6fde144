#include "request.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "copy.h"
#include "event_fd.h"

namespace zaio {
namespace {

// Reads of at least this size are more than their reader will find in a cache anyway.
constexpr uint64_t kPastCachesFrom = 4 << 20;

constexpr uint64_t kGuardedHashPiece = 32 << 10;

std::chrono::nanoseconds now() { return std::chrono::steady_clock::now().time_since_epoch(); }

}  // namespace

Request::Request(OpKind kind, std::shared_ptr<File> file, std::vector<Segment> segments, uint64_t offset, bool checksum)
    : kind(kind), file(std::move(file)), segments(std::move(segments)), offset(offset) {
    starts_.reserve(this->segments.size() + 1);
    starts_.push_back(0);
    for (const Segment& segment : this->segments) starts_.push_back(starts_.back() + segment.nbytes);
    if (checksum) checksum_ = std::make_unique<Checksum>();
}

size_t Request::segment_at(uint64_t position) const {
    const auto after = std::upper_bound(starts_.begin(), starts_.end(), position);
    return static_cast<size_t>(after - starts_.begin()) - 1;
}

template <typename Visit>
bool Request::visit(uint64_t position, uint64_t n, Visit&& visit) const {
    for (size_t i = segment_at(position); n > 0; ++i) {
        const uint64_t skip = position - starts_[i];
        const uint64_t take = std::min(n, segments[i].nbytes - skip);
        if (take > 0 && !visit(segments[i].address + skip, take, segments[i].guarded)) return false;
        position += take;
        n -= take;
    }
    return true;
}

bool Request::gather(char* out, uint64_t position, uint64_t n, Checksum* hash) const {
    return visit(position, n, [&](const char* from, uint64_t length, bool guarded) {
        for (uint64_t i = 0; i < length; i += kCopyPiece) {
            const uint64_t piece = std::min<uint64_t>(kCopyPiece, length - i);
            if (guarded) {
                if (!copy_from_guarded(out, from + i, piece)) return false;
            } else {
                std::memcpy(out, from + i, piece);
            }
            if (hash != nullptr) hash->update(out, piece);
            out += piece;
        }
        return true;
    });
}

bool Request::scatter(const char* in, uint64_t position, uint64_t n) const {
    // What is hashed next must not have to be fetched again.
    const bool past_caches = checksum_ == nullptr && nbytes() >= kPastCachesFrom;
    return visit(position, n, [&](char* to, uint64_t length, bool guarded) {
        if (guarded) {
            if (!copy_to_guarded(to, in, length)) return false;
        } else if (past_caches) {
            copy_past_caches(to, in, length);
        } else {
            std::memcpy(to, in, length);
        }
        in += length;
        return true;
    });
}

bool Request::hash(uint64_t position, uint64_t n) {
    return visit(position, n, [&](const char* from, uint64_t length, bool guarded) {
        if (!guarded) {
            checksum_->update(from, length);
            return true;
        }
        char piece[kGuardedHashPiece];
        for (uint64_t i = 0; i < length; i += sizeof piece) {
            const uint64_t take = std::min<uint64_t>(sizeof piece, length - i);
            if (!copy_from_guarded(piece, from + i, take)) return false;
            checksum_->update(piece, take);
        }
        return true;
    });
}

bool Request::start(unsigned parts) {
    parts_.store(parts);
    started_at_ = now();
    if (!file->request_started()) return false;
    if (kind == OpKind::write) write_epoch_ = file->write_started();
    return true;
}

void Request::finish_part() {
    if (parts_.fetch_sub(1) != 1) return;
    if (kind == OpKind::write) file->write_finished(write_epoch_, failure());
    // The file may be closed as soon as it counts no request, and the caller may free memory as soon as it sees `done`.
    file->request_finished();
    std::lock_guard<std::mutex> lock(mutex_);
    ended_at_ = now();
    done_.store(true, std::memory_order_release);
    finished_.notify_all();
    for (const int fd : event_fds_) ring(fd);
    event_fds_.clear();
}

void Request::fail(const Failure& failure) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (done_.load(std::memory_order_relaxed)) return;
    // Completions come in any order; the lowest offset is where the trouble began. A real error outranks a cancellation.
    const bool earlier = failure.error != kCancelled && (failure_.error == kCancelled || failure.offset < failure_.offset);
    if (!failure_ || earlier) failure_ = failure;
    failed_.store(true, std::memory_order_release);
}

bool Request::wait_for(std::chrono::nanoseconds timeout) {
    std::unique_lock<std::mutex> lock(mutex_);
    return finished_.wait_for(lock, timeout, [this] { return done_.load(std::memory_order_relaxed); });
}

Failure Request::failure() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return failure_;
}

std::chrono::nanoseconds Request::ended_at() const {
    std::lock_guard<std::mutex> lock(mutex_);
    return ended_at_;
}

bool Request::notify(int event_fd) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (done_.load(std::memory_order_relaxed)) return false;
    event_fds_.push_back(event_fd);
    return true;
}

void Request::forget_notify(int event_fd) {
    std::lock_guard<std::mutex> lock(mutex_);
    event_fds_.erase(std::remove(event_fds_.begin(), event_fds_.end(), event_fd), event_fds_.end());
}

}  // namespace zaio
