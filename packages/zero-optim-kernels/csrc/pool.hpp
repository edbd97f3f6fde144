// One persistent pool of threads per process, shared by all calls.
#pragma once

#include <cstdint>

namespace zok {

// Calls task(context, i) for each i in [0, count), on at most `threads` threads including the caller (0: `default_threads()`), and returns
// when all have run. Items are taken in order, many together at first and singly at the end. A caller that finds the pool busy runs all its
// items itself.
void parallel_for(int threads, int64_t count, void (*task)(void* context, int64_t i), void* context);

template <class Body>
void parallel_for(int threads, int64_t count, Body& body) {
    parallel_for(threads, count, [](void* context, int64_t i) { (*static_cast<Body*>(context))(i); }, &body);
}

}  // namespace zok
