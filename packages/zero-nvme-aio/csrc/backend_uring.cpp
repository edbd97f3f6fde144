// io_uring by raw system calls: registered files, registered staging buffers, one enter per batch.
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <vector>

#include "event_fd.h"
#include "op.h"
#include "uring_abi.h"

namespace zaio {
namespace {

constexpr uint64_t kWakeToken = ~0ull;
constexpr unsigned kFileSlots = 256;
constexpr unsigned kSettleMicroseconds = 200'000;

std::string setup_reason(int error) {
    switch (error) {
        case ENOSYS: return "io_uring_setup: the kernel has no io_uring (older than 5.1, or built without it)";
        case EPERM:
            return "io_uring_setup: not permitted (a container's seccomp profile, or kernel.io_uring_disabled is not 0)";
        case ENOMEM:
            return "io_uring_setup: out of memory or over the locked-memory limit (see `ulimit -l`); the limit is per user";
        case EMFILE:
        case ENFILE: return "io_uring_setup: no free file descriptor (see `ulimit -n`)";
        default: return std::string("io_uring_setup: ") + std::strerror(error);
    }
}

uint32_t load_acquire(const uint32_t* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
void store_release(uint32_t* p, uint32_t value) { __atomic_store_n(p, value, __ATOMIC_RELEASE); }

class UringBackend final : public Backend {
public:
    explicit UringBackend(unsigned queue_depth) {
        // One entry beyond the depth is for the wake-up poll.
        const int error = open_ring(queue_depth + 1);
        if (error != 0) {
            close_ring();
            throw Unavailable(-error, setup_reason(-error));
        }
        // A filter may allow io_uring_setup and refuse what comes after it.
        const int entered = uring::enter(ring_fd_, 0, 0, uring::kEnterGetEvents);
        if (entered < 0) {
            close_ring();
            throw Unavailable(-entered, std::string("io_uring_enter: ") + std::strerror(-entered) +
                                            " (a container's seccomp profile allows io_uring_setup alone)");
        }
        std::vector<int32_t> empty(kFileSlots, -1);
        files_registered_ = uring::register_op(ring_fd_, uring::kRegisterFiles, empty.data(), kFileSlots) == 0;
        slot_used_.assign(files_registered_ ? kFileSlots : 0, false);
    }

    ~UringBackend() override {
        unregister_buffers();
        close_ring();
    }

    const char* name() const override { return "io_uring"; }
    uint32_t capabilities() const override {
        return (files_registered_ ? kRegisteredFiles : 0u) | kRegisteredBuffers | kBatchedSubmit | kMovesData;
    }

    Submit submit(const BlockOp& op, int64_t* result) override {
        if (refused_ != 0) {
            *result = refused_;
            return Submit::done;
        }
        uring::Sqe* sqe = next_sqe();
        if (sqe == nullptr) return Submit::busy;
        const bool fixed = op.buffer_index >= 0;
        const bool read = op.kind == OpKind::read;
        sqe->opcode = fixed ? (read ? uring::kOpReadFixed : uring::kOpWriteFixed) : (read ? uring::kOpRead : uring::kOpWrite);
        sqe->flags = op.file_slot >= 0 ? uring::kSqeFixedFile : 0;
        sqe->fd = op.file_slot >= 0 ? op.file_slot : op.fd;
        sqe->off = op.offset;
        sqe->addr = reinterpret_cast<uint64_t>(op.addr);
        sqe->len = op.nbytes;
        sqe->buf_index = fixed ? static_cast<uint16_t>(op.buffer_index) : 0;
        sqe->user_data = op.token;
        publish_sqe();
        mark_outstanding(op.token, true);
        return Submit::queued;
    }

    void flush() override {
        if (pending_submit() > 0) enter(0, 0);
    }

    int reap(Completion* out, int capacity, bool wait) override {
        if (refused_ != 0) return reap_refused(out, capacity, wait);
        arm_wake();
        int count = drain(out, capacity);
        const bool sleep = wait && count == 0 && !woken_;
        const bool idle = outstanding_count_ == 0;
        if (sleep && idle) sleep_until_rung(event_fd_);
        if (pending_submit() > 0 || sleep || !wait) {
            enter(sleep && !idle ? 1 : 0, uring::kEnterGetEvents);
            count += drain(out + count, capacity - count);
        }
        woken_ = false;
        return count;
    }

    void wake() override { ring(event_fd_); }

    int32_t register_file(int fd) override {
        for (unsigned slot = 0; slot < slot_used_.size(); ++slot) {
            if (slot_used_[slot]) continue;
            if (update_slot(slot, fd) < 0) return -1;
            slot_used_[slot] = true;
            return static_cast<int32_t>(slot);
        }
        return -1;
    }

    void unregister_file(int32_t slot) override {
        if (slot < 0) return;
        update_slot(static_cast<unsigned>(slot), -1);
        slot_used_[static_cast<unsigned>(slot)] = false;
    }

    int register_buffers(const iovec* buffers, unsigned count) override {
        const int error = uring::register_op(ring_fd_, uring::kRegisterBuffers, buffers, count);
        buffers_registered_ = error == 0;
        return error;
    }

    void unregister_buffers() override {
        if (buffers_registered_) uring::register_op(ring_fd_, uring::kUnregisterBuffers, nullptr, 0);
        buffers_registered_ = false;
    }

private:
    // EINTR, EAGAIN and EBUSY leave the entries in the ring: the caller comes back after draining. Any other error is a
    // kernel that refuses the call from now on (a filter set after the engine was made).
    void enter(unsigned min_complete, unsigned flags) {
        const int n = uring::enter(ring_fd_, pending_submit(), min_complete, flags);
        if (n >= 0 || n == -EINTR || n == -EAGAIN || n == -EBUSY) return;
        refused_ = n;
        ::usleep(kSettleMicroseconds);  // what the device has already may still land
    }

    void mark_outstanding(uint64_t token, bool outstanding) {
        if (token >= outstanding_.size()) outstanding_.resize(token + 1, false);
        if (outstanding_[token] == outstanding) return;
        outstanding_[token] = outstanding;
        outstanding_count_ += outstanding ? 1 : -1;
    }

    // Ends everything that was submitted, with its result where there is one, then sleeps until it is woken.
    int reap_refused(Completion* out, int capacity, bool wait) {
        int count = drain(out, capacity);
        for (uint64_t token = 0; token < outstanding_.size() && count < capacity; ++token) {
            if (!outstanding_[token]) continue;
            mark_outstanding(token, false);
            out[count++] = {token, refused_};
        }
        if (wait && count == 0) sleep_until_rung(event_fd_);
        uint64_t ignored;
        [[maybe_unused]] const ssize_t n = ::read(event_fd_, &ignored, sizeof ignored);
        return count;
    }

    int open_ring(unsigned entries) {
        event_fd_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (event_fd_ < 0) return -errno;
        uring::Params params{};
        params.flags = uring::kSetupClamp | uring::kSetupSingleIssuer | uring::kSetupDeferTaskrun;
        ring_fd_ = uring::setup(entries, &params);
        if (ring_fd_ == -EINVAL) {  // kernels before 6.1 know neither flag
            params = uring::Params{};
            params.flags = uring::kSetupClamp;
            ring_fd_ = uring::setup(entries, &params);
        }
        if (ring_fd_ < 0) return ring_fd_;
        const uint32_t needed = uring::kFeatSingleMmap | uring::kFeatRwCurPos;
        if ((params.features & needed) != needed) return -ENOSYS;
        return map_ring(params);
    }

    int map_ring(const uring::Params& params) {
        const size_t sq_bytes = params.sq_off.array + params.sq_entries * sizeof(uint32_t);
        const size_t cq_bytes = params.cq_off.cqes + params.cq_entries * sizeof(uring::Cqe);
        ring_bytes_ = sq_bytes > cq_bytes ? sq_bytes : cq_bytes;
        sqes_bytes_ = params.sq_entries * sizeof(uring::Sqe);
        const int flags = MAP_SHARED | MAP_POPULATE;
        void* ring = ::mmap(nullptr, ring_bytes_, PROT_READ | PROT_WRITE, flags, ring_fd_, uring::kOffSqRing);
        if (ring == MAP_FAILED) return -errno;
        ring_ = static_cast<char*>(ring);
        void* sqes = ::mmap(nullptr, sqes_bytes_, PROT_READ | PROT_WRITE, flags, ring_fd_, uring::kOffSqes);
        if (sqes == MAP_FAILED) return -errno;
        sqes_ = static_cast<uring::Sqe*>(sqes);
        sq_head_ = field(params.sq_off.head);
        sq_tail_ = field(params.sq_off.tail);
        sq_mask_ = *field(params.sq_off.ring_mask);
        sq_entries_ = params.sq_entries;
        uint32_t* array = field(params.sq_off.array);
        for (uint32_t i = 0; i < params.sq_entries; ++i) array[i] = i;
        cq_head_ = field(params.cq_off.head);
        cq_tail_ = field(params.cq_off.tail);
        cq_mask_ = *field(params.cq_off.ring_mask);
        cqes_ = reinterpret_cast<uring::Cqe*>(ring_ + params.cq_off.cqes);
        return 0;
    }

    void close_ring() {
        if (sqes_ != nullptr) ::munmap(sqes_, sqes_bytes_);
        if (ring_ != nullptr) ::munmap(ring_, ring_bytes_);
        if (ring_fd_ >= 0) ::close(ring_fd_);
        if (event_fd_ >= 0) ::close(event_fd_);
    }

    uint32_t* field(uint32_t offset) { return reinterpret_cast<uint32_t*>(ring_ + offset); }

    unsigned pending_submit() const { return *sq_tail_ - load_acquire(sq_head_); }

    uring::Sqe* next_sqe() {
        if (pending_submit() >= sq_entries_) return nullptr;
        uring::Sqe* sqe = &sqes_[*sq_tail_ & sq_mask_];
        std::memset(sqe, 0, sizeof *sqe);
        return sqe;
    }

    void publish_sqe() { store_release(sq_tail_, *sq_tail_ + 1); }

    void arm_wake() {
        if (wake_armed_) return;
        uring::Sqe* sqe = next_sqe();
        if (sqe == nullptr) return;
        sqe->opcode = uring::kOpPollAdd;
        sqe->fd = event_fd_;
        sqe->op_flags = POLLIN;
        sqe->user_data = kWakeToken;
        publish_sqe();
        wake_armed_ = true;
    }

    int drain(Completion* out, int capacity) {
        int count = 0;
        uint32_t head = *cq_head_;
        const uint32_t tail = load_acquire(cq_tail_);
        while (head != tail && count < capacity) {
            const uring::Cqe& cqe = cqes_[head & cq_mask_];
            if (cqe.user_data == kWakeToken) {
                uint64_t ignored;
                [[maybe_unused]] const ssize_t n = ::read(event_fd_, &ignored, sizeof ignored);
                wake_armed_ = false;
                woken_ = true;
            } else {
                mark_outstanding(cqe.user_data, false);
                out[count++] = {cqe.user_data, cqe.res};
            }
            ++head;
        }
        store_release(cq_head_, head);
        return count;
    }

    int update_slot(unsigned slot, int32_t fd) {
        const uring::FilesUpdate update{slot, 0, reinterpret_cast<uint64_t>(&fd)};
        return uring::register_op(ring_fd_, uring::kRegisterFilesUpdate, &update, 1);
    }

    int ring_fd_ = -1;
    int event_fd_ = -1;
    char* ring_ = nullptr;
    uring::Sqe* sqes_ = nullptr;
    size_t ring_bytes_ = 0, sqes_bytes_ = 0;
    uint32_t *sq_head_ = nullptr, *sq_tail_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
    uint32_t sq_mask_ = 0, sq_entries_ = 0, cq_mask_ = 0;
    uring::Cqe* cqes_ = nullptr;
    bool wake_armed_ = false, woken_ = false;
    int refused_ = 0;  // the error with which the kernel refuses io_uring_enter
    std::vector<bool> outstanding_;
    int outstanding_count_ = 0;
    bool files_registered_ = false, buffers_registered_ = false;
    std::vector<bool> slot_used_;
};

}  // namespace

std::unique_ptr<Backend> make_uring_backend(const BackendConfig& config) {
    return std::make_unique<UringBackend>(config.queue_depth);
}

}  // namespace zaio
