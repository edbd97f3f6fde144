// Writing to eventfds.
#pragma once

#include <unistd.h>

#include <cerrno>
#include <cstdint>

namespace zaio {

// Wakes whoever sleeps on the eventfd. A write that fails is tried again, as the sleeper would sleep for ever (a filter of
// system calls, say, can refuse one). EAGAIN is no failure: the counter is full, and the reader awake.
inline void ring(int event_fd) {
    constexpr int kAttempts = 1000;
    const uint64_t one = 1;
    for (int attempt = 0; attempt < kAttempts; ++attempt)
        if (::write(event_fd, &one, sizeof one) == static_cast<ssize_t>(sizeof one) || errno == EAGAIN) return;
}

}  // namespace zaio
