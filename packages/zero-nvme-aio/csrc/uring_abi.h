// The part of the io_uring system-call interface that the backend uses. Declared here because build images carry kernel
// headers older than io_uring; the layout is fixed by the kernel for ever.
#pragma once

#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>

namespace zaio::uring {

#if defined(__alpha__)
#error "io_uring system call numbers differ on this architecture"
#endif
constexpr long kSysSetup = 425;
constexpr long kSysEnter = 426;
constexpr long kSysRegister = 427;

struct Sqe {
    uint8_t opcode;
    uint8_t flags;
    uint16_t ioprio;
    int32_t fd;
    uint64_t off;
    uint64_t addr;
    uint32_t len;
    uint32_t op_flags;
    uint64_t user_data;
    uint16_t buf_index;
    uint16_t personality;
    int32_t splice_fd;
    uint64_t pad[2];
};
static_assert(sizeof(Sqe) == 64, "a submission entry has 64 bytes");

struct Cqe {
    uint64_t user_data;
    int32_t res;
    uint32_t flags;
};
static_assert(sizeof(Cqe) == 16, "a completion entry has 16 bytes");

struct SqOffsets {
    uint32_t head, tail, ring_mask, ring_entries, flags, dropped, array, resv1;
    uint64_t user_addr;
};

struct CqOffsets {
    uint32_t head, tail, ring_mask, ring_entries, overflow, cqes, flags, resv1;
    uint64_t user_addr;
};

struct Params {
    uint32_t sq_entries, cq_entries, flags, sq_thread_cpu, sq_thread_idle, features, wq_fd;
    uint32_t resv[3];
    SqOffsets sq_off;
    CqOffsets cq_off;
};
static_assert(sizeof(Params) == 120, "io_uring_params has 120 bytes");

struct FilesUpdate {
    uint32_t offset;
    uint32_t resv;
    uint64_t fds;
};

constexpr uint8_t kOpReadFixed = 4;
constexpr uint8_t kOpWriteFixed = 5;
constexpr uint8_t kOpPollAdd = 6;
constexpr uint8_t kOpRead = 22;
constexpr uint8_t kOpWrite = 23;

constexpr uint8_t kSqeFixedFile = 1u << 0;

constexpr uint32_t kSetupClamp = 1u << 4;
constexpr uint32_t kSetupSingleIssuer = 1u << 12;
constexpr uint32_t kSetupDeferTaskrun = 1u << 13;

constexpr uint32_t kFeatSingleMmap = 1u << 0;
constexpr uint32_t kFeatRwCurPos = 1u << 3;  // arrived with the plain READ and WRITE opcodes (5.6)

constexpr uint32_t kEnterGetEvents = 1u << 0;

constexpr unsigned kRegisterBuffers = 0;
constexpr unsigned kUnregisterBuffers = 1;
constexpr unsigned kRegisterFiles = 2;
constexpr unsigned kRegisterFilesUpdate = 6;

constexpr uint64_t kOffSqRing = 0;
constexpr uint64_t kOffSqes = 0x10000000ull;

inline int setup(unsigned entries, Params* params) {
    const long fd = ::syscall(kSysSetup, entries, params);
    return fd < 0 ? -errno : static_cast<int>(fd);
}

inline int enter(int fd, unsigned submit, unsigned min_complete, unsigned flags) {
    const long n = ::syscall(kSysEnter, fd, submit, min_complete, flags, nullptr, 0);
    return n < 0 ? -errno : static_cast<int>(n);
}

inline int register_op(int fd, unsigned opcode, const void* arg, unsigned count) {
    const long n = ::syscall(kSysRegister, fd, opcode, arg, count);
    return n < 0 ? -errno : static_cast<int>(n);
}

}  // namespace zaio::uring
