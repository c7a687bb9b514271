#include "agent/progress.h"

#include <algorithm>
#include <cmath>
#include <string_view>

#include "engine/memory.h"
#include "wire/errors.h"

namespace edgefl {
namespace {

constexpr double kPeriodS = 0.2;

// Code of a failed attempt. The message of the error stays in the device's log: it may hold paths and values of the data.
std::string failure_code(const std::exception& error) {
  if (std::string_view(error.what()).substr(0, kLostChunk.size()) == kLostChunk) return std::string(kLostChunk);
  if (dynamic_cast<const DataError*>(&error) != nullptr) return "data";
  if (dynamic_cast<const StoreError*>(&error) != nullptr) return "store";
  if (dynamic_cast<const ProtocolError*>(&error) != nullptr) return "bundle";
  return "engine";
}

}  // namespace

void ProgressMessages::watch(const Job& job, const StepReport& step) {
  const bool paced = job.progress_s > kPeriodS;  // by the server, which hears many
  {
    const std::lock_guard<std::mutex> guard(lock_);
    const double now = monotonic_s();
    const bool last = step.step >= step.steps && !paced;
    if (now - last_ < std::max(kPeriodS, job.progress_s) && !last) return;
    last_ = now;
  }
  publish(job.round, job.tier, step);
}

void ProgressMessages::failed(int64_t round, const std::string& tier, const std::exception& error) {
  publish(round, tier, {"failed: " + failure_code(error), 0, 0, std::nan(""), 0.0});
}

void ProgressMessages::publish(int64_t round, const std::string& tier, const StepReport& step) {
  if (!session_.connected()) return;
  const Progress progress{round, tier, step.stage, step.step, step.steps, step.loss, step.step_ms, anonymous_bytes(), fetcher_.received(), 0};
  session_.publish(topic_, speaker_.seal(topic_, progress), 0);
}

}  // namespace edgefl
