// The CPUs this process may use, and how many threads that is worth.
#pragma once

#include <pthread.h>

#include <string>
#include <vector>

namespace headrace {

// CPU numbers of the affinity mask, in order.
std::vector<int> allowed_cpus();

void pin_thread(pthread_t thread, int cpu);

// CPUs' worth of time the control group grants (cgroup v2 cpu.max, v1 cfs quota), up the whole path; 0: no limit.
// The arguments are for tests.
double cgroup_cpus(const std::string& membership = "/proc/self/cgroup", const std::string& root = "/sys/fs/cgroup");

// One thread for each core that the affinity mask reaches (two hyperthreads are one core), no more than the quota,
// which is rounded to the nearest and is one thread at least.
int default_threads(double quota = cgroup_cpus());

}  // namespace headrace
