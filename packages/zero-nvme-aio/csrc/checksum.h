// xxh3_64, streamed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace zaio {

class Checksum {
public:
    Checksum();
    void update(const void* data, size_t nbytes);
    uint64_t digest() const;

    static uint64_t of(const void* data, size_t nbytes);

private:
    struct Free {
        void operator()(void* state) const;
    };
    std::unique_ptr<void, Free> state_;
};

}  // namespace zaio
