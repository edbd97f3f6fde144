// A pool of pread/pwrite threads: runs everywhere.
#include <signal.h>

#include <condition_variable>
#include <deque>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "op.h"

namespace zaio {
namespace {

class ThreadsBackend final : public Backend {
public:
    ThreadsBackend(unsigned queue_depth, unsigned workers) : queue_depth_(queue_depth) {
        try {
            for (unsigned i = 0; i < workers; ++i) workers_.emplace_back([this] { work(); });
        } catch (const std::system_error& error) {
            stop();
            throw Unavailable(error.code().value(), std::string("cannot start a worker thread: ") + error.what());
        }
    }

    ~ThreadsBackend() override { stop(); }

    const char* name() const override { return "threads"; }
    uint32_t capabilities() const override { return kMovesData; }

    Submit submit(const BlockOp& op, int64_t*) override {
        if (outstanding_ == queue_depth_) return Submit::busy;
        ++outstanding_;
        {
            std::lock_guard<std::mutex> lock(mutex_);
            queue_.push_back(op);
        }
        work_ready_.notify_one();
        return Submit::queued;
    }

    int reap(Completion* out, int capacity, bool wait) override {
        std::unique_lock<std::mutex> lock(mutex_);
        if (wait) done_ready_.wait(lock, [this] { return !finished_.empty() || woken_; });
        woken_ = false;
        int count = 0;
        while (!finished_.empty() && count < capacity) {
            out[count++] = finished_.front();
            finished_.pop_front();
        }
        outstanding_ -= static_cast<unsigned>(count);
        return count;
    }

    void wake() override {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            woken_ = true;
        }
        done_ready_.notify_one();
    }

private:
    static int64_t transfer(const BlockOp& op) {
        const auto offset = static_cast<off_t>(op.offset);
        const ssize_t n = op.kind == OpKind::read ? ::pread(op.fd, op.addr, op.nbytes, offset)
                                                  : ::pwrite(op.fd, op.addr, op.nbytes, offset);
        return n < 0 ? -errno : n;
    }

    void work() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_BLOCK, &all, nullptr);
        std::unique_lock<std::mutex> lock(mutex_);
        while (true) {
            work_ready_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
            if (queue_.empty()) return;
            const BlockOp op = queue_.front();
            queue_.pop_front();
            lock.unlock();
            const int64_t result = transfer(op);
            lock.lock();
            finished_.push_back({op.token, result});
            done_ready_.notify_one();
        }
    }

    void stop() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
        }
        work_ready_.notify_all();
        for (auto& worker : workers_) worker.join();
    }

    const unsigned queue_depth_;
    unsigned outstanding_ = 0;  // touched by the lane only
    std::mutex mutex_;
    std::condition_variable work_ready_, done_ready_;
    std::deque<BlockOp> queue_;
    std::deque<Completion> finished_;
    bool stopping_ = false, woken_ = false;
    std::vector<std::thread> workers_;
};

}  // namespace

std::unique_ptr<Backend> make_threads_backend(const BackendConfig& config) {
    return std::make_unique<ThreadsBackend>(config.queue_depth, config.workers);
}

}  // namespace zaio
