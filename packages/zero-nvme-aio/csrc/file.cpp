// [Note: who owns a page]
// The kernel keeps direct and buffered I/O coherent only when they do not meet in one page of the page cache: a buffered
// write that fills its page from the device while a direct write to the same page is under way puts the old bytes back.
// So a request sends a page through direct I/O only when it covers the whole page. Two requests over disjoint bytes then
// never meet in a page by different routes. Read-ahead is switched off on the buffered descriptor for the same reason.
#include "file.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include "memory.h"

namespace zaio {
namespace {

constexpr uint32_t kStatxDioAlign = 0x2000;
constexpr uint64_t kReserveFrom = 64 << 10;  // smaller requests are not worth an extra call

// struct statx of the kernel, which is younger than the C library's on build images.
struct Statx {
    uint32_t mask;
    unsigned char before_dio[148];
    uint32_t dio_mem_align;
    uint32_t dio_offset_align;
    unsigned char after_dio[96];
};
static_assert(sizeof(Statx) == 256, "struct statx has 256 bytes");

uint64_t next_id() {
    static std::atomic<uint64_t> last{0};
    return ++last;
}

bool kernel_reports_alignment() {
    utsname name{};
    int major = 0, minor = 0;
    if (::uname(&name) != 0 || std::sscanf(name.release, "%d.%d", &major, &minor) != 2) return true;
    return major > 6 || (major == 6 && minor >= 1);
}

bool lives_in_memory(int fd) {
    struct statfs info {};
    return ::fstatfs(fd, &info) == 0 && (info.f_type == TMPFS_MAGIC || info.f_type == RAMFS_MAGIC);
}

int open_flags(const OpenOptions& options) {
    int flags = O_CLOEXEC | O_NOCTTY;
    flags |= options.readable && options.writable ? O_RDWR : options.writable ? O_WRONLY : O_RDONLY;
    if (options.create) flags |= O_CREAT;
    if (options.truncate) flags |= O_TRUNC;
    return flags;
}

// Before open(): opening a pipe would block, opening a terminal has effects.
void require_storage(const std::string& path) {
    struct stat info {};
    if (::stat(path.c_str(), &info) != 0) return;
    if (S_ISDIR(info.st_mode)) throw OpenError(EISDIR, "it is a directory");
    if (!S_ISREG(info.st_mode) && !S_ISBLK(info.st_mode)) throw OpenError(EINVAL, "it is neither a file nor a block device");
}

}  // namespace

File::File(const std::string& path, const OpenOptions& options) : id_(next_id()), path_(path), options_(options) {
    require_storage(path);
    try {
        open_descriptors(open_flags(options));
    } catch (...) {
        close_descriptors();
        throw;
    }
    reserved_ = size();
    reservable_ = options.preallocate && direct();
}

File::~File() { close_descriptors(); }

void File::close_descriptors() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (direct_fd_ >= 0) ::close(direct_fd_);
    if (buffered_fd_ >= 0) ::close(buffered_fd_);
    direct_fd_ = buffered_fd_ = -1;
}

void File::open_descriptors(int flags) {
    buffered_fd_ = ::open(path_.c_str(), flags, 0666);
    if (buffered_fd_ < 0) throw OpenError(errno, std::strerror(errno));
    struct stat info {};
    if (::fstat(buffered_fd_, &info) != 0) throw OpenError(errno, std::strerror(errno));
    if (S_ISDIR(info.st_mode)) throw OpenError(EISDIR, "it is a directory");
    ::posix_fadvise(buffered_fd_, 0, 0, POSIX_FADV_RANDOM);
    if (options_.direct == Direct::never) {
        direct_reason_ = "buffered I/O was asked for";
        return;
    }
    choose_direct(flags & ~(O_CREAT | O_TRUNC));
    if (!direct() && options_.direct == Direct::always) throw OpenError(EINVAL, "direct I/O is not possible: " + direct_reason_);
}

void File::choose_direct(int flags) {
    if (!direct_alignment(&direct_reason_)) return;
    direct_fd_ = ::open(path_.c_str(), flags | O_DIRECT);
    if (direct_fd_ < 0) {
        direct_reason_ = std::string("open with O_DIRECT: ") + std::strerror(errno);
        return;
    }
    struct stat first {}, second {};
    if (::fstat(buffered_fd_, &first) != 0 || ::fstat(direct_fd_, &second) != 0) throw OpenError(errno, std::strerror(errno));
    if (first.st_dev != second.st_dev || first.st_ino != second.st_ino) {
        throw OpenError(ESTALE, "the path was replaced by another file while it was being opened");
    }
    granularity_ = std::max<uint64_t>(page_bytes(), offset_alignment_);
}

bool File::direct_alignment(std::string* why) {
    Statx info{};
    if (::syscall(SYS_statx, buffered_fd_, "", AT_EMPTY_PATH, kStatxDioAlign, &info) == 0 && (info.mask & kStatxDioAlign) != 0) {
        if (info.dio_mem_align == 0 || info.dio_offset_align == 0) {
            *why = "the file system does not do direct I/O on this file";
            return false;
        }
        memory_alignment_ = info.dio_mem_align;
        offset_alignment_ = info.dio_offset_align;
        *why = "statx reports alignment " + std::to_string(memory_alignment_) + " for memory, " +
               std::to_string(offset_alignment_) + " for offsets";
        return true;
    }
    if (lives_in_memory(buffered_fd_)) {
        *why = "the file lives in memory (tmpfs)";
        return false;
    }
    if (kernel_reports_alignment()) {
        *why = "the file system does not report an alignment for direct I/O";
        return false;
    }
    struct stat info_old {};
    if (::fstat(buffered_fd_, &info_old) != 0) throw OpenError(errno, std::strerror(errno));
    memory_alignment_ = offset_alignment_ = static_cast<uint32_t>(info_old.st_blksize);
    *why = "the kernel is too old to report an alignment, the file system's block size " +
           std::to_string(memory_alignment_) + " is used";
    return true;
}

uint64_t File::size() const {
    std::lock_guard<std::mutex> lock(mutex_);
    const off_t end = ::lseek(buffered_fd_, 0, SEEK_END);
    return end < 0 ? 0 : static_cast<uint64_t>(end);
}

int File::reserve(uint64_t end) {
    std::lock_guard<std::mutex> lock(reserve_mutex_);
    if (!reservable_ || end <= reserved_ || end - reserved_ < kReserveFrom) return 0;
    int error = 0;
    do {
        error = ::fallocate(buffered_fd_, 0, static_cast<off_t>(reserved_), static_cast<off_t>(end - reserved_)) == 0 ? 0 : errno;
    } while (error == EINTR);
    if (error == EOPNOTSUPP || error == ENOSYS || error == ENODEV || error == EPERM) {
        reservable_ = false;
        return 0;
    }
    if (error == 0) reserved_ = end;
    return error;
}

uint64_t File::write_started() {
    std::lock_guard<std::mutex> lock(mutex_);
    ++pending_writes_[epoch_];
    return epoch_;
}

void File::write_finished(uint64_t epoch, const Failure& failure) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failure && !first_failure_) first_failure_ = failure;
    const auto entry = pending_writes_.find(epoch);
    if (--entry->second == 0) pending_writes_.erase(entry);
    changed_.notify_all();
}

Failure File::drain_writes() {
    std::unique_lock<std::mutex> lock(mutex_);
    const uint64_t epoch = epoch_++;
    changed_.wait(lock, [&] { return pending_writes_.empty() || pending_writes_.begin()->first > epoch; });
    const Failure failure = first_failure_;
    first_failure_ = Failure{};
    return failure;
}

bool File::request_started() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!closing_) ++requests_;
    return !closing_;
}

void File::request_finished() {
    std::lock_guard<std::mutex> lock(mutex_);
    --requests_;
    changed_.notify_all();
}

void File::wait_idle() {
    std::unique_lock<std::mutex> lock(mutex_);
    closing_ = true;
    changed_.wait(lock, [this] { return requests_ == 0; });
}

}  // namespace zaio
