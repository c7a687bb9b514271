#include "agent/rounds/scheduler.h"

#include <algorithm>
#include <chrono>

#include "link/session.h"
#include "wire/errors.h"

namespace edgefl {
namespace {

constexpr size_t kMostRuns = 16;

}  // namespace

RoundScheduler::RoundScheduler(Store& store, Outbox& outbox, std::string format, double retry_pause_s, const std::atomic<bool>& stopping, SchedulerHost host)
    : store_(store), outbox_(outbox), format_(std::move(format)), retry_pause_s_(retry_pause_s), stopping_(stopping), host_(std::move(host)) {}

RoundScheduler::~RoundScheduler() {
  if (worker_.joinable()) worker_.join();
}

// What the server says.

void RoundScheduler::announce(const Round& announced) {
  {
    const std::lock_guard<std::mutex> guard(lock_);
    if (!announced_) resumed_ = store_.has_outgoing() || store_.job().has_value();
    announced_ = std::make_shared<const Round>(announced);
  }
  const bool seen = std::find(seen_open_.begin(), seen_open_.end(), announced.run) != seen_open_.end();
  if (announced.is_open() && !seen) {
    seen_open_.push_back(announced.run);
    if (seen_open_.size() > kMostRuns) seen_open_.pop_front();
  }
  drop_void();
  remind();
}

void RoundScheduler::assign(const Task& task) {
  {
    const std::lock_guard<std::mutex> guard(lock_);
    task_ = task;
  }
  remind();
}

// The server speaks of a round: it may have lost what we sent.
void RoundScheduler::remind() {
  if (store_.has_outgoing()) outbox_.send_again();
  declare();
}

void RoundScheduler::declare() {
  if (!announced_) return;
  for (const int64_t number : announced_->takes())
    for (const PastRound& past : store_.declined(announced_->run, number)) send_decline(past);
}

// Where it stands.

bool RoundScheduler::is_idle() const { return !busy() && !store_.job() && !store_.has_outgoing(); }

double RoundScheduler::silent_s() const { return busy() && !ended_ ? monotonic_s() - asked_at_ : 0; }

bool RoundScheduler::is_over() const {
  asked_at_ = monotonic_s();
  if (stopping_) return true;
  const std::lock_guard<std::mutex> guard(lock_);
  if (reading_) return !announced_ || !announced_->is_open() || !announced_->pages || !(*announced_->pages == *reading_);
  if (!job_ || !announced_) return false;
  return !job_->is_open(*announced_) || job_->is_replaced(task_);
}

int64_t RoundScheduler::round_without_us() const { return !task_ && !busy() && announced_ && announced_->is_open() ? announced_->round : 0; }

bool RoundScheduler::took_part() const {
  if (!announced_) return false;
  const auto history = store_.history();
  return std::any_of(history.begin(), history.end(), [&](const PastRound& past) { return past.run == announced_->run; });
}

bool RoundScheduler::is_done() const {
  if (!announced_ || announced_->state != "done") return false;
  // The retained "done" of an earlier run must not send a device away before the next run begins.
  const bool ours = std::find(seen_open_.begin(), seen_open_.end(), announced_->run) != seen_open_.end() || (resumed_ && took_part());
  return ours && !store_.has_outgoing() && !busy();
}

// Working.

bool RoundScheduler::collect() {
  if (!worker_.joinable() || !ended_) return false;
  worker_.join();
  {
    const std::lock_guard<std::mutex> guard(lock_);
    job_.reset();
  }
  drop_void();  // its last step may have been made after its round was over
  return true;
}

void RoundScheduler::begin() {
  if (busy() || !announced_ || stopping_ || host_.held()) return;
  const auto offered = whole();
  if (!offered) return begin_page();
  const std::optional<Job> job = next_job(*offered);
  if (!job) return;
  const auto again = failed_.find(job->nonce);
  if (again != failed_.end() && monotonic_s() < again->second) return;
  {
    const std::lock_guard<std::mutex> guard(lock_);
    job_ = std::make_shared<const Job>(*job);
  }
  start([this, job = *job] { attempt(job); });
}

void RoundScheduler::start(std::function<void()> work) {
  ended_ = false;
  asked_at_ = monotonic_s();
  worker_ = std::thread([this, work = std::move(work)] {
    try {
      work();
    } catch (const std::exception&) {  // not even the failure could be told: the job is in the store, and is begun again
    }
    ended_ = true;
    host_.wake();
  });
}

bool RoundScheduler::join(double timeout_s) {
  for (const double until = monotonic_s() + timeout_s; worker_.joinable() && !ended_ && monotonic_s() < until;) std::this_thread::sleep_for(std::chrono::milliseconds(10));
  if (worker_.joinable() && ended_) worker_.join();
  return !worker_.joinable();
}

std::optional<Job> RoundScheduler::next_job(const Round& announced) {
  if (auto kept = kept_job(announced)) return kept;
  const auto job = task_ ? Job::of(*task_, announced, format_) : std::nullopt;
  // In this order: the outbox may move an update from waiting to past between the two questions.
  if (!job || store_.waits(job->nonce) || store_.is_past(job->nonce)) return std::nullopt;
  return tried(*job, nullptr, true);
}

// The job of a killed process or a failed attempt, as its round is announced now; dropped if that is over.
std::optional<Job> RoundScheduler::kept_job(const Round& announced) {
  const auto data = store_.job();
  if (!data) return std::nullopt;
  const auto job = decode_job(*data);
  const auto now = job ? job->following(announced, format_) : std::nullopt;
  if (!now || job->is_replaced(task_)) {
    store_.close_job();
    return std::nullopt;
  }
  return tried(*now, &*job, !now->same_content(*job));
}

// The job as it is kept from now on, in place of `kept`. The first attempt of each process counts: one that ends the process is
// not made for ever. `fresh` drops what was computed for another.
Job RoundScheduler::tried(Job job, const Job* kept, bool fresh) {
  if (kept == nullptr || begun_.count(job.nonce) == 0) ++job.tries;
  const Bytes now = encode(job);
  if (kept == nullptr || now != encode(*kept)) store_.open_job(now, fresh);
  begun_ = {job.nonce};
  return job;
}

void RoundScheduler::attempt(const Job& job) {
  try {
    host_.work(job);
    outbox_.wake();
  } catch (const RoundDeclined& declined) {
    decline(job, declined.reason, declined.what());
  } catch (const DataError& error) {  // another round, or another bundle, may fit
    host_.say("data", error.what(), {{"round", job.round}});
    decline(job, "wrong-data", error.what());
  } catch (const RoundAborted& error) {
    if (!stopping_) return host_.say("aborted", error.what(), {{"round", job.round}});
    try {  // it ended in good order
      Job kept = job;
      --kept.tries;
      store_.open_job(encode(kept));
    } catch (const StoreError&) {
    }
    host_.say("stopped", "round " + std::to_string(job.round) + " is left as it is: this device goes on with it when it is started again", {{"round", job.round}});
  } catch (const std::exception& error) {  // an engine's own exception must not end the agent
    fail(job.nonce, job.round, job.tier, error);
  }
}

// Remembered before it is sent: it is sent again until its round is over, and never worked on again.
void RoundScheduler::decline(const Job& job, const std::string& reason, const std::string& text) {
  PastRound past;
  past.run = job.run;
  past.round = job.round;
  past.tier = job.tier;
  past.nonce = job.nonce;
  past.outcome = kDeclined;
  past.reason = reason;
  past.text = text;
  try {
    store_.decline(past);
  } catch (const StoreError& error) {
    return fail(job.nonce, job.round, job.tier, error);
  }
  send_decline(past);
  host_.say("declined", "round " + std::to_string(job.round) + " (" + reason + "): " + text, {{"round", job.round}});
}

void RoundScheduler::send_decline(const PastRound& past) { host_.send({past.round, past.nonce, past.reason, ""}); }

void RoundScheduler::drop_void() {
  try {
    if (announced_) drop_abandoned(store_, *announced_, host_.dropped);
  } catch (const StoreError&) {  // a full disk: the next announcement finds it again
  }
}

void RoundScheduler::fail(const std::string& key, int64_t round, const std::string& tier, const std::exception& error) {
  const std::string reason = error.what();
  {
    const std::lock_guard<std::mutex> guard(lock_);
    failed_[key] = monotonic_s() + retry_pause_s_;
  }
  host_.failed(round, tier, error);
  if (told_failure_ == std::pair(key, reason)) return;  // it tries every second, and people have read it
  told_failure_ = {key, reason};
  host_.say("failed", "round " + std::to_string(round) + " failed: " + reason + "; trying again while it is open", {{"round", round}});
}

}  // namespace edgefl
