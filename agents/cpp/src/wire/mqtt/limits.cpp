#include "wire/mqtt/limits.h"

#include <cmath>
#include <cstdlib>
#include <map>
#include <set>

#include "wire/errors.h"
#include "wire/printable.h"

namespace edgefl {
namespace {

struct Whole {
  int64_t Limits::*field;
  int64_t least, most;
};
struct Real {
  double Limits::*field;
  double least;  // 0 where a pause may be none
};
constexpr int64_t kCount = 1000000, kBytes = int64_t{1} << 50;
constexpr double kLongest = 1e8, kAbove = 1e-9;

const std::map<std::string, Whole> kWhole = {{"chunk_bytes", {&Limits::chunk_bytes, 256, 1 << 27}},
                                             {"fetch_window", {&Limits::fetch_window, 1, kCount}},
                                             {"fetch_retries", {&Limits::fetch_retries, 1, kCount}},
                                             {"max_blob_bytes", {&Limits::max_blob_bytes, 1, kBytes}},
                                             {"store_bytes", {&Limits::store_bytes, 1, kBytes}},
                                             {"mirror_bytes_s", {&Limits::mirror_bytes_s, 1, kBytes}},
                                             {"upload_window", {&Limits::upload_window, 1, kCount}},
                                             {"checkpoint_steps", {&Limits::checkpoint_steps, 1, kCount}},
                                             {"keepalive_s", {&Limits::keepalive_s, 1, 65535}},
                                             {"max_inflight", {&Limits::max_inflight, 1, 65535}},
                                             {"inbox_messages", {&Limits::inbox_messages, 1, kCount}},
                                             {"inbox_bytes", {&Limits::inbox_bytes, 1, kBytes}},
                                             {"max_message_bytes", {&Limits::max_message_bytes, 1, kBytes}},
                                             {"history_rounds", {&Limits::history_rounds, 1, kCount}},
                                             {"max_manifest_bytes", {&Limits::max_manifest_bytes, 1, kBytes}},
                                             {"max_steps", {&Limits::max_steps, 1, int64_t{1} << 40}},
                                             {"attempts", {&Limits::attempts, 1, kCount}}};
const std::map<std::string, Real> kReal = {{"fetch_timeout_s", {&Limits::fetch_timeout_s, kAbove}},
                                           {"ack_timeout_s", {&Limits::ack_timeout_s, kAbove}},
                                           {"reconnect_min_s", {&Limits::reconnect_min_s, kAbove}},
                                           {"reconnect_max_s", {&Limits::reconnect_max_s, kAbove}},
                                           {"mirror_pause_s", {&Limits::mirror_pause_s, kAbove}},
                                           {"conditions_s", {&Limits::conditions_s, kAbove}},
                                           {"retry_pause_s", {&Limits::retry_pause_s, 0.0}},
                                           {"notice_s", {&Limits::notice_s, kAbove}},
                                           {"max_step_s", {&Limits::max_step_s, kAbove}},
                                           {"max_round_s", {&Limits::max_round_s, kAbove}}};
// Of a server, or of what this agent has not (profiles): the same line may start either agent.
const std::set<std::string> kOthers = {
    "announcement_bytes", "max_update_bytes", "max_pending_bytes", "asked_bytes", "progress_messages_s",
    "update_copies", "max_devices", "come_later_s", "max_strangers", "hello_bytes", "device_messages_s", "stranger_messages_s", "strikes",
    "bench_rounds", "round_deadline_s", "offline_grace_s", "ready_timeout_s", "profile_s", "profile_repeat", "profiles_an_hour"};

[[noreturn]] void refuse(const std::string& entry, const std::string& why) {
  throw ConfigError("--limit: " + in_quotes(entry) + " " + why + "; known limits stand in `edgefl validate --template`");
}

}  // namespace

void Limits::set(const std::string& entry) {
  const size_t equals = entry.find('=');
  const std::string name = entry.substr(0, equals), value = equals == std::string::npos ? "" : entry.substr(equals + 1);
  char* end = nullptr;
  const double number = std::strtod(value.c_str(), &end);
  if (value.empty() || *end != '\0' || !std::isfinite(number)) refuse(entry, "is not KEY=NUMBER");
  if (const auto whole = kWhole.find(name); whole != kWhole.end()) {
    const auto& [field, least, most] = whole->second;
    if (number != std::floor(number) || number < static_cast<double>(least) || number > static_cast<double>(most))
      refuse(entry, "should be a whole number from " + std::to_string(least) + " to " + std::to_string(most));
    this->*field = static_cast<int64_t>(number);
  } else if (const auto real = kReal.find(name); real != kReal.end()) {
    if (number < real->second.least || number > kLongest) refuse(entry, "is beyond its range");
    this->*(real->second.field) = number;
  } else if (kOthers.count(name) == 0) {
    refuse(entry, "names no limit");
  }
}

}  // namespace edgefl
