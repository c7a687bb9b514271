#include "agent/progress.h"

#include <algorithm>
#include <cmath>

#include "engine/memory.h"
#include "wire/printable.h"

namespace edgefl {
namespace {

constexpr double kPeriodS = 0.2;
constexpr size_t kMostReason = 300;

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

void ProgressMessages::failed(int64_t round, const std::string& tier, const std::string& reason) {
  publish(round, tier, {"failed: " + printable(reason, kMostReason), 0, 0, std::nan(""), 0.0});
}

void ProgressMessages::publish(int64_t round, const std::string& tier, const StepReport& step) {
  if (!session_.connected()) return;
  const Progress progress{round, tier, step.stage, step.step, step.steps, step.loss, step.step_ms, peak_bytes(), fetcher_.received(), 0};
  session_.publish(topic_, speaker_.seal(topic_, progress), 0);
}

}  // namespace edgefl
