#include "processors.hpp"

#include <sched.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <string>
#include <thread>

namespace zok {
namespace {

int processors_of_affinity() {
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof(set), &set) == 0) return std::max(1, CPU_COUNT(&set));
    return std::max(1u, std::thread::hardware_concurrency());
}

// Processors' worth of time per period that one cgroup's files grant; infinite when they are not there or set no limit.
double quota_v2(const std::string& folder) {
    std::ifstream file(folder + "/cpu.max");
    std::string quota;
    double period = 0;
    if (!(file >> quota >> period) || quota == "max" || period <= 0) return HUGE_VAL;
    return std::strtod(quota.c_str(), nullptr) / period;
}

double quota_v1(const std::string& folder) {
    std::ifstream quota_file(folder + "/cpu.cfs_quota_us"), period_file(folder + "/cpu.cfs_period_us");
    double quota = 0, period = 0;
    if (!(quota_file >> quota) || !(period_file >> period) || quota <= 0 || period <= 0) return HUGE_VAL;
    return quota / period;
}

// The smallest quota from the process's cgroup up to the root of the mount. A container may name a path of its host, of which only the
// root is there.
double smallest_quota(const std::string& mount, std::string path, double (*quota)(const std::string&)) {
    double result = quota(mount);
    for (; path.size() > 1; path.resize(path.rfind('/'))) result = std::min(result, quota(mount + path));
    return result;
}

// A line of /proc/self/cgroup is `id:controllers:/path`; version 2 has id 0 and no controllers.
double cgroup_quota() {
    double result = HUGE_VAL;
    std::ifstream file("/proc/self/cgroup");
    for (std::string line; std::getline(file, line);) {
        const size_t first = line.find(':'), second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) continue;
        const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",", path = line.substr(second + 1);
        if (controllers == ",,") result = std::min(result, smallest_quota("/sys/fs/cgroup", path, quota_v2));
        if (controllers.find(",cpu,") != std::string::npos) result = std::min(result, smallest_quota("/sys/fs/cgroup/cpu", path, quota_v1));
    }
    return result;
}

int count_processors() {
    if (const char* text = std::getenv("OMP_NUM_THREADS")) {
        const long threads = std::strtol(text, nullptr, 10);
        if (threads >= 1) return static_cast<int>(std::min<long>(threads, kMostThreads));
    }
    const double most = std::min<double>(kMostThreads, processors_of_affinity());
    return static_cast<int>(std::max(1.0, std::min(most, std::ceil(cgroup_quota()))));
}

}  // namespace

int default_threads() {
    static const int threads = count_processors();
    return threads;
}

}  // namespace zok
