#include "copy.h"

#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>

#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include <algorithm>

namespace zaio {
namespace {

// Moves bytes between two places of this process through the kernel: `call` is process_vm_readv or process_vm_writev.
template <typename Call>
bool through_kernel(char* own, char* other, size_t nbytes, Call&& call, bool* forbidden) {
    *forbidden = false;
    for (size_t done = 0; done < nbytes;) {
        const iovec local{own + done, nbytes - done}, remote{other + done, nbytes - done};
        const ssize_t n = call(::getpid(), &local, 1ul, &remote, 1ul, 0ul);
        if (n > 0) {
            done += static_cast<size_t>(n);
            continue;
        }
        if (n < 0 && errno == EINTR) continue;
        *forbidden = n < 0 && (errno == EPERM || errno == ENOSYS || errno == EACCES);
        return false;
    }
    return true;
}

}  // namespace

bool copy_from_guarded(char* to, const char* from, size_t nbytes) {
    bool forbidden;
    if (through_kernel(to, const_cast<char*>(from), nbytes, ::process_vm_readv, &forbidden)) return true;
    if (forbidden) std::memcpy(to, from, nbytes);
    return forbidden;
}

bool copy_to_guarded(char* to, const char* from, size_t nbytes) {
    bool forbidden;
    if (through_kernel(const_cast<char*>(from), to, nbytes, ::process_vm_writev, &forbidden)) return true;
    if (forbidden) std::memcpy(to, from, nbytes);
    return forbidden;
}

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
