// Completes every transfer at once and moves nothing: what remains is the cost of the framework. Also the shortest example
// of a backend.
#include <condition_variable>
#include <mutex>

#include "op.h"

namespace zaio {
namespace {

class NullBackend final : public Backend {
public:
    const char* name() const override { return "null"; }
    uint32_t capabilities() const override { return 0; }

    Submit submit(const BlockOp& op, int64_t* result) override {
        *result = op.nbytes;
        return Submit::done;
    }

    int reap(Completion*, int, bool wait) override {
        std::unique_lock<std::mutex> lock(mutex_);
        if (wait) ready_.wait(lock, [this] { return woken_; });
        woken_ = false;
        return 0;
    }

    void wake() override {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            woken_ = true;
        }
        ready_.notify_one();
    }

private:
    std::mutex mutex_;
    std::condition_variable ready_;
    bool woken_ = false;
};

}  // namespace

std::unique_ptr<Backend> make_null_backend(const BackendConfig&) { return std::make_unique<NullBackend>(); }

}  // namespace zaio
