// Copies between users' memory and staging, made for amounts that no cache holds.
#pragma once

#include <cstddef>

namespace zaio {

// Copy in pieces of this size: they stay in the second-level cache, so what is done with them next does not wait for memory.
constexpr size_t kCopyPiece = size_t{128} << 10;

// Copies without fetching the old content of `to`, and without keeping the new one in the caches.
void copy_past_caches(char* to, const char* from, size_t nbytes);

// Copies from or to memory that may be gone by now; false when it is. Where the kernel forbids process_vm_readv (no ptrace
// at all), these are plain copies.
bool copy_from_guarded(char* to, const char* from, size_t nbytes);
bool copy_to_guarded(char* to, const char* from, size_t nbytes);

}  // namespace zaio
