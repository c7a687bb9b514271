// What Linux says of power, heat and memory.
#include <doctest/doctest.h>
#include <filesystem>
#include <fstream>
#include <limits>
#include <unistd.h>

#include "agent/system.h"

using namespace edgefl;

namespace {

struct System {
  std::string root = (std::filesystem::temp_directory_path() / ("edgefl-sys-" + std::to_string(getpid()))).string();
  System() { std::filesystem::remove_all(root); }
  ~System() { std::filesystem::remove_all(root); }
  void says(const std::string& file, const std::string& text) const {
    const std::filesystem::path path = std::filesystem::path(root) / file;
    std::filesystem::create_directories(path.parent_path());
    std::ofstream(path) << text << "\n";
  }
};

}  // namespace

TEST_CASE("a system that says nothing leaves power and heat unknown") {
  const System system;
  const Conditions found = system_conditions(system.root);
  CHECK(found.power == "");
  CHECK(found.thermal == "");
  CHECK(found.available == true);
}

TEST_CASE("mains, a battery that charges, and one that does not") {
  const System system;
  system.says("power_supply/AC/type", "Mains");
  system.says("power_supply/AC/online", "0");
  CHECK(system_conditions(system.root).power == "charging");  // without a battery it runs on mains
  system.says("power_supply/BAT0/type", "Battery");
  system.says("power_supply/BAT0/status", "Discharging");
  CHECK(system_conditions(system.root).power == "battery");
  system.says("power_supply/BAT0/status", "Full");
  CHECK(system_conditions(system.root).power == "charging");
}

TEST_CASE("the hottest zone counts, beside the temperature from which it slows down") {
  const System system;
  system.says("thermal/thermal_zone0/temp", "40000");
  system.says("thermal/thermal_zone0/trip_point_0_type", "passive");
  system.says("thermal/thermal_zone0/trip_point_0_temp", "80000");
  CHECK(system_conditions(system.root).thermal == "cool");
  system.says("thermal/thermal_zone1/temp", "75000");
  system.says("thermal/thermal_zone1/trip_point_0_type", "critical");
  system.says("thermal/thermal_zone1/trip_point_0_temp", "100000");
  CHECK(system_conditions(system.root).thermal == "warm");
  system.says("thermal/thermal_zone0/temp", "80000");
  CHECK(system_conditions(system.root).thermal == "hot");
}

TEST_CASE("the smallest limit of a control group and those above it counts") {
  const System system;
  system.says("own", "0::/system.slice/agent.service");
  CHECK(group_memory_limit(system.root, system.root + "/own") == std::numeric_limits<int64_t>::max());
  system.says("system.slice/agent.service/memory.max", "max");
  system.says("system.slice/memory.max", "4096000");
  CHECK(group_memory_limit(system.root, system.root + "/own") == 4096000);
  system.says("system.slice/agent.service/memory.max", "1024000");
  CHECK(group_memory_limit(system.root, system.root + "/own") == 1024000);
  system.says("memory.max", "512000");
  CHECK(group_memory_limit(system.root, system.root + "/own") == 512000);
}
