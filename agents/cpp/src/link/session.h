// One broker session: stable client id, persistent session, own reconnect with jitter, last will. Everything that happens
// arrives in order in the inbox; the network thread runs no code of others.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "link/inbox.h"
#include "wire/mqtt/limits.h"
#include "wire/mqtt/address.h"

struct mosquitto;
struct mosquitto_message;

namespace edgefl {

struct Will {
  std::string topic;
  Bytes payload;
};

// A connection that mends itself. Thread-safe; `start` returns at once. `will` is asked before each connection.
class Session {
 public:
  Session(const Address& address, const std::string& client_id, const Limits& limits, std::function<Will()> will, bool clean = false);
  ~Session();

  void start();
  // Says goodbye, so that the will stays unsaid. Whether its thread has ended within about so many seconds: one that waits for
  // a host that does not answer ends later, and the session has to live on until then.
  bool stop(double within_s);
  bool connected() const { return connected_; }
  Inbox& inbox() { return inbox_; }
  void wake() { inbox_.put({}); }

  // `standing` ones are asked for again after each connection, which also brings what is retained.
  void subscribe(const std::vector<std::string>& topics, int qos, bool standing);
  void unsubscribe(const std::vector<std::string>& topics);
  // QoS 1 outlives a reconnect. The number of the message, 0 where the broker will never take it.
  int publish(const std::string& topic, const Bytes& payload, int qos = 1, bool retain = false);
  bool wait(int message, double timeout_s);  // whether the broker has it, or never takes it

  // For the library's callbacks, on the network thread.
  void on_connect(int code, int most_bytes);
  void on_disconnect(int code);
  void on_message(const mosquitto_message& message);
  void on_publish(int message, int code);
  void on_subscribe(int count, const int* granted);
  void on_log(const char* text) { logged_ = text; }
  void on_qos_2() noexcept { qos_2_ = true; }

 private:
  using Filters = std::vector<std::pair<std::string, int>>;
  void run();
  std::string connect_and_loop();
  std::string attempt();
  std::string unreachable(int code, int number) const;
  double pause(int attempt) const;
  void prepare();
  void forget();
  void enqueue(const Filters& entries);  // with the lock held
  void pump();
  void ask_again();
  void refuse(const std::string& action, const std::string& topic, const std::string& why);

  const Address address_;
  const std::string client_id_;
  const Limits limits_;
  const std::function<Will()> will_;
  const bool clean_;
  mosquitto* client_ = nullptr;
  Inbox inbox_;
  std::thread thread_;
  std::atomic<bool> connected_{false}, stopping_{false};
  bool left_ = false;  // the thread, with the mutex below
  std::mutex sleeping_;
  std::condition_variable woken_;

  std::mutex lock_;  // of what is below
  std::map<std::string, int> standing_, denied_;
  std::deque<Filters> waiting_;
  Filters asked_;
  std::mutex sending_;
  std::condition_variable sent_;
  std::map<int, std::string> flying_;  // topics by message

  std::string first_, version_;  // of MQTT
  std::string refusal_, ended_, logged_;
  bool unsupported_ = false, qos_2_ = false;
  std::atomic<int64_t> delivered_{0};  // bytes of this connection that were messages, about
  int unread_ = 0;                     // acknowledgements since the broker last read all that we sent
  int older_ = 0;
  double up_since_ = 0, ask_again_at_ = 0;
};

double monotonic_s();

}  // namespace edgefl
