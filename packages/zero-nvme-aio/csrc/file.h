// One open file: a descriptor for direct I/O where the file system offers it, and one for the parts below a page.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>

namespace zaio {

// What went wrong with one request, in numbers; the Python layer makes the sentence.
struct Failure {
    int error = 0;          // errno, or one of the codes below
    uint64_t offset = 0;    // file offset of the transfer that failed
    uint64_t expected = 0;  // bytes asked for there
    uint64_t got = 0;       // bytes that arrived
    explicit operator bool() const { return error != 0; }
};
constexpr int kEndOfFile = -1;
constexpr int kCancelled = -2;

enum class Direct : uint8_t { automatic, never, always };

struct OpenOptions {
    bool readable = true, writable = false, create = false, truncate = false;
    Direct direct = Direct::automatic;
    uint32_t block_bytes = 0, queue_depth = 0;
    bool preallocate = true;
};

class OpenError : public std::runtime_error {
public:
    OpenError(int error, const std::string& what) : std::runtime_error(what), error(error) {}
    int error;
};

class File {
public:
    File(const std::string& path, const OpenOptions& options);
    ~File();
    File(const File&) = delete;
    File& operator=(const File&) = delete;

    // Never reused, unlike an address.
    uint64_t id() const { return id_; }
    const std::string& path() const { return path_; }
    bool direct() const { return direct_fd_ >= 0; }
    const std::string& direct_reason() const { return direct_reason_; }
    int direct_fd() const { return direct_fd_; }
    int buffered_fd() const { return buffered_fd_; }
    uint32_t memory_alignment() const { return memory_alignment_; }
    // Direct transfers begin and end at multiples of this. At least a page: see [Note: who owns a page].
    uint64_t granularity() const { return granularity_; }
    uint32_t offset_alignment() const { return offset_alignment_; }
    const OpenOptions& options() const { return options_; }
    uint64_t size() const;  // 0 when closed

    // Gives [0, end) blocks on the device; 0 or a positive errno. File systems without the call are left to allocate late.
    int reserve(uint64_t end);

    // Writes that began before a sync are waited for by it, later ones are not.
    uint64_t write_started();
    void write_finished(uint64_t epoch, const Failure& failure);
    // Waits for the writes of this epoch and returns the first failure since the last call.
    Failure drain_writes();

    // False when the file is being closed.
    bool request_started();
    void request_finished();
    // Refuses new requests and waits for those under way.
    void wait_idle();
    // After wait_idle, and after the lanes forgot the file.
    void close_descriptors();

private:
    void open_descriptors(int flags);
    void choose_direct(int flags);
    bool direct_alignment(std::string* why);

    const uint64_t id_;
    const std::string path_;
    const OpenOptions options_;
    std::string direct_reason_;
    int direct_fd_ = -1, buffered_fd_ = -1;
    uint32_t memory_alignment_ = 1, offset_alignment_ = 1;
    uint64_t granularity_ = 1;

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::map<uint64_t, uint64_t> pending_writes_;  // epoch -> writes under way
    uint64_t epoch_ = 0;
    uint64_t requests_ = 0;
    bool closing_ = false;
    Failure first_failure_;

    std::mutex reserve_mutex_;
    bool reservable_ = true;
    uint64_t reserved_ = 0;
};

}  // namespace zaio
