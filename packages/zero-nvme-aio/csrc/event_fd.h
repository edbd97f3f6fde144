// Ringing and sleeping on eventfds.
#pragma once

#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

namespace zaio {

// The kernel can refuse a write (a filter of system calls, say), so nobody sleeps for ever for a ring: a sleeper looks for
// work by itself this often.
constexpr int kLongestSleepMilliseconds = 1000;

// Wakes whoever sleeps on the eventfd, trying again when the write fails. EAGAIN is no failure: the counter is full, and
// the reader awake.
inline void ring(int event_fd) {
    constexpr int kAttempts = 1000;
    const uint64_t one = 1;
    for (int attempt = 0; attempt < kAttempts; ++attempt)
        if (::write(event_fd, &one, sizeof one) == static_cast<ssize_t>(sizeof one) || errno == EAGAIN) return;
}

inline void sleep_until_rung(int event_fd, int milliseconds = kLongestSleepMilliseconds) {
    pollfd ready{event_fd, POLLIN, 0};
    ::poll(&ready, 1, milliseconds);
}

}  // namespace zaio
