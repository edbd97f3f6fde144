#include "dispatch.hpp"

#include <cstdlib>
#include <stdexcept>

namespace zok {

#if defined(__x86_64__)
namespace {

std::string lacking(std::initializer_list<std::pair<const char*, bool>> features) {
    std::string missing;
    for (const auto& feature : features)
        if (!feature.second) missing += (missing.empty() ? "this processor lacks " : ", ") + std::string(feature.first);
    return missing;
}

std::string avx2_unavailable() {
    return lacking({{"avx2", __builtin_cpu_supports("avx2") != 0},
                    {"f16c", __builtin_cpu_supports("f16c") != 0},
                    {"fma", __builtin_cpu_supports("fma") != 0}});
}

std::string avx512_unavailable() {
    return lacking({{"avx512f", __builtin_cpu_supports("avx512f") != 0},
                    {"avx512bw", __builtin_cpu_supports("avx512bw") != 0},
                    {"avx512dq", __builtin_cpu_supports("avx512dq") != 0},
                    {"avx512vl", __builtin_cpu_supports("avx512vl") != 0},
                    {"f16c", __builtin_cpu_supports("f16c") != 0}});
}

}  // namespace
#endif

std::vector<Target> targets() {
    std::vector<Target> result;
#if defined(__x86_64__)
    result.push_back({avx512_kernels(), avx512_unavailable()});
    result.push_back({avx2_kernels(), avx2_unavailable()});
#elif defined(__aarch64__)
    result.push_back({neon_kernels(), ""});
#endif
    result.push_back({scalar_kernels(), ""});
    return result;
}

static const Kernels* choose() {
    const char* forced = std::getenv("ZERO_ISA");
    const std::vector<Target> all = targets();
    std::string known;
    for (const Target& target : all) {
        known += (known.empty() ? "" : ", ") + std::string(target.kernels->name);
        if (forced == nullptr || *forced == 0) {
            if (target.unavailable.empty()) return target.kernels;
            continue;
        }
        if (std::string(forced) != target.kernels->name) continue;
        if (target.unavailable.empty()) return target.kernels;
        throw std::invalid_argument("ZERO_ISA=" + std::string(forced) + " cannot run here: " + target.unavailable +
                                    "; unset ZERO_ISA to use the best instruction set that can");
    }
    throw std::invalid_argument("ZERO_ISA=" + std::string(forced ? forced : "") + " is not an instruction set of this build; expected one of " +
                                known + ", or unset it");
}

const Kernels& active() {
    static const Kernels* chosen = choose();
    return *chosen;
}

}  // namespace zok
