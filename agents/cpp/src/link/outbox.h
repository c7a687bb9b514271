// The durable outbox: an update is sent, and sent again, until the server has spoken on it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "link/say.h"
#include "link/session.h"
#include "store/store.h"
#include "wire/mqtt/limits.h"
#include "wire/mqtt/envelope.h"

namespace edgefl {

// One thread that empties the store's outbox, oldest first. `settled` is told each final word, on that thread.
class Outbox {
 public:
  Outbox(Session& session, const Topics& topics, Store& store, const Limits& limits, MessageSigner& speaker, Say say, std::function<void(const PastRound&, const Ack&)> settled);
  ~Outbox() { stop(); }
  void start();
  void leave();             // begins to end; `stop` waits
  void stop();
  void wake();              // there is something to send
  void send_again();        // what was sent may be lost
  void deliver(Ack ack);    // the server's word

 private:
  void run();
  void send_until_settled(const Outgoing& outgoing);
  void send(const Outgoing& outgoing, const std::string& sha256, const std::vector<int64_t>& wanted);
  std::optional<Ack> wait_for(const std::string& nonce, const std::string& sha256, double patience_s);
  void forget_reasons();
  void settle(const Outgoing& outgoing, const Ack& ack);
  std::string_view piece(const Outgoing& outgoing, int64_t index) const;
  int64_t pieces(const Outgoing& outgoing) const;
  void publish(const Outgoing& outgoing, const std::string& sha256, int64_t index, std::string_view data);
  void keep(std::optional<Ack> ack);

  Session& session_;
  const Topics topics_;
  Store& store_;
  const Limits limits_;
  MessageSigner& speaker_;
  const Say say_;
  const std::function<void(const PastRound&, const Ack&)> settled_;
  const int64_t room_;  // bytes of a chunk
  std::atomic<bool> stopping_{false};
  std::thread thread_;
  std::mutex lock_;  // of what is below
  std::condition_variable news_;
  std::deque<std::optional<Ack>> acks_;  // without one: a reason to send again
  bool work_ = false;
  std::string sending_;
  std::deque<int> flying_;  // of the sending thread alone
};

PastRound past_of(const Outgoing& outgoing, const Ack& ack);

}  // namespace edgefl
