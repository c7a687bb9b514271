// Blobs by mirrors: what a round's announcement names, and what the device was given, before the broker is asked. A mirror is
// believed nothing: each chunk is held against its digest as it comes, and what is right stays.
#pragma once

#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "link/mirrors/line.h"
#include "store/store.h"
#include "wire/mqtt/limits.h"
#include "wire/mqtt/messages.h"

namespace edgefl {

// Those of one device. `own` are asked first, those that the server names only if `others` are allowed. `tell` is told what is wrong with one, once for as long as it stays so.
// `announced` and the others may be called by different threads.
class Mirrors {
 public:
  Mirrors(const Limits& limits, std::vector<std::string> own, bool others, std::string ca_file, std::function<void(const std::string&)> tell);

  void announced(const Round& round);  // where the blobs of the current round are
  // Has as many chunks in the store as mirrors give. RoundAborted where there is no more use of them.
  void bring(const std::vector<BlobRef>& refs, Store& store, const std::function<bool()>& aborted);
  // Where something is missing still: BundleError or RoundDeclined if the broker has none.
  void check_broker() const;
  // Bytes of chunks since this was last asked, for a server that names mirrors: another may know of no such thing.
  int64_t take_received();

 private:
  struct MirrorRecord {  // how one did lately
    int faults = 0;
    double left_until = 0;
    std::string told;
  };
  struct Pace;  // bytes since it began
  bool ask(const std::string& mirror, const std::vector<BlobRef>& refs, Store& store, const std::function<bool()>& aborted, bool only);
  MirrorLine::End whole(MirrorLine& line, const BlobRef& ref, Store& store, Pace& pace);
  void leave(const std::string& mirror, const std::string& why, bool only);
  std::vector<std::string> usable() const;
  bool knows(const std::string& mirror) const;  // with the lock held

  const Limits limits_;
  const std::vector<std::string> own_;
  const bool others_;
  const std::string ca_file_;
  const std::function<void(const std::string&)> tell_;
  mutable std::mutex lock_;  // of what is below
  std::vector<std::string> named_;
  std::map<std::string, MirrorRecord> records_;
  std::string unreadable_;
  bool only_ = false, counted_ = false;
  int64_t received_ = 0;
};

// Those that a user names; ConfigError for what is no mirror.
std::vector<std::string> own_mirrors(const std::vector<std::string>& texts);

}  // namespace edgefl
