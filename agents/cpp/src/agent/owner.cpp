#include "agent/owner.h"

#include <chrono>
#include <cmath>
#include <thread>

#include "agent/system.h"
#include "link/session.h"
#include "wire/errors.h"

namespace edgefl {
namespace {

constexpr double kSliceS = 0.05;

void sleep_s(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

[[noreturn]] void too_long(const std::string& what, double took, const std::string& limit, double most) {
  throw RoundDeclined("too-much-work", what + " took " + std::to_string(std::lround(took)) + " s, and limits." + limit + " is " + std::to_string(std::lround(most)) +
                                           " here: raise it, or give this device a smaller tier or fewer steps");
}

}  // namespace

void Owner::pause(bool on) { paused_ = on; }

void Owner::forbid(const std::string& why) {
  const std::lock_guard<std::mutex> guard(lock_);
  why_ = why;
}

std::string Owner::forbidden() const {
  const std::lock_guard<std::mutex> guard(lock_);
  return why_;
}

void Owner::tell(const Conditions& conditions) {
  const std::lock_guard<std::mutex> guard(lock_);
  conditions_ = conditions;
}

Conditions Owner::conditions() const {
  const std::lock_guard<std::mutex> guard(lock_);
  Conditions told = asks_ ? system_conditions() : conditions_;
  if (paused_ || !why_.empty()) told.available = false;
  return told;
}

RoundControl::RoundControl(const Limits& limits, const Owner& owner, std::function<bool()> aborted) : limits_(limits), owner_(owner), aborted_(std::move(aborted)), began_(monotonic_s()) {}

void RoundControl::between() {
  if (aborted_()) throw RoundAborted("the round ended before this device was done");
  const double took = worked_s_, now = monotonic_s();
  worked_s_ = 0;
  if (took > limits_.max_step_s) too_long("a step", took, "max_step_s", limits_.max_step_s);
  if (now - began_ - paused_s_ > limits_.max_round_s) too_long("the round", now - began_ - paused_s_, "max_round_s", limits_.max_round_s);
  if (const std::string why = owner_.forbidden(); !why.empty()) throw RoundDeclined("policy", "the policy of this device does not allow it: " + why);
  rest(now + took * (1.0 / owner_.duty() - 1.0));
  const double rested = monotonic_s();
  while (owner_.paused() && !aborted_()) sleep_s(kSliceS);
  paused_s_ += monotonic_s() - rested;
  if (aborted_()) throw RoundAborted("the round ended before this device was done");
}

void RoundControl::rest(double until) const {
  for (double left = until - monotonic_s(); left > 0 && !aborted_(); left = until - monotonic_s()) sleep_s(std::min(left, kSliceS));
}

}  // namespace edgefl
