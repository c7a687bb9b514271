// Fetching blobs, from mirrors and from the broker: subscribe to the chunks that are missing, a window at a time, check each, keep it on disk.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "link/mirrors/mirrors.h"
#include "link/session.h"
#include "store/store.h"
#include "wire/mqtt/limits.h"
#include "wire/mqtt/topics.h"

namespace edgefl {

// Payloads of messages on blob topics, and with the headers of their packets.
struct Traffic {
  int64_t payload = 0, wire = 0;
};

class Fetcher {
 public:
  // `aborted`: whether the round is over.
  Fetcher(Session& session, const Topics& topics, Store& store, const Limits& limits, std::function<bool()> aborted, Mirrors& mirrors);

  // The blob, unfolded. BundleError if nobody gives the right bytes, RoundAborted if the round ends meanwhile.
  Bytes get(const BlobRef& ref);
  // Has all of them in the store; `get` then finds them there.
  void bring(const std::vector<BlobRef>& refs);

  void deliver(const std::string& topic, Bytes payload);  // a message on a blob topic
  void poke();                                            // the connection is new: what was asked for is asked for again
  int64_t received() const;                               // payloads since they were last taken
  Traffic take_received();
  int64_t take_mirrored() { return mirrors_.take_received(); }
  int64_t dropped() const { return dropped_; }

 private:
  using Place = std::pair<BlobRef, int64_t>;
  struct Window {
    std::deque<Place> waiting;
    std::map<std::string, Place> asked;
    std::map<std::string, int64_t> bad;
    std::vector<std::string> finished;
  };
  enum class What { chunk, poke, silence };
  struct Arrived {
    What what = What::silence;
    std::string topic;
    Bytes payload;
  };
  std::deque<Place> missing(const std::vector<BlobRef>& refs) const;
  void collect(Window window);
  void fill(Window& window);
  bool take(Window& window, const Arrived& arrived);
  void refuse(Window& window, const std::string& topic, const Place& place);
  Arrived next(double deadline);

  Session& session_;
  const Topics topics_;
  Store& store_;
  const Limits limits_;
  const std::function<bool()> aborted_;
  Mirrors& mirrors_;
  mutable std::mutex lock_;
  std::condition_variable news_;
  std::deque<Arrived> arrived_;
  Traffic received_;
  int64_t largest_ = -1;  // bytes of the largest chunk that is asked for; -1: none is
  std::atomic<int64_t> dropped_{0};
};

}  // namespace edgefl
