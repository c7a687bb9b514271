#include "link/fetch.h"

#include <algorithm>
#include <set>

#include "wire/bytes/zstd.h"
#include "wire/digest.h"
#include "wire/errors.h"

namespace edgefl {
namespace {

constexpr int kQos = 0;       // a chunk that is lost is asked for again
constexpr size_t kWindows = 4;  // of chunks that may wait to be looked at: some are sent twice

std::vector<std::string> names_of(const std::map<std::string, std::pair<BlobRef, int64_t>>& asked) {
  std::vector<std::string> names;
  for (const auto& each : asked) names.push_back(each.first);
  return names;
}

}  // namespace

Fetcher::Fetcher(Session& session, const Topics& topics, Store& store, const Limits& limits, std::function<bool()> aborted, Mirrors& mirrors)
    : session_(session), topics_(topics), store_(store), limits_(limits), aborted_(std::move(aborted)), mirrors_(mirrors) {}

int64_t Fetcher::received() const {
  const std::lock_guard<std::mutex> guard(lock_);
  return received_.payload;
}

Traffic Fetcher::take_received() {
  const std::lock_guard<std::mutex> guard(lock_);
  return std::exchange(received_, {});
}

void Fetcher::deliver(const std::string& topic, Bytes payload) {
  const std::lock_guard<std::mutex> guard(lock_);
  received_.payload += static_cast<int64_t>(payload.size());
  received_.wire += publish_bytes(topic, payload.size(), kQos);
  const bool few = arrived_.size() < kWindows * static_cast<size_t>(limits_.fetch_window);
  if (few && static_cast<int64_t>(payload.size()) <= largest_) {
    arrived_.push_back({What::chunk, topic, std::move(payload)});
    news_.notify_one();
  } else {  // more than was asked for
    ++dropped_;
  }
}

void Fetcher::poke() {
  const std::lock_guard<std::mutex> guard(lock_);
  arrived_.push_back({What::poke, "", ""});
  news_.notify_one();
}

Bytes Fetcher::get(const BlobRef& ref) {
  for (int64_t tries = 0; tries < limits_.fetch_retries; ++tries) {
    bring({ref});
    Bytes whole = store_.blob(ref);
    if (static_cast<int64_t>(whole.size()) == ref.size && sha256_hex(whole) == ref.sha256) return unpacked(ref, std::move(whole), limits_.max_blob_bytes);
    store_.drop_blob(ref);
  }
  throw BundleError("blob " + ref.sha256.substr(0, 12) + " is damaged on every attempt; it is refused");
}

void Fetcher::bring(const std::vector<BlobRef>& refs) {
  std::vector<BlobRef> once;
  std::set<std::string> seen;
  for (const BlobRef& ref : refs) {
    ref.check(limits_.max_blob_bytes);
    if (seen.insert(ref.sha256).second) once.push_back(ref);
  }
  if (missing(once).empty()) return;
  store_.make_room(once);
  mirrors_.bring(once, store_, aborted_);
  Window window;
  window.waiting = missing(once);
  if (window.waiting.empty()) return;
  mirrors_.check_broker();
  for (const BlobRef& ref : once)
    if (const int64_t largest = std::min(ref.chunk, ref.size); largest > limits_.readable_bytes() && !missing({ref}).empty())
      throw RoundDeclined("large-chunks", "expected chunks of " + std::to_string(limits_.readable_bytes()) + " bytes at most (limits.max_message_bytes), found " +
                                              std::to_string(largest) + " in blob " + ref.sha256.substr(0, 12) +
                                              "; raise it, or set limits.chunk_bytes of the federation lower");
  collect(std::move(window));
}

std::deque<Fetcher::Place> Fetcher::missing(const std::vector<BlobRef>& refs) const {
  std::deque<Place> places;
  for (const BlobRef& ref : refs)
    for (const int64_t index : store_.missing_chunks(ref)) places.emplace_back(ref, index);
  return places;
}

void Fetcher::collect(Window window) {
  {
    const std::lock_guard<std::mutex> guard(lock_);
    arrived_.clear();  // a poke from before would have the whole window sent twice
    largest_ = 0;
    for (const auto& [ref, index] : window.waiting) largest_ = std::max(largest_, ref.chunk);
  }
  const auto leave = [&] {
    {
      const std::lock_guard<std::mutex> guard(lock_);
      largest_ = -1;
    }
    std::vector<std::string> names = names_of(window.asked);
    names.insert(names.end(), window.finished.begin(), window.finished.end());
    session_.unsubscribe(names);
  };
  try {
    int64_t silences = 0;
    double deadline = monotonic_s() + limits_.fetch_timeout_s;
    while (!window.waiting.empty() || !window.asked.empty()) {
      fill(window);
      const Arrived arrived = next(deadline);
      if (arrived.what == What::chunk) {
        if (!take(window, arrived)) continue;
        silences = 0;
        deadline = monotonic_s() + limits_.fetch_timeout_s;
        continue;
      }
      deadline = monotonic_s() + limits_.fetch_timeout_s;
      session_.subscribe(names_of(window.asked), kQos, false);
      silences += session_.connected() && arrived.what == What::silence;
      if (silences > limits_.fetch_retries) {
        const auto& [ref, index] = window.asked.begin()->second;
        throw BundleError(std::string(kLostChunk) + (": chunk " + std::to_string(index)) + " of blob " + ref.sha256.substr(0, 12) + " did not arrive in " +
                          std::to_string(silences) + " attempts; is the server up?");
      }
    }
  } catch (...) {
    leave();
    throw;
  }
  leave();
}

void Fetcher::fill(Window& window) {  // once half of it is free
  const auto most = static_cast<size_t>(limits_.fetch_window);
  if (window.asked.size() > most / 2 || window.waiting.empty()) return;
  std::vector<std::string> fresh;
  while (!window.waiting.empty() && window.asked.size() < most) {
    const Place place = window.waiting.front();
    window.waiting.pop_front();
    const std::string topic = topics_.blob_chunk(place.first.sha256, place.second);
    window.asked.emplace(topic, place);
    fresh.push_back(topic);
  }
  session_.unsubscribe(window.finished);
  window.finished.clear();
  session_.subscribe(fresh, kQos, false);
}

// Whether the message answers what was asked for, well or badly; anything else is as good as silence.
bool Fetcher::take(Window& window, const Arrived& arrived) {
  const auto found = window.asked.find(arrived.topic);
  if (found == window.asked.end() || arrived.payload.empty()) return false;
  const Place place = found->second;
  if (!place.first.accepts(place.second, arrived.payload)) {
    refuse(window, arrived.topic, place);
    return true;
  }
  store_.put_chunk(place.first, place.second, arrived.payload);
  window.asked.erase(found);
  window.finished.push_back(arrived.topic);
  return true;
}

void Fetcher::refuse(Window& window, const std::string& topic, const Place& place) {
  const int64_t bad = ++window.bad[topic];
  if (bad >= limits_.fetch_retries)
    throw BundleError(std::string(kLostChunk) + (": chunk " + std::to_string(place.second)) + " of blob " + place.first.sha256.substr(0, 12) + " had a wrong digest " +
                      std::to_string(bad) + " times; it is refused");
  session_.unsubscribe({topic});
  session_.subscribe({topic}, kQos, false);
}

Fetcher::Arrived Fetcher::next(double deadline) {
  for (;;) {
    if (aborted_()) throw RoundAborted("the round ended while its blobs were fetched");
    const double left = deadline - monotonic_s();
    std::unique_lock<std::mutex> guard(lock_);
    if (news_.wait_for(guard, std::chrono::duration<double>(std::clamp(left, 0.0, 0.25)), [&] { return !arrived_.empty(); })) {
      Arrived arrived = std::move(arrived_.front());
      arrived_.pop_front();
      return arrived;
    }
    if (left <= 0) return {};
  }
}

}  // namespace edgefl
