#include <algorithm>
#include <chrono>
#include <random>
#include <thread>
#include <unordered_map>

#include "fault.h"

namespace zaio {

std::vector<FaultRule> FaultPlan::match(bool read, bool write, bool sync, uint64_t offset) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<FaultRule> hits;
    for (size_t i = 0; i < rules_.size(); ++i) {
        const FaultRule& rule = rules_[i];
        const bool kind = (read && rule.on_read) || (write && rule.on_write) || (sync && rule.on_sync);
        if (!kind || offset < rule.min_offset) continue;
        const uint64_t index = seen_[i]++;
        if (index < rule.first || (index - rule.first) % rule.every != 0 || fired_[i] >= rule.limit) continue;
        ++fired_[i];
        hits.push_back(rule);
    }
    return hits;
}

int FaultPlan::before_sync() {
    for (const FaultRule& rule : match(false, false, true, 0)) {
        if (rule.action == FaultAction::delay) std::this_thread::sleep_for(std::chrono::microseconds(rule.delay_us));
        if (rule.action == FaultAction::fail) return rule.error;
    }
    return 0;
}

uint64_t FaultPlan::fired() const {
    std::lock_guard<std::mutex> lock(mutex_);
    uint64_t total = 0;
    for (const uint64_t n : fired_) total += n;
    return total;
}

namespace {

using Clock = std::chrono::steady_clock;

// What may be a direct transfer is cut at a sector, as devices do; a fraction above 0 always moves something.
uint32_t shortened(uint32_t nbytes, double fraction) {
    if (fraction <= 0) return 0;
    const uint32_t unit = nbytes % 512 == 0 ? 512 : 1;
    return std::max(unit, static_cast<uint32_t>(nbytes * fraction) / unit * unit);
}

class FaultBackend final : public Backend {
public:
    FaultBackend(std::unique_ptr<Backend> inner, std::shared_ptr<FaultPlan> plan)
        : inner_(std::move(inner)), plan_(std::move(plan)) {}

    const char* name() const override { return inner_->name(); }
    uint32_t capabilities() const override { return inner_->capabilities(); }
    void wake() override {
        woken_.store(true);
        inner_->wake();
    }
    void flush() override { inner_->flush(); }
    int32_t register_file(int fd) override { return inner_->register_file(fd); }
    void unregister_file(int32_t slot) override { inner_->unregister_file(slot); }
    int register_buffers(const iovec* buffers, unsigned count) override { return inner_->register_buffers(buffers, count); }
    void unregister_buffers() override { inner_->unregister_buffers(); }

    Submit submit(const BlockOp& original, int64_t* result) override {
        BlockOp op = original;
        const bool read = op.kind == OpKind::read;
        uint64_t delay_us = 0;
        for (const FaultRule& rule : plan_->match(read, !read, false, op.offset)) {
            switch (rule.action) {
                case FaultAction::fail:
                    held_.push_back({{op.token, -rule.error}, Clock::now()});
                    return Submit::queued;
                case FaultAction::shorten: op.nbytes = shortened(op.nbytes, rule.fraction); break;
                case FaultAction::delay: delay_us += rule.delay_us; break;
                case FaultAction::reorder:
                    if (!reordering_) random_.seed(rule.seed);
                    reordering_ = true;
                    break;
            }
        }
        if (op.nbytes == 0) {
            held_.push_back({{op.token, 0}, Clock::now()});
            return Submit::queued;
        }
        const Submit state = inner_->submit(op, result);
        if (state == Submit::queued) ++inflight_;
        if (state == Submit::queued && delay_us > 0) delays_[op.token] = delay_us;
        return state;
    }

    int reap(Completion* out, int capacity, bool wait) override {
        while (true) {
            collect(wait && held_.empty());
            const int count = release(out, capacity);
            if (count > 0 || !wait || woken_.exchange(false)) return count;
            if (!held_.empty()) std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
    }

private:
    struct Held {
        Completion completion;
        Clock::time_point due;
    };

    void collect(bool wait) {
        Completion buffer[64];
        const int n = inner_->reap(buffer, 64, wait);
        for (int i = 0; i < n; ++i) {
            --inflight_;
            Clock::time_point due = Clock::now();
            const auto delayed = delays_.find(buffer[i].token);
            if (delayed != delays_.end()) {
                due += std::chrono::microseconds(delayed->second);
                delays_.erase(delayed);
            }
            held_.push_back({buffer[i], due});
        }
    }

    int release(Completion* out, int capacity) {
        // Reordering needs something to shuffle: completions wait until nothing more is on its way.
        if (reordering_ && inflight_ > 0) return 0;
        if (reordering_) std::shuffle(held_.begin(), held_.end(), random_);
        const Clock::time_point now = Clock::now();
        int count = 0;
        for (size_t i = 0; i < held_.size() && count < capacity;) {
            if (held_[i].due > now) {
                ++i;
                continue;
            }
            out[count++] = held_[i].completion;
            held_.erase(held_.begin() + static_cast<std::ptrdiff_t>(i));
        }
        return count;
    }

    std::unique_ptr<Backend> inner_;
    std::shared_ptr<FaultPlan> plan_;
    std::vector<Held> held_;
    std::unordered_map<uint64_t, uint64_t> delays_;
    std::mt19937_64 random_;
    std::atomic<bool> woken_{false};
    bool reordering_ = false;
    unsigned inflight_ = 0;
};

}  // namespace

std::unique_ptr<Backend> make_fault_backend(std::unique_ptr<Backend> inner, std::shared_ptr<FaultPlan> plan) {
    return std::make_unique<FaultBackend>(std::move(inner), std::move(plan));
}

}  // namespace zaio
