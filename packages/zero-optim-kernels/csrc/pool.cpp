#include "pool.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <system_error>
#include <thread>

#include "processors.hpp"

namespace zok {
namespace {

constexpr int kSpins = 2000;  // tens of microseconds: steps follow each other closely, and sleeping costs a wake-up

constexpr int64_t kShares = 4;  // one of these times the number of threads is what a thread takes of the rest

void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Default rounding and subnormal handling for the time of a task: a thread that flushes subnormal numbers to zero (the mode is inherited
// by the threads it starts) would make results depend on who ran an item.
class DefaultFloatMode {
public:
#if defined(__x86_64__)
    DefaultFloatMode() : saved_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(0x1f80); }
    ~DefaultFloatMode() { __builtin_ia32_ldmxcsr(saved_); }

private:
    unsigned saved_;
#elif defined(__aarch64__)
    DefaultFloatMode() : saved_(__builtin_aarch64_get_fpcr()) { __builtin_aarch64_set_fpcr(0); }
    ~DefaultFloatMode() { __builtin_aarch64_set_fpcr(saved_); }

private:
    unsigned saved_;
#endif
};

struct Job {
    void (*task)(void*, int64_t);
    void* context;
    int64_t count;
    int threads;
};

// Non-temporal stores are not ordered with the store that says that a worker has finished.
void drain_streams() {
#if defined(__x86_64__)
    __builtin_ia32_sfence();
#endif
}

// Takes a share of what is left, so that a thread goes through memory in long stretches and yet all finish together.
void work(const Job& job, std::atomic<int64_t>& next) {
    const DefaultFloatMode mode;
    for (int64_t i = next.load(std::memory_order_relaxed); i < job.count;) {
        const int64_t end = i + std::max<int64_t>(1, (job.count - i) / (kShares * job.threads));
        if (!next.compare_exchange_weak(i, end, std::memory_order_relaxed)) continue;
        for (; i < end; ++i) job.task(job.context, i);
        i = next.load(std::memory_order_relaxed);
    }
    drain_streams();
}

class Pool {
public:
    explicit Pool(pid_t owner) : owner_(owner) {}

    pid_t owner() const { return owner_; }

    void run(int threads, const Job& job) {
        std::atomic<int64_t> alone{0};
        const std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
        if (!turn.owns_lock()) return work(job, alone);
        grow(threads - 1);
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            job_ = job;
            next_.store(0, std::memory_order_relaxed);
            open_.store(std::min<int>(threads - 1, workers_), std::memory_order_relaxed);
        }
        wake_.notify_all();
        work(job, next_);
        std::unique_lock<std::mutex> lock(mutex_);
        open_.store(0, std::memory_order_relaxed);  // a worker that has not woken yet is not waited for
        for (int spin = 0; busy_ != 0 && spin < kSpins; ++spin) {
            lock.unlock();
            pause();
            lock.lock();
        }
        done_.wait(lock, [this] { return busy_ == 0; });
    }

private:
    // A thread that cannot be started (a limit of the container) leaves the pool smaller.
    void grow(int helpers) {
        helpers = std::min(helpers, kMostThreads - 1);
        try {
            for (; workers_ < helpers; ++workers_) std::thread([this] { serve(); }).detach();
        } catch (const std::system_error&) {
            return;
        }
    }

    void serve() {
        for (;;) {
            for (int spin = 0; spin < kSpins && open_.load(std::memory_order_relaxed) == 0; ++spin) pause();
            std::unique_lock<std::mutex> lock(mutex_);
            wake_.wait(lock, [this] { return open_.load(std::memory_order_relaxed) > 0; });
            open_.fetch_sub(1, std::memory_order_relaxed);
            ++busy_;
            const Job job = job_;
            lock.unlock();
            work(job, next_);
            lock.lock();
            if (--busy_ == 0) done_.notify_one();
        }
    }

    const pid_t owner_;
    std::mutex turn_;   // one call at a time owns the workers
    std::mutex mutex_;  // guards the job, busy_ and changes of open_
    std::condition_variable wake_, done_;
    int workers_ = 0;
    Job job_{};
    std::atomic<int> open_{0};  // workers that may still join the job
    int busy_ = 0;              // workers that joined and have not finished
    std::atomic<int64_t> next_{0};
};

// Never destroyed: detached workers wait in it until the process ends. A forked child has no workers and makes its own pool.
Pool& process_pool() {
    static std::atomic<Pool*> current{nullptr};
    Pool* pool = current.load(std::memory_order_acquire);
    const pid_t self = getpid();
    while (pool == nullptr || pool->owner() != self) {
        Pool* fresh = new Pool(self);
        if (current.compare_exchange_strong(pool, fresh, std::memory_order_acq_rel)) return *fresh;
        delete fresh;
    }
    return *pool;
}

}  // namespace

void parallel_for(int threads, int64_t count, void (*task)(void*, int64_t), void* context) {
    if (threads <= 0) threads = default_threads();
    if (threads > count) threads = static_cast<int>(count);
    const Job job{task, context, count, threads};
    std::atomic<int64_t> alone{0};
    if (threads <= 1) return work(job, alone);
    process_pool().run(threads, job);
}

}  // namespace zok
