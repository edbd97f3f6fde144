// The engine: lanes, the choice of backend, and the routing of requests to lanes.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "lane.h"

namespace zaio {

struct EngineConfig {
    std::string backend = "auto";
    uint32_t queue_depth = 32;
    uint32_t block_bytes = 1 << 20;
    uint32_t threads = 0;  // 0: what suits the backend
    bool single_submit = false;
    bool overlap_events = true;
    std::shared_ptr<FaultPlan> faults;
};

// One backend that was tried; `reason` is empty when it runs.
struct Attempt {
    std::string name;
    std::string reason;
    int error = 0;
};

class EngineGone : public std::runtime_error {
public:
    using std::runtime_error::runtime_error;
};

class Engine {
public:
    // Throws Unavailable when a named backend does not run here.
    explicit Engine(const EngineConfig& config);
    ~Engine();

    std::shared_ptr<File> open(const std::string& path, const OpenOptions& options);
    // Waits for the file's requests, then lets every lane forget it.
    void release(const std::shared_ptr<File>& file);
    std::shared_ptr<Request> submit(OpKind kind, const std::shared_ptr<File>& file, std::vector<Segment> segments,
                                    uint64_t offset, bool checksum);
    void cancel(Request& request);
    // Waits for the file's earlier writes, then fsync. Reports the first write that failed since the last sync.
    Failure sync(File& file);
    // Finishes everything submitted and stops the lanes. Idempotent.
    void close();

    bool closed() const { return closed_.load(); }
    bool forked() const;
    const std::string& backend() const { return backend_; }
    const std::vector<Attempt>& attempts() const { return attempts_; }
    const EngineConfig& config() const { return config_; }
    uint32_t threads() const { return threads_; }
    uint32_t capabilities() const { return capabilities_; }
    const Counters& counters() const { return counters_; }

private:
    void start_lanes(const std::string& backend);
    std::vector<std::shared_ptr<Lane>> lanes();
    Failure synced(File& file);
    void require_open() const;

    const EngineConfig config_;
    const long owner_pid_;
    Counters counters_;
    std::string backend_;
    uint32_t capabilities_ = 0, threads_ = 0;
    std::vector<Attempt> attempts_;
    std::vector<std::shared_ptr<Lane>> lanes_;
    std::atomic<uint32_t> next_lane_{0};
    std::atomic<bool> closed_{false};
    std::mutex gate_;     // submit against close; held for moments only
    std::mutex closing_;  // held until everything submitted is finished
};

// Tries every backend that moves data, in the order of preference.
std::vector<Attempt> probe_backends();

// What the kernel lets this process register for io_uring now: bytes, and errno when it refused.
struct Registration {
    size_t nbytes;
    int error;
};
// Throws Unavailable where io_uring does not run.
Registration probe_registration();

}  // namespace zaio
