// Where a device's rounds are taken in: which one is to be worked on, the thread that does it, and what becomes of it.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>

#include "agent/rounds/carries.h"
#include "agent/rounds/job.h"
#include "link/outbox.h"
#include "link/say.h"
#include "store/store.h"

namespace edgefl {

// What the scheduler has others do.
struct SchedulerHost {
  std::function<void(const Job&)> work;                          // a round, in the worker thread
  std::function<Round(const Round&)> read;                       // an announcement whose offers are elsewhere; there too
  std::function<void(const Decline&)> send;
  std::function<void(int64_t round, const std::string& tier, const std::exception& error)> failed;  // an attempt, for people who watch
  std::function<bool()> held;                                    // whether nothing is begun now (paused)
  std::function<void()> wake;                                    // the agent looks around
  Say say;
  TellCarry dropped;
};

// One round at a time in a worker thread; all else is called on the agent's thread, but `is_over`.
class RoundScheduler {
 public:
  RoundScheduler(Store& store, Outbox& outbox, std::string format, double retry_pause_s, const std::atomic<bool>& stopping, SchedulerHost host);
  ~RoundScheduler();

  void announce(const Round& announced);
  void assign(const Task& task);
  void declare();         // says again what was declined of open rounds: there is no acknowledgement of it
  void begin();           // the round that is open and ours, unless it is done, failed a moment ago, or already running
  bool collect();         // whether a worker has ended since this was last asked
  bool join(double timeout_s);  // whether no worker is left after so many seconds

  bool busy() const { return worker_.joinable(); }
  double silent_s() const;  // seconds since a running worker began or last asked `is_over`; 0 without one
  bool is_idle() const;
  bool is_over() const;   // whether the job in hand is of no use any more; any thread
  bool is_done() const;   // whether the run that this device was part of is over, and nothing of it waits here
  bool heard() const { return announced_ != nullptr; }
  int64_t round_without_us() const;
  bool took_part() const;

 private:
  void remind();
  void drop_void();
  std::shared_ptr<const Round> whole();
  void begin_page();
  bool takes_part() const;
  void attempt_page(const BlobRef& page, std::shared_ptr<const Round> announced);
  std::optional<Job> next_job(const Round& announced);
  std::optional<Job> kept_job(const Round& announced);
  Job tried(Job job, const Job* kept, bool fresh);
  void start(std::function<void()> work);
  void attempt(const Job& job);
  void decline(const Job& job, const std::string& reason, const std::string& text);
  void send_decline(const PastRound& past);
  void fail(const std::string& key, int64_t round, const std::string& tier, const std::exception& error);

  Store& store_;
  Outbox& outbox_;
  const std::string format_;
  const double retry_pause_s_;
  const std::atomic<bool>& stopping_;
  const SchedulerHost host_;

  mutable std::mutex lock_;  // of what the worker reads, too
  std::shared_ptr<const Round> announced_;
  std::optional<Task> task_;
  std::shared_ptr<const Job> job_;
  std::optional<BlobRef> reading_;
  std::optional<std::pair<BlobRef, Round>> page_;  // the last that was read, and what it offers
  std::map<std::string, double> failed_;           // until when, by what
  std::pair<std::string, std::string> told_failure_;

  std::thread worker_;
  std::atomic<bool> ended_{false};
  mutable std::atomic<double> asked_at_{0};
  std::deque<std::string> seen_open_;
  bool resumed_ = false;  // the process began with work of an earlier process that ended early
  std::set<std::string> begun_;
};

}  // namespace edgefl
