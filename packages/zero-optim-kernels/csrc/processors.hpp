// The number of threads that a process may use.
#pragma once

namespace zok {

// The largest number of threads of any call.
constexpr int kMostThreads = 256;

// OMP_NUM_THREADS, else the number of processors in this process's affinity mask, within the quota of its cgroup. Decided once per process.
int default_threads();

}  // namespace zok
