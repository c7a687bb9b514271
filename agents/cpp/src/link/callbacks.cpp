// What a session does on its network thread, and what others ask of it.
#include <algorithm>
#include <cstring>
#include <mosquitto.h>
#include <mqtt_protocol.h>

#include "link/session.h"

namespace edgefl {
namespace {

constexpr int kFailure = 128, kAskAgain = 3;
constexpr size_t kSubscribeBatch = 8;

std::string reason_of(int code) { return code >= kFailure ? mosquitto_reason_string(code) : mosquitto_strerror(code); }

}  // namespace

void Session::on_connect(int code, int) {
  if (code != 0) {
    unsupported_ = code == 1 || code == MQTT_RC_UNSUPPORTED_PROTOCOL_VERSION;
    const bool denied = code == 4 || code == 5 || code == MQTT_RC_NOT_AUTHORIZED || code == MQTT_RC_BAD_USERNAME_OR_PASSWORD;
    refusal_ = code >= kFailure ? mosquitto_reason_string(code) : mosquitto_connack_string(code);
    if (denied) refusal_ += address_.username.empty() ? "; it wants a user: name it as user:password@host:port (--broker, or EDGEFL_BROKER)" : "; it does not take user '" + address_.username + "' with this password";
    return;
  }
  up_since_ = monotonic_s();
  connected_ = true;
  {
    const std::lock_guard<std::mutex> guard(lock_);
    waiting_.clear();
    asked_.clear();
    denied_.clear();
    // Even in a resumed session: the process may be new and know nothing of what is retained.
    enqueue({standing_.begin(), standing_.end()});
  }
  Event up;
  up.kind = Event::Kind::up;
  inbox_.put(std::move(up));
}

void Session::on_disconnect(int code) {
  if (code >= kFailure) ended_ = "the broker ended it: " + reason_of(code);
}

void Session::on_message(const mosquitto_message& message) {
  const int64_t bytes = message.payloadlen + static_cast<int64_t>(std::strlen(message.topic));
  delivered_ += bytes + bytes / 64 + 256;  // with what is around it
  unread_ += message.qos;  // each of QoS 1 is acknowledged
  Event event;
  event.kind = Event::Kind::message;
  event.topic = message.topic;
  if (message.payloadlen > 0) event.payload.assign(static_cast<const char*>(message.payload), static_cast<size_t>(message.payloadlen));
  inbox_.put(std::move(event));
}

void Session::on_publish(int message, int code) {
  std::string topic;
  {
    const std::lock_guard<std::mutex> guard(sending_);
    const auto found = flying_.find(message);
    if (found == flying_.end()) return;
    topic = found->second;
    flying_.erase(found);
  }
  sent_.notify_all();
  if (code >= kFailure) refuse("publish", topic, reason_of(code));
}

void Session::on_subscribe(int count, const int* granted) {
  Filters refused;
  {
    const std::lock_guard<std::mutex> guard(lock_);
    for (size_t i = 0; i < asked_.size() && i < static_cast<size_t>(count); ++i) {
      if (granted[i] < kFailure) continue;
      refused.push_back({asked_[i].first, granted[i]});
      if (standing_.count(asked_[i].first) != 0) denied_.insert(asked_[i]);
    }
    asked_.clear();
    ask_again_at_ = monotonic_s() + kAskAgain * limits_.reconnect_max_s;
    pump();
  }
  for (const auto& [topic, code] : refused) refuse("subscribe", topic, code == kFailure ? "not authorized" : reason_of(code));
}

void Session::refuse(const std::string& action, const std::string& topic, const std::string& why) {
  Event event;
  event.kind = Event::Kind::refused;
  event.action = action;
  event.topic = topic;
  event.text = why;
  inbox_.put(std::move(event));
}

void Session::ask_again() {  // access lists are mended
  const std::lock_guard<std::mutex> guard(lock_);
  if (denied_.empty() || monotonic_s() < ask_again_at_) return;
  Filters again;
  for (const auto& each : denied_)
    if (standing_.count(each.first) != 0) again.push_back(each);
  denied_.clear();
  enqueue(again);
}

void Session::subscribe(const std::vector<std::string>& topics, int qos, bool standing) {
  const std::lock_guard<std::mutex> guard(lock_);
  Filters entries;
  for (const std::string& topic : topics) entries.push_back({topic, qos});
  if (standing) standing_.insert(entries.begin(), entries.end());
  if (connected_) enqueue(entries);
}

void Session::unsubscribe(const std::vector<std::string>& topics) {
  const std::lock_guard<std::mutex> guard(lock_);
  std::vector<char*> names;
  for (const std::string& topic : topics) {
    standing_.erase(topic);
    names.push_back(const_cast<char*>(topic.c_str()));
  }
  if (!names.empty() && connected_) mosquitto_unsubscribe_multiple(client_, nullptr, static_cast<int>(names.size()), names.data(), nullptr);
}

int Session::publish(const std::string& topic, const Bytes& payload, int qos, bool retain) {
  int message = 0, code = 0;
  {
    const std::lock_guard<std::mutex> guard(sending_);
    code = mosquitto_publish_v5(client_, &message, topic.c_str(), static_cast<int>(payload.size()), payload.data(), qos, retain, nullptr);
    const bool queued = code == MOSQ_ERR_SUCCESS || code == MOSQ_ERR_NO_CONN;
    if (qos > 0 && queued) flying_[message] = topic;
  }
  if (code == MOSQ_ERR_OVERSIZE_PACKET) refuse("publish", topic, "a packet of more bytes than the broker takes");
  return qos > 0 && (code == MOSQ_ERR_SUCCESS || code == MOSQ_ERR_NO_CONN) ? message : 0;
}

bool Session::wait(int message, double timeout_s) {
  std::unique_lock<std::mutex> guard(sending_);
  return message == 0 || sent_.wait_for(guard, std::chrono::duration<double>(timeout_s), [&] { return flying_.count(message) == 0; });
}

void Session::enqueue(const Filters& entries) {
  for (size_t start = 0; start < entries.size(); start += kSubscribeBatch)
    waiting_.emplace_back(entries.begin() + static_cast<long>(start), entries.begin() + static_cast<long>(std::min(start + kSubscribeBatch, entries.size())));
  pump();
}

void Session::pump() {
  while (!waiting_.empty() && asked_.empty()) {
    asked_ = std::move(waiting_.front());
    waiting_.pop_front();
    std::vector<char*> names;
    for (const auto& [topic, qos] : asked_) names.push_back(const_cast<char*>(topic.c_str()));
    const int code = mosquitto_subscribe_multiple(client_, nullptr, static_cast<int>(names.size()), names.data(), asked_[0].second, 0, nullptr);
    if (code != MOSQ_ERR_SUCCESS) {  // not connected: it is asked for again after the next connection
      asked_.clear();
      waiting_.clear();
    }
  }
}

}  // namespace edgefl
