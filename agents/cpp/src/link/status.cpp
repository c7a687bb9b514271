#include "link/status.h"

#include <algorithm>
#include <cstdio>
#include <memory>

#include "wire/digest.h"
#include "wire/errors.h"
#include "wire/mqtt/topics.h"
#include "wire/printable.h"

namespace edgefl {
namespace {

constexpr double kLongestS = 10.0, kQuietS = 1.0, kLongestPauseS = 3600.0;
constexpr size_t kMostNamed = 5;

std::string seconds(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", value);
  return text;
}

}  // namespace

StatusReporter::StatusReporter(std::string federation, std::string device, const Address& broker, const Limits& limits, Say say)
    : federation_(std::move(federation)), device_(std::move(device)), broker_(broker), limits_(limits), say_(std::move(say)), pause_s_(limits.notice_s) {}

StatusReporter::~StatusReporter() {
  leave();
  if (lookout_.joinable()) lookout_.join();
}

void StatusReporter::step(bool alone) {
  alone_ = alone;
  const double now = monotonic_s();
  if (!alone) {
    look_at_ = -1;
    pause_s_ = limits_.notice_s;
    return;
  }
  if (look_at_ < 0) look_at_ = now + pause_s_;
  if (now < look_at_) return;
  pause_s_ = std::min(2 * pause_s_, kLongestPauseS);
  look_at_ = now + pause_s_;
  if (!looked_) return;
  if (lookout_.joinable()) lookout_.join();
  looked_ = false;
  lookout_ = std::thread([this] {
    try {
      look();
    } catch (const std::exception&) {  // there is a next time
    }
    looked_ = true;
  });
}

// Which federations are announced at the broker, in a clean session of its own.
void StatusReporter::look() {
  auto own = std::make_unique<Session>(broker_, client_id(random_bytes(kDigestBytes), "look", federation_, device_, broker_.readable_ids), limits_, nullptr, true);
  Session& session = *own;
  session.subscribe({"edgefl/v1/+/rounds/current"}, 1, true);
  session.start();
  std::set<std::string> others;
  double patience = kLongestS;
  for (const double until = monotonic_s() + kLongestS; alone_ && monotonic_s() < until;) {
    const auto event = session.inbox().get(std::min(patience, 0.5));
    if (!event && (patience -= 0.5) <= 0) break;
    if (!event) continue;
    if (event->kind == Event::Kind::down) break;
    patience = kQuietS;
    if (event->kind != Event::Kind::message || event->payload.empty()) continue;
    const std::string name = event->topic.substr(10, event->topic.find('/', 10) - 10);
    if (name != federation_) others.insert(in_quotes(name));
  }
  if (!session.stop(kQuietS)) (void)own.release();  // its thread waits for a host that does not answer
  std::string text = "nothing is heard of federation " + in_quotes(federation_) + " at " + broker_.text();
  if (others.empty()) {
    text += ", nor of another: this device waits for the server of its federation";
  } else {
    std::string names;
    size_t named = 0;
    for (const std::string& each : others)
      if (named++ < kMostNamed) names += (names.empty() ? "" : ", ") + each;
    if (others.size() > kMostNamed) names += " and " + std::to_string(others.size() - kMostNamed) + " more";
    text += "; there is " + names + ": name the right one (--federation)";
  }
  if (!alone_ || text == neighbours_) return;
  neighbours_ = text;
  say_("alone", text, {});
}

void StatusReporter::offline(const Event& event) {
  const std::string again = "trying again in " + seconds(event.retry_s);
  if (!event.rival) return say_("offline", event.text + "; " + again, {});
  say_("rival", "another client takes the place of this one at " + broker_.text() + " again and again: most likely a second device of federation " +
                    in_quotes(federation_) + " runs as " + in_quotes(device_) + " too (--id); give each its own name; " + again, {});
}

void StatusReporter::denied(const Event& event) {
  const size_t blobs = event.topic.rfind("/blobs/");  // which are many: the first is told
  if (!denied_.insert(event.action + " " + event.topic.substr(0, blobs)).second) return;
  const std::string who = broker_.username.empty() ? "this client" : "user " + in_quotes(broker_.username);
  const std::string text = "the broker at " + broker_.text() + " refuses to " + event.action + " " + event.topic + ": " + event.text + "; its access list has to let " +
                           who + " " + (event.action == "publish" ? "write to" : "read") + " it (`edgefl acl` writes one)";
  say_("denied", text, {{"topic", event.topic}, {"reason", event.text}});
}

void StatusReporter::answered(const Ack& ack) {
  if (ack.text == answer_) return;  // a server that was started again answers the same hello
  answer_ = ack.text;
  say_(ack.reason == "malformed" || ack.reason == "come-later" ? "refused" : "tier", ack.text, {{"reason", ack.reason}});
}

void StatusReporter::announced(const Round& round) {
  if (round.state != "done" || round.run == over_) return;
  over_ = round.run;
  say_("done", "the training of federation " + in_quotes(federation_) + " is over", {{"run", round.run}});
}

void StatusReporter::left_out(int64_t round, const std::function<bool()>& took_part) {
  if (round == 0) {
    left_out_since_ = -1;
    return;
  }
  const double now = monotonic_s();
  if (left_out_since_ < 0) left_out_since_ = now;
  if (told_left_out_ || now < left_out_since_ + limits_.notice_s) return;
  told_left_out_ = true;
  if (took_part()) return;
  const std::string user = broker_.username.empty() ? "this device" : "user " + in_quotes(broker_.username);
  say_("left-out", "round " + std::to_string(round) + " began without this device, which gets a task in a later round. If it gets none, the server "
                   "does not hear it: a broker with access rules has to let " + user + " write below " + Topics(federation_, device_).below + "/",
       {{"round", round}});
}

}  // namespace edgefl
