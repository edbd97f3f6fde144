#include "lane.h"

#include <signal.h>
#include <sys/prctl.h>

#include <algorithm>
#include <system_error>

namespace zaio {

Lane::Lane(const LaneConfig& config, Counters& counters) : config_(config), counters_(counters) {
    const uint32_t capacity = config.backend.queue_depth;
    blocks_.resize(capacity);
    for (uint32_t i = capacity; i > 0; --i) free_blocks_.push_back(i - 1);
    std::promise<void> ready;
    std::future<void> started = ready.get_future();
    thread_ = std::thread([this, ready = std::move(ready)]() mutable { run(std::move(ready)); });
    try {
        started.get();
    } catch (...) {
        thread_.join();
        throw;
    }
}

void Lane::stop() {
    if (!thread_.joinable()) return;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stopping_ = true;
    }
    backend_->wake();
    thread_.join();
}

void Lane::abandon() {
    thread_.detach();
    // The memory is the parent's, copied: releasing it here would unregister and unmap what no thread here ever used.
    static_cast<void>(backend_.release());
    static_cast<void>(staging_.release());
}

void Lane::submit(std::shared_ptr<Request> request, uint64_t begin, uint64_t end) {
    auto part = std::make_shared<Part>(Part{std::move(request), begin, end});
    {
        std::lock_guard<std::mutex> lock(mutex_);
        incoming_.push_back(std::move(part));
    }
    wake();
}

void Lane::forget(uint64_t file_id) {
    auto command = std::make_unique<Forget>();
    command->file_id = file_id;
    std::future<void> gone = command->gone.get_future();
    {
        std::lock_guard<std::mutex> lock(mutex_);
        if (stopping_) return;
        forgets_.push_back(std::move(command));
    }
    wake();
    gone.get();
}

void Lane::wake() {
    if (asleep_.exchange(false)) backend_->wake();
}

// The backend is made and used on this thread: a ring set up for a single issuer belongs to the thread that made it.
void Lane::run(std::promise<void> ready) {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    ::prctl(PR_SET_NAME, "zero-nvme-aio");
    try {
        backend_ = make_backend(config_.backend);
        if (config_.faults) backend_ = make_fault_backend(std::move(backend_), config_.faults);
        ready.set_value();
    } catch (...) {
        ready.set_exception(std::current_exception());
        return;
    }
    std::vector<Completion> completions(blocks_.size());
    while (true) {
        const bool more = take_incoming();
        fill();
        if (!more && waiting_.empty() && inflight_ == 0) break;
        asleep_.store(true);
        bool news;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            news = !incoming_.empty() || !forgets_.empty() || (stopping_ && more);
        }
        // Blocks that the backend refused must be offered again even if nothing completes.
        const bool wait = !news && (relaunch_.empty() || inflight_ > relaunch_.size());
        const int n = backend_->reap(completions.data(), static_cast<int>(completions.size()), wait);
        asleep_.store(false);
        for (int i = 0; i < n; ++i) {
            const Completion& completion = completions[static_cast<size_t>(i)];
            complete(static_cast<uint32_t>(completion.token), completion.result);
            // Copying out of staging takes as long as a transfer: the slot goes back to work before the next copy.
            if (staging_) fill();
        }
    }
    staging_.reset();
}

// Returns false once the lane was told to stop.
bool Lane::take_incoming() {
    std::deque<std::unique_ptr<Forget>> forgets;
    bool more;
    {
        std::lock_guard<std::mutex> lock(mutex_);
        std::move(incoming_.begin(), incoming_.end(), std::back_inserter(waiting_));
        incoming_.clear();
        forgets.swap(forgets_);
        more = !stopping_;
    }
    for (auto& forget : forgets) {
        drop_slots(forget->file_id);
        forget->gone.set_value();
    }
    return more;
}

void Lane::fill() {
    while (!relaunch_.empty()) {
        const uint32_t index = relaunch_.front();
        const size_t before = relaunch_.size();
        relaunch_.pop_front();
        launch(index);
        if (relaunch_.size() == before) return;
    }
    // Without overlap a batch is submitted, awaited as a whole, and only then followed by the next.
    if (!config_.overlap_events && inflight_ > 0) return;
    while (!waiting_.empty()) {
        const std::shared_ptr<Part> part = waiting_.front();
        if (!part->prepared && !part->request->failed()) prepare(*part);
        while (part->cursor < part->end && !part->request->failed()) {
            if (!start_block(part)) return;
        }
        waiting_.pop_front();
        part->cursor = part->end;
        finish_if_done(*part);
    }
}

bool Lane::prepare(Part& part) {
    part.prepared = true;
    Request& request = *part.request;
    part.hashed = part.cursor;
    if (request.kind == OpKind::read || (backend_->capabilities() & kMovesData) == 0) return true;
    const int error = request.file->reserve(request.offset + request.nbytes());
    if (error != 0) request.fail({error, request.offset, request.nbytes(), 0});
    return error == 0;
}

bool Lane::start_block(const std::shared_ptr<Part>& part) {
    const uint32_t own_depth = part->request->file->options().queue_depth;
    if (inflight_ >= (own_depth != 0 ? own_depth : config_.queue_depth) || free_blocks_.empty()) return false;
    Block block{};
    block.staging = -1;
    if (!plan(*part, &block)) return false;
    if (part->request->failed()) {  // here for want of memory, or elsewhere meanwhile
        if (block.staging >= 0) staging_->give_back(block.staging);
        return true;
    }
    Request& request = *part->request;
    if (request.kind == OpKind::write) {
        bool there = true;
        if (block.staging >= 0) {
            there = request.gather(block.address, block.position, block.nbytes, request.checksum());
        } else if (request.checksum() != nullptr) {
            there = request.hash(block.position, block.nbytes);
        }
        if (!there) {
            request.fail({EFAULT, request.offset + block.position, block.nbytes, 0});
            if (block.staging >= 0) staging_->give_back(block.staging);
            return true;
        }
    }
    block.part = part;
    part->cursor += block.nbytes;
    ++part->inflight;
    ++inflight_;
    const uint32_t index = free_blocks_.back();
    free_blocks_.pop_back();
    const bool flush_now = config_.single_submit || block.staging >= 0;
    blocks_[index] = std::move(block);
    launch(index);
    // Copying the next block takes as long as moving one: let the device begin.
    if (flush_now) backend_->flush();
    return true;
}

// Decides route, address and length of the block at the cursor; false when there is no free staging slot.
bool Lane::plan(Part& part, Block* block) {
    const Request& request = *part.request;
    const File& file = *request.file;
    const uint64_t begin = request.offset + part.cursor, end = request.offset + part.end;
    const size_t index = request.segment_at(part.cursor);
    const uint64_t skip = part.cursor - request.segment_start(index);
    char* address = request.segments[index].address + skip;
    const uint64_t segment_end = std::min(end, begin + request.segments[index].nbytes - skip);
    const uint64_t size = file.options().block_bytes != 0 ? file.options().block_bytes : config_.block_bytes;
    const uint64_t cut = std::min(end, begin / size * size + size);
    block->position = part.cursor;
    block->address = address;

    const uint64_t unit = file.granularity();
    const uint64_t head_end = (begin + unit - 1) / unit * unit, whole_end = end / unit * unit;
    if (!file.direct() || begin < head_end || begin >= whole_end) {
        const uint64_t stop = !file.direct() ? cut : begin < head_end ? std::min(end, head_end) : end;
        block->nbytes = static_cast<uint32_t>(std::min(stop, segment_end) - begin);
        return true;
    }
    block->direct = true;
    const uint64_t direct_cut = std::min(std::max(cut / unit * unit, begin + unit), whole_end);
    const uint64_t run = (std::min(direct_cut, segment_end) - begin) / unit * unit;
    constexpr uint64_t kWorthItsOwnTransfer = 64 << 10;
    const bool congruent = reinterpret_cast<uintptr_t>(address) % file.memory_alignment() == 0;
    if (congruent && (begin + run == direct_cut || run >= kWorthItsOwnTransfer)) {
        block->nbytes = static_cast<uint32_t>(run);
        return true;
    }
    if (!ensure_staging(part)) return true;
    block->staging = staging_->take();
    if (block->staging < 0) return false;
    block->address = staging_->address(block->staging);
    block->nbytes = static_cast<uint32_t>(std::min<uint64_t>(direct_cut - begin, staging_->slot_bytes()));
    return true;
}

bool Lane::ensure_staging(Part& part) {
    if (staging_) return true;
    const size_t slot_bytes = std::max<size_t>(config_.block_bytes, page_bytes()) / page_bytes() * page_bytes();
    const auto wanted = static_cast<unsigned>(std::min<uint64_t>(config_.staging_bytes / slot_bytes, config_.queue_depth));
    try {
        staging_ = std::make_unique<Staging>(*backend_, slot_bytes, std::max(4u, wanted));
    } catch (const std::system_error& error) {
        part.request->fail({error.code().value(), part.request->offset + part.cursor, slot_bytes, 0});
        return false;
    }
    counters_.staging_bytes += staging_->charged_bytes();
    counters_.registered_bytes += staging_->registered_bytes();
    return true;
}

void Lane::launch(uint32_t index) {
    Block& block = blocks_[index];
    const Request& request = *block.part->request;
    const File& file = *request.file;
    BlockOp op{};
    op.kind = request.kind;
    op.fd = block.direct ? file.direct_fd() : file.buffered_fd();
    op.file_slot = file_slot(file, block.direct);
    op.buffer_index = block.staging >= 0 ? staging_->buffer_index(block.staging) : -1;
    op.addr = block.address + block.done;
    op.nbytes = block.nbytes - block.done;
    op.offset = request.offset + block.position + block.done;
    op.token = index;
    int64_t result = 0;
    switch (backend_->submit(op, &result)) {
        case Submit::queued: break;
        case Submit::done: complete(index, result); break;
        case Submit::busy: relaunch_.push_back(index); break;
    }
}

void Lane::complete(uint32_t index, int64_t result) {
    Block& block = blocks_[index];
    Request& request = *block.part->request;
    const uint64_t at = request.offset + block.position + block.done, wanted = block.nbytes - block.done;
    constexpr unsigned kRetries = 1000;
    if ((result == -EINTR || result == -EAGAIN) && ++block.retries < kRetries) {
        relaunch_.push_back(index);
        return;
    }
    if (result < 0) {
        request.fail({static_cast<int>(-result), at, wanted, 0});
    } else if (result == 0 || static_cast<uint64_t>(result) > wanted) {
        request.fail({request.kind == OpKind::read ? kEndOfFile : EIO, at, wanted, 0});
    } else {
        block.done += static_cast<uint32_t>(result);
        if (block.done < block.nbytes) return continue_block(index);
        landed(block);
    }
    retire(index);
}

// A direct transfer that stopped where no direct transfer may begin (the end of a file that shrank) goes on buffered.
void Lane::continue_block(uint32_t index) {
    Block& block = blocks_[index];
    const File& file = *block.part->request->file;
    ++counters_.continued;
    if (block.direct) {
        const uint64_t at = block.part->request->offset + block.position + block.done;
        const bool aligned = at % file.offset_alignment() == 0 &&
                             reinterpret_cast<uintptr_t>(block.address + block.done) % file.memory_alignment() == 0;
        block.direct = aligned;
    }
    relaunch_.push_back(index);
}

void Lane::landed(Block& block) {
    Part& part = *block.part;
    Request& request = *part.request;
    if (request.kind == OpKind::read) {
        if (block.staging >= 0 && !request.scatter(block.address, block.position, block.nbytes)) {
            request.fail({EFAULT, request.offset + block.position, block.nbytes, 0});
            return;
        }
        if (request.checksum() != nullptr) hash_landed(part, block.position, block.position + block.nbytes);
        counters_.bytes_read += block.nbytes;
    } else {
        counters_.bytes_written += block.nbytes;
    }
    ++counters_.blocks;
    auto& route = block.staging >= 0 ? counters_.staged_bytes : block.direct ? counters_.zero_copy_bytes : counters_.buffered_bytes;
    route += block.nbytes;
}

// Completions come in any order, the hash wants the bytes in theirs.
void Lane::hash_landed(Part& part, uint64_t begin, uint64_t end) {
    part.landed.emplace(begin, end);
    while (!part.landed.empty() && part.landed.begin()->first == part.hashed) {
        const auto first = part.landed.begin();
        if (!part.request->hash(first->first, first->second - first->first)) {
            part.request->fail({EFAULT, part.request->offset + first->first, first->second - first->first, 0});
            return;
        }
        part.hashed = first->second;
        part.landed.erase(first);
    }
}

void Lane::retire(uint32_t index) {
    Block& block = blocks_[index];
    if (block.staging >= 0) staging_->give_back(block.staging);
    const std::shared_ptr<Part> part = std::move(block.part);
    free_blocks_.push_back(index);
    --inflight_;
    --part->inflight;
    finish_if_done(*part);
}

void Lane::finish_if_done(Part& part) {
    if (part.inflight > 0 || (part.cursor < part.end && !part.request->failed())) return;
    // A failed part may still be waiting to be planned; it is finished when it is taken off the queue.
    if (!waiting_.empty() && waiting_.front().get() == &part) return;
    part.request->finish_part();
}

int32_t Lane::file_slot(const File& file, bool direct) {
    if ((backend_->capabilities() & kRegisteredFiles) == 0) return -1;
    Slots& slots = slots_[file.id()];
    bool& tried = direct ? slots.tried_direct : slots.tried_buffered;
    int32_t& slot = direct ? slots.direct : slots.buffered;
    if (!tried) slot = backend_->register_file(direct ? file.direct_fd() : file.buffered_fd());
    tried = true;
    return slot;
}

void Lane::drop_slots(uint64_t file_id) {
    const auto entry = slots_.find(file_id);
    if (entry == slots_.end()) return;
    backend_->unregister_file(entry->second.direct);
    backend_->unregister_file(entry->second.buffered);
    slots_.erase(entry);
}

}  // namespace zaio
