#include "copy.h"

#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>

namespace zaio {

#if defined(__SSE2__)
namespace {

constexpr size_t kLine = 64, kPage = 4096;

void stream_line(char* to, const char* from) {
    const __m128i* source = reinterpret_cast<const __m128i*>(from);
    __m128i* target = reinterpret_cast<__m128i*>(to);
    const __m128i a = _mm_loadu_si128(source), b = _mm_loadu_si128(source + 1);
    const __m128i c = _mm_loadu_si128(source + 2), d = _mm_loadu_si128(source + 3);
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
}

}  // namespace

void copy_past_caches(char* to, const char* from, size_t nbytes) {
    const size_t head = std::min(nbytes, (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine);
    std::memcpy(to, from, head);
    size_t at = head;
    while (nbytes - at >= kLine) {
        // Stores of this kind wait for address translation: the walk for the next page starts a page ahead.
        __builtin_prefetch(to + std::min(at + kPage, nbytes - 1), 1, 1);
        const size_t stop = std::min(at + kPage, at + (nbytes - at) / kLine * kLine);
        for (; at < stop; at += kLine) stream_line(to + at, from + at);
    }
    _mm_sfence();
    std::memcpy(to + at, from + at, nbytes - at);
}
#else
void copy_past_caches(char* to, const char* from, size_t nbytes) { std::memcpy(to, from, nbytes); }
#endif

}  // namespace zaio
