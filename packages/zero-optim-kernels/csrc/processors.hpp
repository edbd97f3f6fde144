// How many threads a process may use.
#pragma once

namespace zok {

// The most that any call uses.
constexpr int kMostThreads = 256;

// OMP_NUM_THREADS, else the processors of this process's affinity mask within the quota of its cgroup. Decided once per process.
int default_threads();

}  // namespace zok
