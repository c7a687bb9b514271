#include "agent/events.h"

#include <cmath>
#include <cstdio>
#include <ctime>
#include <nlohmann/json.hpp>

#include "wire/printable.h"

namespace edgefl {

std::string event_json(const std::string& event, const std::string& text, const Details& details) {
  nlohmann::ordered_json told = {{"event", event}, {"text", text}, {"details", nlohmann::ordered_json::object()}};
  for (const auto& [name, value] : details) {
    if (const auto* number = std::get_if<double>(&value)) {
      told["details"][name] = std::isfinite(*number) ? nlohmann::ordered_json(*number) : nullptr;
    } else if (const auto* whole = std::get_if<int64_t>(&value)) {
      told["details"][name] = *whole;
    } else {
      told["details"][name] = printable(std::get<std::string>(value));
    }
  }
  return told.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

std::string event_line(const std::string& event, const std::string& text) {
  const std::time_t now = std::time(nullptr);
  std::tm local{};
  localtime_r(&now, &local);
  char clock[16], name[32];
  std::strftime(clock, sizeof clock, "%H:%M:%S", &local);
  std::snprintf(name, sizeof name, "%-9s", event.c_str());
  return std::string(clock) + "  " + name + " " + text;
}

}  // namespace edgefl
