#include "link/outbox.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "wire/digest.h"
#include "wire/errors.h"

namespace edgefl {
namespace {

constexpr size_t kMostAcks = 64;
constexpr int64_t kEnvelopeBytes = 512;  // more than any UpdateChunk needs around its data
constexpr double kLongest = 16.0;        // times ack_timeout_s
constexpr double kLookS = 0.25;          // how long the end of the agent is not looked for

}  // namespace

PastRound past_of(const Outgoing& outgoing, const Ack& ack) {
  PastRound past;
  past.run = outgoing.run;
  past.round = outgoing.round;
  past.nonce = outgoing.nonce;
  past.outcome = ack.status;
  past.reason = ack.reason;
  past.loss = std::nan("");
  past.up_bytes = static_cast<int64_t>(outgoing.data.size());
  try {
    const Update update = decode_update(outgoing.data);
    past.tier = update.tier;
    if (const auto loss = update.metrics.find("loss"); loss != update.metrics.end()) past.loss = loss->second;
    past.step_ms = update.profile.step_ms;
    past.peak_bytes = update.profile.peak_bytes;
    past.down_bytes = update.profile.down_bytes;
  } catch (const ProtocolError&) {  // another release computed it
  }
  return past;
}

Outbox::Outbox(Session& session, const Topics& topics, Store& store, const Limits& limits, MessageSigner& speaker, Say say,
               std::function<void(const PastRound&, const Ack&)> settled)
    : session_(session), topics_(topics), store_(store), limits_(limits), speaker_(speaker), say_(std::move(say)), settled_(std::move(settled)),
      room_(std::max(limits.chunk_bytes / 2, limits.chunk_bytes - kEnvelopeBytes)) {}

void Outbox::start() {
  thread_ = std::thread([this] { run(); });
}

void Outbox::leave() {
  const std::lock_guard<std::mutex> guard(lock_);
  stopping_ = true;
  news_.notify_all();
}

void Outbox::stop() {
  leave();
  if (thread_.joinable()) thread_.join();
}

void Outbox::wake() {
  const std::lock_guard<std::mutex> guard(lock_);
  work_ = true;
  news_.notify_all();
}

void Outbox::send_again() {
  keep(std::nullopt);
  wake();
}

// One on another update than the one that is being sent says nothing; while none is sent it may be about the next.
void Outbox::deliver(Ack ack) {
  {
    const std::lock_guard<std::mutex> guard(lock_);
    if (!sending_.empty() && sending_ != ack.nonce) return;
  }
  keep(std::move(ack));
}

void Outbox::keep(std::optional<Ack> ack) {
  const std::lock_guard<std::mutex> guard(lock_);
  if (acks_.size() < kMostAcks) acks_.push_back(std::move(ack));
  news_.notify_all();
}

void Outbox::run() {
  std::string trouble;
  while (!stopping_) {
    try {
      const auto outgoing = session_.connected() ? store_.outgoing() : std::nullopt;
      if (outgoing) {
        {
          const std::lock_guard<std::mutex> guard(lock_);
          sending_ = outgoing->nonce;
        }
        send_until_settled(*outgoing);
        trouble.clear();
        continue;
      }
    } catch (const std::exception& error) {  // a full disk, no memory: the update waits, and the server's word is asked for again
      if (trouble != error.what()) say_("store", error.what(), {});
      trouble = error.what();
      std::unique_lock<std::mutex> guard(lock_);
      news_.wait_for(guard, std::chrono::duration<double>(limits_.retry_pause_s), [&] { return stopping_.load(); });
      continue;
    }
    std::unique_lock<std::mutex> guard(lock_);
    sending_.clear();
    news_.wait_for(guard, std::chrono::seconds(1), [&] { return work_ || stopping_; });
    work_ = false;
  }
}

int64_t Outbox::pieces(const Outgoing& outgoing) const {
  const auto size = static_cast<int64_t>(outgoing.data.size());
  return std::max<int64_t>(1, size / room_ + (size % room_ != 0));
}

std::string_view Outbox::piece(const Outgoing& outgoing, int64_t index) const {
  return std::string_view(outgoing.data).substr(static_cast<size_t>(index * room_), static_cast<size_t>(room_));
}

void Outbox::send_until_settled(const Outgoing& outgoing) {
  const std::string sha256 = sha256_hex(outgoing.data);
  const int64_t count = pieces(outgoing);
  std::vector<int64_t> every(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) every[static_cast<size_t>(i)] = i;
  const bool offers = outgoing.ask && count > 1;
  bool offering = offers;
  std::vector<int64_t> wanted = every;
  double patience_s = limits_.ack_timeout_s;
  flying_.clear();
  while (!stopping_ && session_.connected()) {
    forget_reasons();
    if (offering) {
      publish(outgoing, sha256, 0, "");  // says that there is one: its pieces go out when the server asks for them
    } else {
      send(outgoing, sha256, wanted);
    }
    const std::optional<Ack> ack = wait_for(outgoing.nonce, sha256, patience_s);
    if (!ack) {  // a server with a backlog gets no shorter one by hearing everything twice
      patience_s = std::min(2 * patience_s, kLongest * limits_.ack_timeout_s);
      offering = offers;
      wanted = every;
    } else if (ack->status == "missing") {
      // Each once: whoever can write acknowledgements could ask for one piece a thousand times.
      std::set<int64_t> seen;
      wanted.clear();
      for (const int64_t index : ack->missing)
        if (index >= 0 && index < count && seen.insert(index).second) wanted.push_back(index);
      offering = false;
    } else {
      settle(outgoing, *ack);
      return;
    }
  }
}

void Outbox::settle(const Outgoing& outgoing, const Ack& ack) {
  const PastRound past = past_of(outgoing, ack);
  store_.settle(past);
  settled_(past, ack);
}

void Outbox::publish(const Outgoing& outgoing, const std::string& sha256, int64_t index, std::string_view data) {
  UpdateChunk chunk{outgoing.nonce, sha256, index, pieces(outgoing), static_cast<int64_t>(outgoing.data.size()), data};
  const std::string topic = topics_.update(outgoing.round, index, outgoing.shard);
  flying_.push_back(session_.publish(topic, speaker_.seal(topic, chunk)));
}

// Publishes chunks, at most a window of them ahead of the broker.
void Outbox::send(const Outgoing& outgoing, const std::string& sha256, const std::vector<int64_t>& wanted) {
  for (const int64_t index : wanted) {
    publish(outgoing, sha256, index, piece(outgoing, index));
    while (static_cast<int64_t>(flying_.size()) >= limits_.upload_window && !stopping_) {
      if (session_.wait(flying_.front(), kLookS)) {
        flying_.pop_front();
      } else if (!session_.connected()) {
        return;
      }
    }
  }
}

// The server's word on this update, not on another for the same task; nothing when it is time to send again.
std::optional<Ack> Outbox::wait_for(const std::string& nonce, const std::string& sha256, double patience_s) {
  const auto until = std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(patience_s));
  std::unique_lock<std::mutex> guard(lock_);
  while (news_.wait_until(guard, until, [&] { return !acks_.empty() || stopping_; }) && !stopping_) {
    const std::optional<Ack> ack = std::move(acks_.front());
    acks_.pop_front();
    if (!ack || (ack->nonce == nonce && ack->sha256 == sha256)) return ack;
  }
  return std::nullopt;
}

// Reasons to send again that came before this sending; words of the server stay.
void Outbox::forget_reasons() {
  const std::lock_guard<std::mutex> guard(lock_);
  acks_.erase(std::remove_if(acks_.begin(), acks_.end(), [](const auto& ack) { return !ack.has_value(); }), acks_.end());
}

}  // namespace edgefl
