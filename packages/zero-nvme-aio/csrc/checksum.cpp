#include "checksum.h"

#include <new>

#define XXH_INLINE_ALL
#include "third_party/xxhash/xxhash.h"

namespace zaio {

Checksum::Checksum() : state_(XXH3_createState()) {
    if (!state_) throw std::bad_alloc();
    XXH3_64bits_reset(static_cast<XXH3_state_t*>(state_.get()));
}

void Checksum::update(const void* data, size_t nbytes) {
    XXH3_64bits_update(static_cast<XXH3_state_t*>(state_.get()), data, nbytes);
}

uint64_t Checksum::digest() const { return XXH3_64bits_digest(static_cast<const XXH3_state_t*>(state_.get())); }

uint64_t Checksum::of(const void* data, size_t nbytes) { return XXH3_64bits(data, nbytes); }

void Checksum::Free::operator()(void* state) const { XXH3_freeState(static_cast<XXH3_state_t*>(state)); }

}  // namespace zaio
