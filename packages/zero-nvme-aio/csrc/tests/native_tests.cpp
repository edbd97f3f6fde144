// The engine without Python, for the sanitizers: many threads, every backend, faults, closing in the middle.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "engine.h"
#include "memory.h"

using namespace zaio;

namespace {

int failures = 0;

void expect(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "FAILED: %s\n", what);
    ++failures;
}

OpenOptions read_write() {
    OpenOptions options;
    options.writable = options.create = true;
    return options;
}

void wait(const std::shared_ptr<Request>& request) {
    while (!request->wait_for(std::chrono::seconds(1))) {
    }
}

EngineConfig config_for(const std::string& backend, uint32_t threads) {
    EngineConfig config;
    config.backend = backend;
    config.threads = threads;
    config.block_bytes = 64 << 10;
    config.queue_depth = 8;
    return config;
}

void fill(char* data, size_t nbytes, unsigned seed) {
    std::minstd_rand random(seed + 1);
    for (size_t i = 0; i < nbytes; ++i) data[i] = static_cast<char>(random() >> 8);
}

// Each thread writes and reads ranges of its own in one file, from memory at any alignment.
void worker(Engine& engine, const std::shared_ptr<File>& file, unsigned number) {
    constexpr size_t kSpan = 1 << 20;
    Mapping source(kSpan + 4096, {}), target(kSpan + 4096, {});
    fill(source.data(), source.nbytes(), number);
    std::minstd_rand random(number + 7);
    for (int i = 0; i < 60; ++i) {
        const size_t size = random() % 300000 + 1, offset = random() % (kSpan - size), shift = random() % 2 ? random() % 4096 : 0;
        const uint64_t at = number * uint64_t{kSpan} + offset;
        char* from = source.data() + shift;
        char* to = target.data() + (shift * 7) % 4096;
        auto written = engine.submit(OpKind::write, file, {{from, size / 2}, {from + size / 2, size - size / 2}}, at, true);
        wait(written);
        auto read = engine.submit(OpKind::read, file, {{to, size}}, at, true);
        if (i % 10 == 0) engine.sync(*file);
        wait(read);
        expect(!written->failure() && !read->failure(), "a transfer ends well");
        expect(std::memcmp(from, to, size) == 0, "what was written is read");
        expect(written->checksum()->digest() == read->checksum()->digest(), "checksums agree");
    }
}

void many_threads(const std::string& folder, const std::string& backend, std::shared_ptr<FaultPlan> faults, uint32_t lanes) {
    EngineConfig config = config_for(backend, lanes);
    config.faults = std::move(faults);
    Engine engine(config);
    auto file = engine.open(folder + "/native", read_write());
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < 4; ++i) threads.emplace_back([&, i] { worker(engine, file, i); });
    for (auto& thread : threads) thread.join();
    engine.release(file);
}

// Submitting, cancelling, waiting and closing from different threads at once.
void close_in_the_middle(const std::string& folder, const std::string& backend) {
    for (int round = 0; round < 20; ++round) {
        Engine engine(config_for(backend, 2));
        auto file = engine.open(folder + "/closing", read_write());
        Mapping data(4 << 20, {});
        std::vector<std::shared_ptr<Request>> requests;
        std::thread closer;
        for (int i = 0; i < 8; ++i) {
            try {
                requests.push_back(engine.submit(OpKind::write, file, {{data.data() + i, data.nbytes() - 8}}, 0, false));
                if (i % 3 == 0) engine.cancel(*requests.back());
            } catch (const EngineGone&) {
                break;
            }
            if (i == 3) closer = std::thread([&] { round % 2 == 0 ? engine.close() : engine.release(file); });
        }
        closer.join();
        for (const auto& request : requests) wait(request);
        engine.close();
        for (const auto& request : requests) expect(request->done(), "closing finishes what was submitted");
    }
}

void faulty(const std::string& folder, const std::string& backend) {
    const FaultRule shorten{FaultAction::shorten, true, true, false, 0, 3, ~0ull, 0, 0, 0.4, 0, 0};
    const FaultRule reorder{FaultAction::reorder, true, true, false, 0, 1, ~0ull, 0, 0, 1.0, 0, 5};
    const FaultRule delay{FaultAction::delay, true, true, false, 0, 9, ~0ull, 0, 0, 1.0, 300, 0};
    many_threads(folder, backend, std::make_shared<FaultPlan>(std::vector<FaultRule>{shorten, reorder, delay}), 1);
    const FaultRule fail{FaultAction::fail, true, true, true, 1, 2, ~0ull, 0, EIO, 1.0, 0, 0};
    EngineConfig config = config_for(backend, 1);
    config.faults = std::make_shared<FaultPlan>(std::vector<FaultRule>{fail});
    Engine engine(config);
    auto file = engine.open(folder + "/faulty", read_write());
    Mapping data(1 << 20, {});
    for (int i = 0; i < 20; ++i) {
        auto request = engine.submit(OpKind::write, file, {{data.data() + i, data.nbytes() - 32}}, 3, false);
        wait(request);
        expect(request->failure().error == EIO, "a failing device is reported");
    }
}

}  // namespace

int main(int argc, char** argv) {
    const std::string folder = argc > 1 ? argv[1] : ".";
    for (const Attempt& attempt : probe_backends()) {
        if (!attempt.reason.empty()) {
            std::printf("%s does not run here: %s\n", attempt.name.c_str(), attempt.reason.c_str());
            continue;
        }
        many_threads(folder, attempt.name, nullptr, 1);
        many_threads(folder, attempt.name, nullptr, 2);
        close_in_the_middle(folder, attempt.name);
        faulty(folder, attempt.name);
        std::printf("%s: done\n", attempt.name.c_str());
    }
    expect(PinAllowance::in_use() == 0, "no memory stays registered");
    return failures == 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}
