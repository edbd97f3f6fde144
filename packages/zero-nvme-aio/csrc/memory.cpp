#include "memory.h"

#include <linux/capability.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <system_error>
#include <vector>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace zaio {
namespace {

constexpr size_t kHugeBytes = size_t{2} << 20;
constexpr size_t kPinCeiling = size_t{4} << 20;

std::atomic<size_t> pinned_bytes{0};

size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

// Maps `charged` bytes at a multiple of `alignment` by mapping more and returning the ends.
char* map_aligned(size_t charged, size_t alignment) {
    const size_t span = charged + alignment - page_bytes();
    if (span < charged) throw std::system_error(ENOMEM, std::generic_category(), "mmap");
    void* raw = ::mmap(nullptr, span, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (raw == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap");
    char* begin = static_cast<char*>(raw);
    char* data = reinterpret_cast<char*>(round_up(reinterpret_cast<size_t>(begin), alignment));
    if (data > begin) ::munmap(begin, static_cast<size_t>(data - begin));
    char* end = data + charged;
    if (begin + span > end) ::munmap(end, static_cast<size_t>(begin + span - end));
    return data;
}

bool may_lock_without_limit() {
    __user_cap_header_struct header{_LINUX_CAPABILITY_VERSION_3, 0};
    __user_cap_data_struct caps[2]{};
    if (::syscall(SYS_capget, &header, caps) != 0) return false;
    return (caps[CAP_IPC_LOCK / 32].effective >> (CAP_IPC_LOCK % 32) & 1u) != 0;
}

}  // namespace

size_t page_bytes() {
    static const auto bytes = static_cast<size_t>(::sysconf(_SC_PAGESIZE));
    return bytes;
}

Mapping::Mapping(size_t nbytes, MappingOptions options) : nbytes_(nbytes), charged_(round_up(nbytes, page_bytes())) {
    if (charged_ < nbytes) throw std::system_error(ENOMEM, std::generic_category(), "mmap");
    if (charged_ == 0) return;
    const bool huge = options.huge_pages && charged_ >= kHugeBytes;
    data_ = map_aligned(charged_, huge ? kHugeBytes : page_bytes());
    // Only whole huge pages are asked for: a huge page over the end would make more resident than was charged.
    if (huge) ::madvise(data_, charged_ / kHugeBytes * kHugeBytes, MADV_HUGEPAGE);
    if (options.lock) {
        if (::mlock(data_, charged_) != 0) {
            const int error = errno;
            ::munmap(data_, charged_);
            throw std::system_error(error, std::generic_category(), "mlock");
        }
        locked_ = true;
    } else if (::madvise(data_, charged_, MADV_POPULATE_WRITE) != 0) {
        if (errno == ENOMEM || errno == EFAULT) {
            ::munmap(data_, charged_);
            throw std::system_error(ENOMEM, std::generic_category(), "mmap");
        }
        for (size_t i = 0; i < charged_; i += page_bytes()) const_cast<volatile char*>(data_)[i] = 0;
    }
}

Mapping::~Mapping() {
    if (data_ != nullptr) ::munmap(data_, charged_);
}

size_t Mapping::resident_bytes() const {
    if (charged_ == 0) return 0;
    std::vector<unsigned char> pages(charged_ / page_bytes());
    if (::mincore(data_, charged_, pages.data()) != 0) throw std::system_error(errno, std::generic_category(), "mincore");
    return page_bytes() * static_cast<size_t>(std::count_if(pages.begin(), pages.end(), [](unsigned char p) { return p & 1; }));
}

size_t PinAllowance::limit() {
    rlimit limit{};
    if (may_lock_without_limit() || ::getrlimit(RLIMIT_MEMLOCK, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
        return kPinCeiling;
    }
    return std::min(kPinCeiling, static_cast<size_t>(limit.rlim_cur) / 4);
}

size_t PinAllowance::in_use() { return pinned_bytes.load(); }

bool PinAllowance::take(size_t nbytes) {
    const size_t ceiling = limit();
    size_t used = pinned_bytes.load();
    do {
        if (nbytes > ceiling || used > ceiling - nbytes) return false;
    } while (!pinned_bytes.compare_exchange_weak(used, used + nbytes));
    return true;
}

void PinAllowance::give_back(size_t nbytes) { pinned_bytes.fetch_sub(nbytes); }

}  // namespace zaio
