// What arrived and was not looked at yet, in bounded memory.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>

#include "wire/blob_ref.h"

namespace edgefl {

struct Event {
  enum class Kind { up, down, message, refused, woken };
  Kind kind = Kind::woken;
  std::string topic;    // message, refused
  Bytes payload;        // message
  std::string text;     // down: why; refused: why
  std::string action;   // refused: "subscribe", "publish"
  double retry_s = 0;   // down: until the next attempt
  bool rival = false;   // down: another client seems to have our id
};

// A full inbox makes the network thread wait, so that the flood stays at the broker; but not for ever, as the connection has
// to be kept alive: what finds no room for a while is dropped, and counted.
class Inbox {
 public:
  Inbox(int64_t messages, int64_t nbytes, double patience_s) : messages_(messages), nbytes_(nbytes), patience_(patience_s) {}

  void put(Event event) {
    std::unique_lock<std::mutex> guard(lock_);
    if (event.kind == Event::Kind::message) {
      const int64_t size = static_cast<int64_t>(event.payload.size()) + kOverhead;
      const auto fits = [&] { return held_ == 0 || (held_ < messages_ && held_bytes_ + size <= nbytes_); };
      if (!room_.wait_for(guard, patience_, fits)) {
        ++dropped_;
        return;
      }
      ++held_;
      held_bytes_ += size;
    }
    events_.push_back(std::move(event));
    news_.notify_one();
  }

  std::optional<Event> get(double timeout_s) {
    std::unique_lock<std::mutex> guard(lock_);
    if (!news_.wait_for(guard, std::chrono::duration<double>(timeout_s), [&] { return !events_.empty(); })) return std::nullopt;
    Event event = std::move(events_.front());
    events_.pop_front();
    if (event.kind == Event::Kind::message) {
      --held_;
      held_bytes_ -= static_cast<int64_t>(event.payload.size()) + kOverhead;
      room_.notify_one();
    }
    return event;
  }

  int64_t dropped() const {
    const std::lock_guard<std::mutex> guard(lock_);
    return dropped_;
  }

 private:
  static constexpr int64_t kOverhead = 512;
  const int64_t messages_, nbytes_;
  const std::chrono::duration<double> patience_;
  mutable std::mutex lock_;
  std::condition_variable room_, news_;
  std::deque<Event> events_;
  int64_t held_ = 0, held_bytes_ = 0, dropped_ = 0;
};

}  // namespace edgefl
