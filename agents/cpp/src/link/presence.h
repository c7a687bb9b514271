// What a device says of itself when it connects, when its conditions change, and when a server without room told it to come
// later; and whether it listens to announcements. For one thread.
#pragma once

#include <functional>
#include <optional>
#include <set>
#include <string>

#include "link/session.h"
#include "wire/mqtt/limits.h"
#include "wire/mqtt/messages.h"

namespace edgefl {

class HelloSender {
 public:
  // `conditions` are asked now and then; `say` publishes.
  HelloSender(Hello hello, const Limits& limits, std::function<Conditions()> conditions, std::function<void(const Hello&)> say);
  void greet();                    // after each connection
  void answered(const Ack& ack);   // the server's word on the hello
  void step(bool connected);       // to be called now and then

 private:
  void say(bool again);
  Hello hello_;
  const Limits limits_;
  const std::function<Conditions()> conditions_;
  const std::function<void(const Hello&)> say_;
  std::optional<double> again_at_;
  double look_at_ = 0;
  bool told_ = false;
};

// One that gets no task for a while stops listening until it is called: each announcement goes to all who listen.
class Listening {
 public:
  Listening(Session& session, std::string topic, std::function<bool()> idle);
  void begin();                      // the process starts, the connection is new, or there is a task
  void heard(const Round& announced);

 private:
  Session& session_;
  const std::string topic_;
  const std::function<bool()> idle_;
  std::set<std::pair<std::string, int64_t>> rounds_;
  bool resting_ = false;
};

}  // namespace edgefl
