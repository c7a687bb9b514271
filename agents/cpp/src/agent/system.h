// In what conditions Linux says this device is, and how much memory it lets this process have.
#pragma once

#include <string>

#include "wire/mqtt/messages.h"

namespace edgefl {

// Power by /sys/class/power_supply, heat by /sys/class/thermal, below `root`; empty where these do not say.
Conditions system_conditions(const std::string& root = "/sys/class");
// The smallest memory.max of this process's control group and those above it (a unit's MemoryMax=); the largest number if none is set.
int64_t group_memory_limit(const std::string& groups = "/sys/fs/cgroup", const std::string& own = "/proc/self/cgroup");

}  // namespace edgefl
