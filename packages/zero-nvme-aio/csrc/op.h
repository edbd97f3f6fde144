// The narrow waist: what a lane asks of a backend. Everything else in this folder is either above it or below it.
#pragma once

#include <sys/uio.h>

#include <cerrno>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace zaio {

enum class OpKind : uint8_t { read, write };

// One transfer of at most one block. `addr` stays valid until the completion with the same token was reaped.
struct BlockOp {
    OpKind kind;
    int fd;
    int32_t file_slot;     // from register_file, or -1
    int32_t buffer_index;  // index into the registered buffers, or -1
    void* addr;
    uint32_t nbytes;
    uint64_t offset;
    uint64_t token;
};

// `result` is a byte count or a negative errno, as the kernel gave it: nothing below the lane interprets it.
struct Completion {
    uint64_t token;
    int64_t result;
};

// done: *result is final. queued: a completion will follow. busy: no room, reap first.
enum class Submit : uint8_t { done, queued, busy };

enum Capability : uint32_t {
    kRegisteredFiles = 1u << 0,
    kRegisteredBuffers = 1u << 1,
    kBatchedSubmit = 1u << 2,
    kMovesData = 1u << 3,
};

// A backend belongs to one lane: every call comes from that lane's thread, except wake().
class Backend {
public:
    virtual ~Backend() = default;

    virtual const char* name() const = 0;
    virtual uint32_t capabilities() const = 0;

    virtual Submit submit(const BlockOp& op, int64_t* result) = 0;
    // Hands what was queued to the kernel now, without collecting completions.
    virtual void flush() {}
    // Hands over what was queued and collects completions; with `wait` it sleeps until there is one or wake().
    virtual int reap(Completion* out, int capacity, bool wait) = 0;
    virtual void wake() = 0;

    virtual int32_t register_file(int) { return -1; }
    virtual void unregister_file(int32_t) {}
    // Returns 0 or a negative errno; called at most once.
    virtual int register_buffers(const iovec*, unsigned) { return -EOPNOTSUPP; }
    virtual void unregister_buffers() {}
};

// Why a backend cannot run here; `what()` is a sentence for the user.
class Unavailable : public std::runtime_error {
public:
    Unavailable(int error, const std::string& sentence) : std::runtime_error(sentence), error(error) {}
    int error;
};

struct BackendConfig {
    std::string name;
    unsigned queue_depth;
    unsigned workers;  // threads backend only
};

std::unique_ptr<Backend> make_uring_backend(const BackendConfig& config);
std::unique_ptr<Backend> make_libaio_backend(const BackendConfig& config);
std::unique_ptr<Backend> make_threads_backend(const BackendConfig& config);
std::unique_ptr<Backend> make_null_backend(const BackendConfig& config);

// Makes the backend that `config.name` names; throws Unavailable.
std::unique_ptr<Backend> make_backend(const BackendConfig& config);

}  // namespace zaio
