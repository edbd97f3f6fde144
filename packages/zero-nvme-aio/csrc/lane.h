// A lane is one progress thread with its own backend: it cuts requests into blocks, keeps the queue full, copies through
// staging where memory and file are not congruent, and continues short transfers.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <future>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "fault.h"
#include "op.h"
#include "request.h"
#include "staging.h"

namespace zaio {

struct LaneConfig {
    BackendConfig backend;
    uint32_t queue_depth = 0;  // default for files that bring none of their own
    uint32_t block_bytes = 0;
    uint64_t staging_bytes = 0;  // size of the ring of bounce buffers, but never fewer than four blocks
    bool single_submit = false;
    bool overlap_events = true;
    std::shared_ptr<FaultPlan> faults;
};

// Bytes by route, for measuring and for tests that must know which route was taken.
struct Counters {
    std::atomic<uint64_t> bytes_read{0}, bytes_written{0};
    std::atomic<uint64_t> zero_copy_bytes{0}, staged_bytes{0}, buffered_bytes{0};
    std::atomic<uint64_t> blocks{0}, continued{0};
    std::atomic<uint64_t> staging_bytes{0}, registered_bytes{0};
};

// The share of a request that one lane carries: bytes [cursor, end) are not started yet.
struct Part {
    std::shared_ptr<Request> request;
    uint64_t cursor, end;
    unsigned inflight = 0;
    bool prepared = false;
    uint64_t hashed = 0;                       // reads with a checksum: the prefix that is hashed
    std::map<uint64_t, uint64_t> landed = {};  // begin -> end of what arrived beyond it
};

class Lane {
public:
    // Starts the thread; throws Unavailable when the backend does not run here.
    Lane(const LaneConfig& config, Counters& counters);
    ~Lane() { stop(); }
    // Finishes everything submitted and ends the thread.
    void stop();
    // For the child of a fork, where the thread does not exist.
    void abandon();

    void submit(std::shared_ptr<Request> request, uint64_t begin, uint64_t end);
    // Returns when the backend no longer knows the file's descriptors. Free to race with stop().
    void forget(uint64_t file_id);
    void wake();
    uint32_t capabilities() const { return backend_->capabilities(); }

private:
    struct Block {
        std::shared_ptr<Part> part;
        char* address;
        uint64_t position;  // in the request
        uint32_t nbytes, done;
        int staging;
        bool direct;
        unsigned retries;
    };
    struct Slots {
        int32_t direct = -1, buffered = -1;
        bool tried_direct = false, tried_buffered = false;
    };
    struct Forget {
        uint64_t file_id;
        std::promise<void> gone;
    };

    void run(std::promise<void> ready);
    bool take_incoming();
    void fill();
    bool prepare(Part& part);
    bool start_block(const std::shared_ptr<Part>& part);
    bool plan(Part& part, Block* block);
    bool ensure_staging(Part& part);
    void launch(uint32_t index);
    void complete(uint32_t index, int64_t result);
    void continue_block(uint32_t index);
    void landed(Block& block);
    void hash_landed(Part& part, uint64_t begin, uint64_t end);
    void retire(uint32_t index);
    void finish_if_done(Part& part);
    int32_t file_slot(const File& file, bool direct);
    void drop_slots(uint64_t file_id);

    const LaneConfig config_;
    Counters& counters_;
    std::unique_ptr<Backend> backend_;
    std::unique_ptr<Staging> staging_;
    std::vector<Block> blocks_;
    std::vector<uint32_t> free_blocks_;
    std::deque<uint32_t> relaunch_;
    std::deque<std::shared_ptr<Part>> waiting_;
    std::unordered_map<uint64_t, Slots> slots_;
    uint32_t inflight_ = 0;

    std::mutex mutex_;
    std::deque<std::shared_ptr<Part>> incoming_;
    std::deque<std::unique_ptr<Forget>> forgets_;
    bool stopping_ = false;
    std::atomic<bool> asleep_{false};
    std::thread thread_;
};

}  // namespace zaio
