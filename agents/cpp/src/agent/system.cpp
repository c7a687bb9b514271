#include "agent/system.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <vector>

namespace edgefl {
namespace {

namespace fs = std::filesystem;
constexpr double kNearC = 10.0;           // so much below the temperature from which the system slows down it is warm
constexpr double kBelowCriticalC = 20.0;  // where a system only says when it switches itself off, it slows down so much below

std::string word_in(const fs::path& file) {
  std::ifstream in(file);
  std::string word;
  in >> word;
  return word;
}

std::vector<fs::path> folders_in(const fs::path& folder, const std::string& prefix = "") {
  std::vector<fs::path> found;
  std::error_code ignored;
  for (const auto& each : fs::directory_iterator(folder, ignored))
    if (each.path().filename().string().rfind(prefix, 0) == 0) found.push_back(each.path());
  std::sort(found.begin(), found.end());
  return found;
}

// Without a battery a machine runs on mains, or does not run.
std::string power_of(const fs::path& supplies) {
  std::error_code ignored;
  if (!fs::is_directory(supplies, ignored)) return "";
  bool mains = false, batteries = false, charging = false;
  for (const fs::path& supply : folders_in(supplies)) {
    const bool battery = word_in(supply / "type") == "Battery";
    const std::string state = word_in(supply / (battery ? "status" : "online"));
    batteries = batteries || (battery && !state.empty());
    charging = charging || (battery && (state == "Charging" || state == "Full"));
    mains = mains || (!battery && state == "1");
  }
  return mains || charging || !batteries ? "charging" : "battery";
}

// 0 where the zone does not say, 1 cool, 2 warm, 3 hot.
int heat_of(const fs::path& zone) {
  try {
    const double now = std::stod(word_in(zone / "temp")) / 1000;
    double least = 0;
    for (const fs::path& file : folders_in(zone, "trip_point_")) {
      const std::string name = file.string();
      if (name.size() < 5 || name.substr(name.size() - 5) != "_type") continue;
      const std::string kind = word_in(file);
      double limit = std::stod(word_in(name.substr(0, name.size() - 4) + "temp")) / 1000;
      if (limit <= 0 || (kind != "passive" && kind != "hot" && kind != "critical")) continue;
      limit -= kind == "critical" ? kBelowCriticalC : 0.0;
      least = least == 0 ? limit : std::min(least, limit);
    }
    return least == 0 ? 0 : now >= least ? 3 : now >= least - kNearC ? 2 : 1;
  } catch (const std::exception&) {
    return 0;
  }
}

}  // namespace

Conditions system_conditions(const std::string& root) {
  int heat = 0;
  for (const fs::path& zone : folders_in(fs::path(root) / "thermal", "thermal_zone")) heat = std::max(heat, heat_of(zone));
  Conditions found;
  found.power = power_of(fs::path(root) / "power_supply");
  found.thermal = std::vector<std::string>{"", "cool", "warm", "hot"}[static_cast<size_t>(heat)];
  found.available = true;
  return found;
}

int64_t group_memory_limit(const std::string& groups, const std::string& own) {
  int64_t limit = std::numeric_limits<int64_t>::max();
  std::ifstream in(own);
  for (std::string line; std::getline(in, line);) {
    if (line.rfind("0::/", 0) != 0) continue;  // of version 2; systemd's units have no other limits
    for (fs::path group = fs::path(groups) / line.substr(4);; group = group.parent_path()) {
      const std::string word = word_in(group / "memory.max");
      if (!word.empty() && word != "max") limit = std::min<int64_t>(limit, std::strtoll(word.c_str(), nullptr, 10));
      if (group.string().size() <= groups.size() + 1) break;
    }
  }
  return limit;
}

}  // namespace edgefl
