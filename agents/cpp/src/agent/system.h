// In what conditions Linux says this device is.
#pragma once

#include <string>

#include "wire/mqtt/messages.h"

namespace edgefl {

// Power by /sys/class/power_supply, heat by /sys/class/thermal, below `root`; empty where these do not say.
Conditions system_conditions(const std::string& root = "/sys/class");

}  // namespace edgefl
