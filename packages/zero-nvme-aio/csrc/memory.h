// Anonymous memory for I/O: page-granular, huge pages where whole ones fit, resident from the start.
#pragma once

#include <cstddef>
#include <cstdint>

namespace zaio {

size_t page_bytes();

struct MappingOptions {
    bool huge_pages = true;
    bool lock = false;
};

// Owns one anonymous mapping. Throws std::system_error (ENOMEM; EPERM or ENOMEM for `lock` over the memlock limit).
class Mapping {
public:
    Mapping(size_t nbytes, MappingOptions options);
    ~Mapping();
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    char* data() const { return data_; }
    size_t nbytes() const { return nbytes_; }
    // What the mapping costs: nbytes rounded up to whole pages.
    size_t charged_bytes() const { return charged_; }
    size_t resident_bytes() const;
    bool locked() const { return locked_; }

private:
    char* data_ = nullptr;
    size_t nbytes_, charged_;
    bool locked_ = false;
};

// Registered (kernel-pinned) memory counts against the user's memlock limit over all rings of the process, so the allowance
// is one number per process: min(4 MiB, memlock / 4), or 4 MiB for a process that may lock without limit.
class PinAllowance {
public:
    static size_t limit();
    static size_t in_use();
    // Takes `nbytes` or nothing.
    static bool take(size_t nbytes);
    static void give_back(size_t nbytes);
};

}  // namespace zaio
