#include "link/presence.h"

#include <algorithm>

namespace edgefl {
namespace {

constexpr double kSoonestS = 1.0, kLatestS = 6 * 3600.0;
constexpr size_t kRounds = 2;  // without a task, that a device listens to: by then it knows what became of its last one

}  // namespace

HelloSender::HelloSender(Hello hello, const Limits& limits, std::function<Conditions()> conditions, std::function<void(const Hello&)> say)
    : hello_(std::move(hello)), limits_(limits), conditions_(std::move(conditions)), say_(std::move(say)) {}

void HelloSender::greet() { say(false); }

void HelloSender::say(bool again) {
  hello_.conditions = conditions_();
  hello_.again = again;
  again_at_.reset();
  told_ = true;
  look_at_ = monotonic_s() + limits_.conditions_s;
  say_(hello_);
}

void HelloSender::answered(const Ack& ack) {
  if (ack.reason == "come-later" && ack.later_s) again_at_ = monotonic_s() + std::clamp(*ack.later_s, kSoonestS, kLatestS);
}

void HelloSender::step(bool connected) {
  if (!connected) return;
  const double now = monotonic_s();
  if (again_at_) {
    if (now >= *again_at_) say(false);
  } else if (told_ && now >= look_at_) {
    look_at_ = now + limits_.conditions_s;
    if (!(conditions_() == hello_.conditions)) say(true);
  }
}

Listening::Listening(Session& session, std::string topic, std::function<bool()> idle) : session_(session), topic_(std::move(topic)), idle_(std::move(idle)) {}

void Listening::begin() {
  rounds_.clear();
  if (resting_) session_.subscribe({topic_}, 1, true);
  resting_ = false;
}

void Listening::heard(const Round& announced) {
  if (announced.state == "done") return;
  if (announced.is_open()) rounds_.insert({announced.run, announced.round});
  if (rounds_.size() > kRounds && idle_()) {
    resting_ = true;
    session_.unsubscribe({topic_});
  }
}

}  // namespace edgefl
