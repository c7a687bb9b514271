// The device agent: connects, says what it is, takes tasks, runs rounds, keeps its store.
//
// Threads: the session's network thread fills the inbox; the caller's reads it (`turn` again and again); one worker
// runs the round; the outbox's sends updates.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "agent/rounds/scheduler.h"
#include "agent/owner.h"
#include "agent/progress.h"
#include "agent/rounds/executor.h"
#include "link/presence.h"
#include "link/status.h"

namespace edgefl {

struct AgentConfig {
  std::string federation = "demo", device;
  Address broker;
  std::shared_ptr<DataSource> data;
  std::string folder;
  std::string tier;
  int64_t memory_bytes = 0;  // that this device offers; 0: what it has
  std::vector<Bytes> server_keys;
  std::optional<Token> token;
  std::string token_file;  // which is removed once the server has given this device a task; "": none is
  std::vector<std::string> mirrors;  // of its own
  bool other_mirrors = true;         // whether those that the server names may be asked
  bool until_done = false;
  std::string engine = "onnx";
  int threads = 1;
  Limits limits;
};

class Agent {
 public:
  // `report` is called on any of the agent's threads, one call at a time.
  Agent(const AgentConfig& config, Say report);
  ~Agent();

  void start();
  void turn(double wait_s);  // one event, and what follows from it; after trouble, a slice of the pause
  // Of the last turn, for any thread: whether the training is over and nothing waits here, and whether a round is in hand.
  bool done() const { return done_; }
  bool working() const { return working_; }
  bool connected() const { return session_->connected(); }
  bool finished() const { return stopping_ || (config_.until_done && done_); }
  double silent_s() const;   // seconds since a round's thread last looked around; 0 without one; on the thread of `turn`
  void stop();               // any thread; `end` waits
  // Leaves in good order, within about so many seconds. Whether the round in hand was left; a step that takes longer goes on.
  bool end(double within_s);

  Owner& owner() { return owner_; }
  void wake() { session_->wake(); }
  bool stopping() const { return stopping_; }

 private:
  void handle(const Event& event);
  void greet();
  void route(const Event& event);
  void take(const std::string& topic, const Event& event);
  Will last_will();
  Hello hello() const;
  SchedulerHost scheduler_host();
  Round read_page(const Round& announced);
  void settled(const PastRound& past, const Ack& ack);
  void trouble(const std::string& event, const std::string& text);
  void pause(double seconds) const;
  void tell_dropped();
  void drop_token();
  void say(const std::string& event, const std::string& text, const Details& details);
  template <typename Message>
  int publish(const std::string& topic, const Message& message, bool retain = false) {
    return session_->publish(topic, speaker_->seal(topic, message), 1, retain);
  }

  const AgentConfig config_;
  const Say report_;
  std::mutex reporting_;
  const Topics topics_;
  std::atomic<bool> stopping_{false}, done_{false}, working_{false};
  bool started_ = false, ended_ = false, abandoned_ = false, token_dropped_ = false;
  int64_t memory_bytes_;
  Owner owner_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<Store> store_;
  std::unique_ptr<MessageSigner> speaker_;
  std::unique_ptr<ServerTrust> trust_;
  std::unique_ptr<Session> session_;
  std::unique_ptr<Mirrors> mirrors_;
  std::unique_ptr<Fetcher> fetcher_;
  std::unique_ptr<ProgressMessages> progress_;
  std::unique_ptr<Outbox> outbox_;
  std::unique_ptr<RoundExecutor> work_;
  std::unique_ptr<RoundScheduler> scheduler_;
  std::unique_ptr<Listening> listening_;
  std::unique_ptr<HelloSender> hello_sender_;
  std::unique_ptr<StatusReporter> federation_status_;
  NoticeLimiter refusals_;
  std::atomic<int64_t> online_at_{0};
  std::pair<int64_t, int64_t> limited_told_{0, 0};
  double tell_dropped_at_ = 0, rest_at_ = 0, resume_at_ = 0;
  std::string trouble_;
};

}  // namespace edgefl
