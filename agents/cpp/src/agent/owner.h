// What the owner of a device lets it do now, and what is told of its conditions; and how long it rests between steps.
#pragma once

#include <atomic>
#include <functional>
#include <mutex>

#include "wire/mqtt/limits.h"
#include "wire/mqtt/messages.h"

namespace edgefl {

// Set by whoever embeds the agent, read between steps. Thread-safe.
class Owner {
 public:
  void pause(bool on);
  bool paused() const { return paused_; }
  void set_duty(double share) { duty_ = share; }  // of the time in which steps are made, above 0 to 1
  double duty() const { return duty_; }
  // "" or why this device does not train now; what is begun then is declined.
  void forbid(const std::string& why);
  std::string forbidden() const;
  void tell(const Conditions& conditions);
  void ask_system() { asks_ = true; }  // in place of being told
  Conditions conditions() const;

 private:
  std::atomic<bool> paused_{false}, asks_{false};
  std::atomic<double> duty_{1.0};
  mutable std::mutex lock_;
  std::string why_;
  Conditions conditions_;
};

// Between the steps of one round.
class RoundControl {
 public:
  // `aborted` ends a rest or a pause.
  RoundControl(const Limits& limits, const Owner& owner, std::function<bool()> aborted);
  void worked(double ms) { worked_s_ = ms / 1e3; }
  // RoundAborted if the round is over; RoundDeclined if the last step, or the round, took too long, or the owner forbids the
  // next; rests, or waits while the device is paused.
  void between();

 private:
  void rest(double until) const;
  const Limits limits_;
  const Owner& owner_;
  const std::function<bool()> aborted_;
  double began_, paused_s_ = 0, worked_s_ = 0;
};

}  // namespace edgefl
