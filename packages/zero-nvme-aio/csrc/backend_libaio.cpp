// Linux native AIO by raw system calls. One eventfd carries both completions and wake-ups, so one blocking read waits for
// whichever comes first.
#include <linux/aio_abi.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <ctime>
#include <vector>

#include "event_fd.h"
#include "op.h"

namespace zaio {
namespace {

constexpr unsigned kSettleMicroseconds = 200'000;

std::string setup_reason(int error) {
    switch (error) {
        case ENOSYS: return "io_setup: the kernel was built without native AIO";
        case EPERM: return "io_setup: not permitted (a container's seccomp profile)";
        case EAGAIN: return "io_setup: the system-wide limit fs.aio-max-nr is used up";
        default: return std::string("io_setup: ") + std::strerror(error);
    }
}

class LibaioBackend final : public Backend {
public:
    explicit LibaioBackend(unsigned queue_depth) : kernel_has_(queue_depth, false), blocks_(queue_depth), events_(queue_depth) {
        event_fd_ = ::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (event_fd_ < 0) throw Unavailable(errno, setup_reason(errno));
        if (::syscall(SYS_io_setup, queue_depth, &context_) != 0) {
            const int error = errno;
            ::close(event_fd_);
            throw Unavailable(error, setup_reason(error));
        }
        // A filter may allow io_setup and refuse what comes after it.
        timespec now{0, 0};
        if (::syscall(SYS_io_submit, context_, 0L, nullptr) != 0 ||
            ::syscall(SYS_io_getevents, context_, 0L, 0L, nullptr, &now) < 0) {
            const int error = errno;
            ::syscall(SYS_io_destroy, context_);
            ::close(event_fd_);
            throw Unavailable(error, std::string("io_submit, io_getevents: ") + std::strerror(error) +
                                         " (a container's seccomp profile allows io_setup alone)");
        }
        for (auto& block : blocks_) free_.push_back(&block);
        batch_.reserve(queue_depth);
    }

    ~LibaioBackend() override {
        if (refused_ == 0) ::syscall(SYS_io_destroy, context_);
        ::close(event_fd_);
    }

    const char* name() const override { return "libaio"; }
    uint32_t capabilities() const override { return kBatchedSubmit | kMovesData; }

    Submit submit(const BlockOp& op, int64_t* result) override {
        if (refused_ != 0) {
            *result = refused_;
            return Submit::done;
        }
        if (free_.empty()) return Submit::busy;
        iocb* block = free_.back();
        free_.pop_back();
        std::memset(block, 0, sizeof *block);
        block->aio_data = op.token;
        block->aio_lio_opcode = op.kind == OpKind::read ? IOCB_CMD_PREAD : IOCB_CMD_PWRITE;
        block->aio_fildes = static_cast<uint32_t>(op.fd);
        block->aio_buf = reinterpret_cast<uint64_t>(op.addr);
        block->aio_nbytes = op.nbytes;
        block->aio_offset = static_cast<int64_t>(op.offset);
        block->aio_flags = IOCB_FLAG_RESFD;
        block->aio_resfd = static_cast<uint32_t>(event_fd_);
        batch_.push_back(block);
        return Submit::queued;
    }

    // io_submit takes a prefix of the batch; an entry that it refuses for its own sake is completed with that error.
    void flush() override {
        size_t taken = 0;
        while (taken < batch_.size()) {
            const long n = ::syscall(SYS_io_submit, context_, batch_.size() - taken, batch_.data() + taken);
            if (n > 0) {
                for (long i = 0; i < n; ++i) kernel_has_[index_of(batch_[taken + static_cast<size_t>(i)])] = true;
                taken += static_cast<size_t>(n);
                inflight_ += static_cast<size_t>(n);
                continue;
            }
            if (n < 0 && (errno == EAGAIN || errno == EINTR)) break;
            iocb* refused = batch_[taken++];
            refused_ops_.push_back({refused->aio_data, n < 0 ? -errno : -EIO});
            free_.push_back(refused);
        }
        batch_.erase(batch_.begin(), batch_.begin() + static_cast<std::ptrdiff_t>(taken));
    }

    int reap(Completion* out, int capacity, bool wait) override {
        flush();
        const int count = collect(out, capacity);
        if (count > 0 || !wait) return count;
        // A batch that the kernel refused for want of resources must be offered again although nothing completes.
        sleep_until_rung(event_fd_, batch_.empty() ? kLongestSleepMilliseconds : 1);
        uint64_t ignored;
        [[maybe_unused]] const ssize_t n = ::read(event_fd_, &ignored, sizeof ignored);
        return collect(out, capacity);
    }

    void wake() override { ring(event_fd_); }

private:
    int collect(Completion* out, int capacity) {
        int count = 0;
        while (!refused_ops_.empty() && count < capacity) {
            out[count++] = refused_ops_.back();
            refused_ops_.pop_back();
        }
        const size_t limit = std::min(events_.size(), static_cast<size_t>(capacity - count));
        if (limit == 0 || inflight_ == 0) return count;
        timespec now{0, 0};
        const long n = ::syscall(SYS_io_getevents, context_, 0L, static_cast<long>(limit), events_.data(), &now);
        if (n < 0 && errno != EINTR) {
            give_up(-errno);
            return count;
        }
        for (long i = 0; i < n; ++i) {
            const io_event& event = events_[static_cast<size_t>(i)];
            out[count++] = {event.data, event.res};
            iocb* block = reinterpret_cast<iocb*>(event.obj);
            kernel_has_[index_of(block)] = false;
            free_.push_back(block);
            --inflight_;
        }
        return count;
    }

    size_t index_of(const iocb* block) const { return static_cast<size_t>(block - blocks_.data()); }

    // The kernel refuses io_getevents from now on (a filter set after the engine was made). io_destroy waits for what
    // the device has; then everything that was submitted ends with the error.
    void give_up(int error) {
        refused_ = error;
        if (::syscall(SYS_io_destroy, context_) != 0) ::usleep(kSettleMicroseconds);
        for (size_t i = 0; i < blocks_.size(); ++i) {
            if (!kernel_has_[i]) continue;
            kernel_has_[i] = false;
            refused_ops_.push_back({blocks_[i].aio_data, error});
            free_.push_back(&blocks_[i]);
        }
        inflight_ = 0;
        wake();
    }

    aio_context_t context_ = 0;
    int refused_ = 0;  // the error with which the kernel refuses io_getevents
    std::vector<bool> kernel_has_;
    int event_fd_ = -1;
    std::vector<iocb> blocks_;
    std::vector<io_event> events_;
    std::vector<iocb*> free_, batch_;
    std::vector<Completion> refused_ops_;
    size_t inflight_ = 0;
};

}  // namespace

std::unique_ptr<Backend> make_libaio_backend(const BackendConfig& config) {
    return std::make_unique<LibaioBackend>(config.queue_depth);
}

}  // namespace zaio
