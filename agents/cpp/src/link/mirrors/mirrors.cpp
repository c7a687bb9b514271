#include "link/mirrors/mirrors.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "link/session.h"
#include "link/signals.h"
#include "wire/errors.h"
#include "wire/printable.h"

namespace edgefl {
namespace {

constexpr size_t kMostMirrors = 8;
constexpr int kMostDoublings = 6, kMostFailed = 2, kMostLacks = 3;  // lacks: blobs in a row that a mirror has not
constexpr const char* kRemedy = ": write it like https://weights.example.org/demo or http://gateway.lan:8480";

// Those of `texts` that are mirrors, each once; `wrong` is the last that is none.
std::vector<std::string> addresses(const std::vector<std::string>& texts, std::string& wrong) {
  std::vector<std::string> found;
  for (size_t at = 0; at < std::min(texts.size(), kMostMirrors); ++at) {
    const std::string address = mirror_address(texts[at]);
    if (address.empty()) wrong = in_quotes(texts[at]) + " is no mirror" + kRemedy;
    if (!address.empty() && std::find(found.begin(), found.end(), address) == found.end()) found.push_back(address);
  }
  return found;
}

}  // namespace

// A mirror that gives fewer bytes than the broker would is left for it.
struct Mirrors::Pace {
  const int64_t least_s;
  const double patience_s;
  double began = monotonic_s();
  int64_t nbytes = 0;
  std::string why = "";

  bool is_kept(int64_t more) {
    nbytes += more;
    const double took = monotonic_s() - began;
    if (took < patience_s) return true;
    const auto rate = static_cast<int64_t>(static_cast<double>(nbytes) / took);
    if (rate < least_s) why = "it gave " + std::to_string(rate) + " bytes/s over " + std::to_string(std::lround(took)) + " s (limits.mirror_bytes_s)";
    nbytes = 0;
    began = monotonic_s();
    return why.empty();
  }
};

std::vector<std::string> own_mirrors(const std::vector<std::string>& texts) {
  if (!texts.empty() && !reads_mirrors()) throw ConfigError("--mirror: this agent has no libcurl, which asks mirrors: install it, and build the agent with it");
  std::string wrong;
  auto found = addresses(texts, wrong);
  if (!wrong.empty()) throw ConfigError("--mirror: " + wrong);
  return found;
}

Mirrors::Mirrors(const Limits& limits, std::vector<std::string> own, bool others, std::string ca_file, std::function<void(const std::string&)> tell)
    : limits_(limits), own_(std::move(own)), others_(others), ca_file_(std::move(ca_file)), tell_(std::move(tell)) {}

void Mirrors::announced(const Round& round) {
  std::string wrong;
  bool fresh = false;
  {
    const std::lock_guard<std::mutex> guard(lock_);
    only_ = round.mirrors_only;
    counted_ = !round.mirrors.empty();
    const bool asked = others_ && !round.mirrors.empty() && reads_mirrors();
    named_ = asked ? addresses(round.mirrors, wrong) : std::vector<std::string>();
    fresh = wrong != unreadable_;
    unreadable_ = wrong;
    for (auto each = records_.begin(); each != records_.end();) each = knows(each->first) ? std::next(each) : records_.erase(each);
  }
  if (fresh && !wrong.empty()) tell_("the server names a mirror that is none: " + wrong);
}

bool Mirrors::knows(const std::string& mirror) const {
  const auto among = [&](const std::vector<std::string>& all) { return std::find(all.begin(), all.end(), mirror) != all.end(); };
  return among(own_) || among(named_);
}

int64_t Mirrors::take_received() {
  const std::lock_guard<std::mutex> guard(lock_);
  const int64_t fresh = std::exchange(received_, 0);
  return counted_ ? fresh : 0;
}

std::vector<std::string> Mirrors::usable() const {
  const std::lock_guard<std::mutex> guard(lock_);
  std::vector<std::string> found;
  for (const auto* each : {&own_, &named_})
    for (const std::string& mirror : *each) {
      const auto record = records_.find(mirror);
      const bool left = record != records_.end() && monotonic_s() < record->second.left_until;
      if (!left && std::find(found.begin(), found.end(), mirror) == found.end()) found.push_back(mirror);
    }
  return found;
}

void Mirrors::bring(const std::vector<BlobRef>& refs, Store& store, const std::function<bool()>& aborted) {
  bool only = false;
  {
    const std::lock_guard<std::mutex> guard(lock_);
    only = only_;
  }
  int failed = 0;
  for (const std::string& mirror : usable()) {
    std::vector<BlobRef> wanted;
    std::copy_if(refs.begin(), refs.end(), std::back_inserter(wanted), [&](const BlobRef& ref) { return !store.missing_chunks(ref).empty(); });
    if (wanted.empty() || (failed == kMostFailed && !only)) return;
    failed += !ask(mirror, wanted, store, aborted, only);
    if (aborted()) throw RoundAborted("the round ended while its blobs were fetched");
  }
}

// Whether it did not fail.
bool Mirrors::ask(const std::string& mirror, const std::vector<BlobRef>& refs, Store& store, const std::function<bool()>& aborted, bool only) {
  const NoPipeSignal held;
  const bool near = std::find(own_.begin(), own_.end(), mirror) == own_.end();
  MirrorLine line(mirror, {near, limits_.fetch_timeout_s, ca_file_}, aborted);
  Pace pace{only ? 0 : limits_.mirror_bytes_s, limits_.fetch_timeout_s};
  int lacks = 0;
  for (const BlobRef& ref : refs) {
    const MirrorLine::End end = whole(line, ref, store, pace);
    if (aborted()) return true;
    if (end == MirrorLine::End::whole) {
      lacks = 0;
      const std::lock_guard<std::mutex> guard(lock_);
      records_[mirror] = {};
    } else if (end == MirrorLine::End::wrong || ++lacks == kMostLacks) {
      leave(mirror, "blob " + ref.sha256.substr(0, 12) + ": " + (pace.why.empty() ? line.why() : pace.why), only);
      return false;
    }
  }
  return true;
}

// The stretches of a blob that are missing, one after the other.
MirrorLine::End Mirrors::whole(MirrorLine& line, const BlobRef& ref, Store& store, Pace& pace) {
  const std::vector<int64_t> missing = store.missing_chunks(ref);
  for (size_t at = 0; at < missing.size();) {
    size_t behind = at + 1;
    while (behind < missing.size() && missing[behind] == missing[behind - 1] + 1) ++behind;
    int64_t index = missing[at];
    const auto keep = [&](std::string_view piece) {
      {
        const std::lock_guard<std::mutex> guard(lock_);
        received_ += static_cast<int64_t>(piece.size());
      }
      if (!ref.accepts(index, piece)) return false;
      store.put_chunk(ref, index++, piece);
      return pace.is_kept(static_cast<int64_t>(piece.size()));
    };
    const auto end = line.pieces(ref.sha256, ref.size, index * ref.chunk, std::min((missing[behind - 1] + 1) * ref.chunk, ref.size), ref.chunk, keep);
    if (end != MirrorLine::End::whole) return end;
    at = behind;
  }
  return MirrorLine::End::whole;
}

void Mirrors::leave(const std::string& mirror, const std::string& why, bool only) {
  std::string text;
  {
    const std::lock_guard<std::mutex> guard(lock_);
    MirrorRecord& record = records_[mirror];
    // Where there is no broker to turn to, it is tried again soon.
    const double pause = limits_.mirror_pause_s * std::pow(2.0, only ? 0 : std::min(record.faults, kMostDoublings));
    ++record.faults;
    record.left_until = monotonic_s() + pause;
    if (why != record.told) text = "mirror " + mirror + " is left for " + std::to_string(std::lround(pause)) + " s: " + why;
    record.told = why;
  }
  if (!text.empty()) tell_(text);
}

void Mirrors::check_broker() const {
  const std::lock_guard<std::mutex> guard(lock_);
  if (!only_) return;
  if (own_.empty() && named_.empty())
    throw RoundDeclined("policy", std::string("the blobs of this federation are at mirrors only, and this agent ") +
                                      (!reads_mirrors() ? "has no libcurl, which asks them: install it, and build the agent with it"
                                       : others_        ? "knows none: have the server name one, or name one by --mirror"
                                                        : "may use none that the server names: allow them, or name one of its own"));
  std::string faults;
  for (const auto& [mirror, record] : records_)
    if (!record.told.empty()) faults += (faults.empty() ? "" : "; ") + mirror + ": " + record.told;
  throw BundleError(std::string(kLostChunk) + ": no mirror gave all blobs of the round, and the broker has none: " + faults);
}

}  // namespace edgefl
