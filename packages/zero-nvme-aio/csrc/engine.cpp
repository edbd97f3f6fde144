#include "engine.h"

#include <unistd.h>

#include <algorithm>

namespace zaio {
namespace {

constexpr const char* kPreference[] = {"io_uring", "libaio", "threads"};

// Rings hold at least this many entries, so that a file may bring a deeper queue than the engine's default.
constexpr uint32_t kLaneCapacity = 256;

constexpr uint32_t kWorkers = 8;  // of the "threads" backend

// Two lanes keep a device busy while one of them copies; more only take processor time from others.
uint32_t default_lanes() { return std::clamp(std::thread::hardware_concurrency(), 1u, 2u); }

// Bounce buffers of one engine, over all its lanes: deep enough for a device, small enough to stay in the last-level cache.
// A ring of 32 MiB costs half as much processor time again.
constexpr uint64_t kStagingBytes = 8 << 20;

}  // namespace

Engine::Engine(const EngineConfig& config) : config_(config), owner_pid_(::getpid()) {
    if (config.backend != "auto") {
        start_lanes(config.backend);
        return;
    }
    for (const char* name : kPreference) {
        try {
            start_lanes(name);
            return;
        } catch (const Unavailable& error) {
            attempts_.push_back({name, error.what(), error.error});
            lanes_.clear();
        }
    }
    throw Unavailable(ENOSYS, "no backend runs here; the last reason was: " + attempts_.back().reason);
}

Engine::~Engine() { close(); }

void Engine::start_lanes(const std::string& backend) {
    const bool pooled = backend == "threads";
    LaneConfig lane;
    threads_ = config_.threads != 0 ? config_.threads : pooled ? kWorkers : default_lanes();
    lane.backend = {backend, std::max(config_.queue_depth, kLaneCapacity), threads_};
    lane.queue_depth = config_.queue_depth;
    lane.block_bytes = config_.block_bytes;
    lane.staging_bytes = kStagingBytes / (pooled ? 1 : threads_);
    lane.single_submit = config_.single_submit;
    lane.overlap_events = config_.overlap_events;
    lane.faults = config_.faults;
    for (uint32_t i = 0; i < (pooled ? 1 : threads_); ++i) lanes_.push_back(std::make_shared<Lane>(lane, counters_));
    backend_ = backend;
    capabilities_ = lanes_.front()->capabilities();
    attempts_.push_back({backend, "", 0});
}

bool Engine::forked() const { return ::getpid() != owner_pid_; }

void Engine::require_open() const {
    if (forked()) throw EngineGone("the engine belongs to the parent process; make a new one after fork()");
    if (closed()) throw EngineGone("the engine is closed");
}

std::shared_ptr<File> Engine::open(const std::string& path, const OpenOptions& options) {
    require_open();
    auto file = std::make_shared<File>(path, options);
    const uint32_t block = options.block_bytes != 0 ? options.block_bytes : config_.block_bytes;
    if (file->direct() && file->granularity() > std::min(block, config_.block_bytes)) {
        throw OpenError(EINVAL, "direct I/O on this file needs blocks of at least " + std::to_string(file->granularity()) +
                                    " bytes; make the engine with a larger block_bytes");
    }
    return file;
}

void Engine::release(const std::shared_ptr<File>& file) {
    if (forked()) return;
    file->wait_idle();
    for (const auto& lane : lanes()) lane->forget(file->id());
    file->close_descriptors();
}

std::shared_ptr<Request> Engine::submit(OpKind kind, const std::shared_ptr<File>& file, std::vector<Segment> segments,
                                        uint64_t offset, bool checksum) {
    require_open();
    auto request = std::make_shared<Request>(kind, file, std::move(segments), offset, checksum);
    const uint64_t nbytes = request->nbytes();
    const uint64_t block = file->options().block_bytes != 0 ? file->options().block_bytes : config_.block_bytes;
    std::lock_guard<std::mutex> lock(gate_);
    require_open();
    // A checksum is one stream over the bytes in order, so such a request stays on one lane.
    const uint64_t lanes = checksum || nbytes < 2 * block * lanes_.size() ? 1 : lanes_.size();
    if (!request->start(static_cast<unsigned>(lanes))) throw EngineGone("the file is closed");
    if (nbytes == 0) {
        request->finish_part();
        return request;
    }
    const uint32_t first = lanes_.size() == 1 ? 0 : next_lane_.fetch_add(1);
    uint64_t begin = 0;
    for (uint64_t i = 0; i < lanes; ++i) {
        const uint64_t share_end = offset + nbytes / lanes * (i + 1);
        const uint64_t end = i + 1 == lanes ? nbytes : share_end / block * block - offset;
        lanes_[(first + i) % lanes_.size()]->submit(request, begin, end);
        begin = end;
    }
    return request;
}

void Engine::cancel(Request& request) {
    request.cancel();
    if (forked()) return;
    for (const auto& lane : lanes()) lane->wake();
}

Failure Engine::sync(File& file) {
    require_open();
    if (!file.request_started()) throw EngineGone("the file is closed");
    const Failure failure = synced(file);
    file.request_finished();
    return failure;
}

Failure Engine::synced(File& file) {
    Failure failure = file.drain_writes();
    if (failure) return failure;
    if (config_.faults) failure.error = config_.faults->before_sync();
    if (!failure && (capabilities_ & kMovesData) != 0 && ::fsync(file.buffered_fd()) != 0) failure.error = errno;
    return failure;
}

std::vector<std::shared_ptr<Lane>> Engine::lanes() {
    std::lock_guard<std::mutex> lock(gate_);
    return lanes_;
}

void Engine::close() {
    if (forked()) {
        if (!closed_.exchange(true)) {
            for (const auto& lane : lanes_) lane->abandon();
        }
        return;
    }
    std::lock_guard<std::mutex> closing(closing_);
    std::vector<std::shared_ptr<Lane>> lanes;
    {
        std::lock_guard<std::mutex> lock(gate_);
        closed_.store(true);
        lanes.swap(lanes_);
    }
    for (const auto& lane : lanes) lane->stop();
}

std::vector<Attempt> probe_backends() {
    std::vector<Attempt> attempts;
    for (const char* name : kPreference) {
        try {
            make_backend({name, 8, 1});
            attempts.push_back({name, "", 0});
        } catch (const Unavailable& error) {
            attempts.push_back({name, error.what(), error.error});
        }
    }
    return attempts;
}

Registration probe_registration() {
    const std::unique_ptr<Backend> backend = make_backend({"io_uring", 8, 1});
    const Staging staging(*backend, 1 << 20, 4);
    return {staging.registered_bytes(), staging.registration_error()};
}

}  // namespace zaio
