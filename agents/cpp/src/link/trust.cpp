#include "link/trust.h"

#include <algorithm>
#include <chrono>

#include "wire/digest.h"
#include "wire/packing.h"

namespace edgefl {
namespace {

constexpr const char* kTrust = "server-keys";
constexpr const char* kHeard = "server-numbers";
constexpr size_t kMostKeys = 16;

int64_t now_s() { return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count(); }

}  // namespace

ServerTrust::ServerTrust(Store& store, std::vector<Bytes> pinned, Say say) : store_(store), pinned_(std::move(pinned)), say_(std::move(say)) {
  read();
  const bool given = std::find(pinned_.begin(), pinned_.end(), trusted_.first) != pinned_.end();
  if (!pinned_.empty() && !given) {  // kept, for a start that is given none
    trusted_.first = pinned_[0];
    keep_trusted();
  }
  keys_ = known();
}

std::vector<Bytes> ServerTrust::keys() const {
  const std::lock_guard<std::mutex> guard(lock_);
  std::vector<Bytes> good;
  for (const auto& [key, until] : keys_)
    if (now_s() < until) good.push_back(key);
  return good;
}

bool ServerTrust::is_stored() const { return store_.fact(kTrust).has_value(); }

void ServerTrust::check_bundle(const std::string& sha256, std::string_view signature, const std::string& format) const {
  const std::vector<Bytes> good = keys();
  if (!good.empty()) return check_bundle_signature(good, sha256, signature);
  if (format == "executorch")
    throw BundleError("bundle " + sha256.substr(0, 12) + " is in format " + format +
                      ", whose loading is as good as running its code, and this device knows no key of a server: it is not loaded; give the "
                      "device the server's key by --server-key, or let the server sign");
}

void ServerTrust::unsigned_message(const char* name, const std::string& topic) const {
  if (!keys_.empty())
    throw IdentityError("unsigned", std::string("a ") + name + " on " + topic +
                                        " is not signed, and this device knows the server's key: it is not acted on");
}

void ServerTrust::tell_bare() {
  if (!bare_) say_("server-key", "this server does not sign: whoever reaches the broker can be taken for it", {});
  bare_ = true;
}

std::optional<ServerTrust::Trusted> ServerTrust::admitted(const Envelope& envelope, bool announces) const {
  const auto found = keys_.find(envelope.key);
  if (found != keys_.end()) {
    if (now_s() < found->second) return std::nullopt;
    throw IdentityError("old-key", "server key " + shown_key(envelope.key) + " was replaced and is not good any more");
  }
  Trusted trusted = trusted_;
  if (keys_.empty()) {
    if (!announces) return std::nullopt;
    trusted.first = envelope.key;
    return trusted;
  }
  if (known_after(keys_, envelope.succession).count(envelope.key) != 0) {
    for (const Succession& each : envelope.succession)
      if (std::find(trusted.statements.begin(), trusted.statements.end(), each) == trusted.statements.end()) trusted.statements.push_back(each);
    return trusted;
  }
  std::string names;
  for (const auto& [key, until] : keys_) names += (names.empty() ? "" : ", ") + shown_key(key);
  throw IdentityError("unknown-key", "signed by server key " + hex(envelope.key) + ", and this device knows " + names +
                                         ": if the server was given a new key on purpose, start the device with it as --server-key; if not, "
                                         "somebody else speaks there");
}

void ServerTrust::learn(const Trusted& trusted, const Bytes& key) {
  const bool first = keys_.empty();
  trusted_ = trusted;
  keys_ = known();
  keep_trusted();
  say_("server-key",
       first ? "trust on first use: this device follows the server with the key " + hex(key) + " from now on"
             : "the server has a new key " + hex(key) + ", which its old one introduced",
       {});
}

void ServerTrust::in_order(const Envelope& envelope, const char* name, const std::string& topic, bool announces) {
  const Bytes& key = envelope.key;
  const auto until = keys_.find(key);
  // The server stands still while its key is rotated: the old one has announced its last round by then.
  if (announces && (until == keys_.end() || until->second != kForever))
    throw IdentityError("old-key", "server key " + shown_key(key) + " was replaced and announces no rounds any more");
  auto& numbers = numbers_[topic];
  const auto found = numbers.find(key);
  const int64_t last = found == numbers.end() ? -1 : found->second;
  if (envelope.at < last || (announces && envelope.at == last && key != announcer_))
    throw IdentityError("replayed", std::string("a ") + name + " on " + topic + " was said before, and something else after it: it is not acted on");
  if (envelope.at == last && (announced_ || !announces)) throw DuplicateMessageError("repeated", std::string("a ") + name + " on " + topic + " came once more");
  announced_ = announced_ || announces;
  if (envelope.at == last) return;
  if (numbers.size() >= kMostKeys)
    for (auto each = numbers.begin(); each != numbers.end();) each = keys_.count(each->first) != 0 ? std::next(each) : numbers.erase(each);
  numbers[key] = envelope.at;
  if (announces) announcer_ = key;
  keep_heard();
}

std::map<Bytes, int64_t> ServerTrust::known() const {
  std::map<Bytes, int64_t> roots;
  for (const Bytes& key : pinned_) roots[key] = kForever;
  if (pinned_.empty() && !trusted_.first.empty()) roots[trusted_.first] = kForever;
  return known_after(roots, trusted_.statements);
}

void ServerTrust::read() {
  try {
    if (const auto data = store_.fact(kTrust)) {
      const Packed packed(*data);
      const Fields fields(packed.root(), "trust");
      trusted_ = {fields.bytes("first", ""), read_successions(fields, "statements")};
    }
    if (const auto data = store_.fact(kHeard)) {
      const Packed packed(*data);
      const Fields fields(packed.root(), "heard");
      announcer_ = fields.bytes("announcer", "");
      fields.entries("numbers", [&](const std::string& topic, const Packable& value) {
        for (const auto& [key, at] : read_numbers(value)) numbers_[topic][key] = at;
      }, false);
    }
  } catch (const ProtocolError&) {  // of another release
  }
}

void ServerTrust::keep_trusted() {
  try {
    store_.keep_fact(kTrust, MapOut().bytes("first", trusted_.first).raw("statements", packed_successions(trusted_.statements)).done());
  } catch (const StoreError&) {  // a full disk: it is known as long as this process lives
  }
}

void ServerTrust::keep_heard() {
  MapOut topics;
  for (const auto& [topic, numbers] : numbers_) topics.raw(topic, packed_numbers(numbers));
  try {
    store_.keep_fact(kHeard, MapOut().raw("numbers", topics.done()).bytes("announcer", announcer_).done(), false);
  } catch (const StoreError&) {
  }
}

}  // namespace edgefl
