// What a device tells people of its place at the broker: who else is there, who takes its name, what tier it has not got. Each
// thing is said once for as long as it stays true.
#pragma once

#include <atomic>
#include <functional>
#include <set>
#include <string>
#include <thread>

#include "link/say.h"
#include "link/session.h"
#include "wire/mqtt/messages.h"

namespace edgefl {

class StatusReporter {
 public:
  StatusReporter(std::string federation, std::string device, const Address& broker, const Limits& limits, Say say);
  ~StatusReporter();
  void leave() { alone_ = false; }  // who looks around ends soon, and says nothing
  void step(bool alone);  // now and then; `alone`: the broker is there, and nothing was heard of the federation
  void offline(const Event& event);
  void denied(const Event& event);
  void answered(const Ack& ack);
  void announced(const Round& round);
  // `round`: the open one in which this device has no task, 0 if there is none. Not told to one that had a task in the run.
  void left_out(int64_t round, const std::function<bool()>& took_part);

 private:
  void look();
  const std::string federation_, device_;
  const Address broker_;
  const Limits limits_;
  const Say say_;
  std::atomic<bool> alone_{false}, looked_{true};
  std::thread lookout_;
  double look_at_ = -1, pause_s_;
  std::string neighbours_, answer_, over_;
  std::set<std::string> denied_;
  double left_out_since_ = -1;
  bool told_left_out_ = false;
};

}  // namespace edgefl
