// Whom this device hears: the keys of the server, and what it said last (docs/protocol.md, Envelopes).
#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "link/say.h"
#include "store/store.h"
#include "wire/errors.h"
#include "wire/mqtt/envelope.h"

namespace edgefl {

// A copy of the server's last message on a topic, which brokers may deliver twice. Ignore it without a report.
struct DuplicateMessageError : IdentityError {
  using IdentityError::IdentityError;
};

// `pinned` are the keys that the device was given; without any, the first that announces a round is trusted. Thread-safe.
class ServerTrust {
 public:
  ServerTrust(Store& store, std::vector<Bytes> pinned, Say say);

  // The server's message. IdentityError if a key is known and it is not signed by one, or if it was said before something
  // else; ProtocolError if it is malformed; DuplicateMessageError for a copy.
  template <typename Message>
  Message open(const std::string& topic, std::string_view payload) {
    const auto envelope = unwrap(payload, Message::kName);
    const std::lock_guard<std::mutex> guard(lock_);
    if (!envelope) {
      unsigned_message(Message::kName, topic);
      Message message = decode<Message>(payload);
      tell_bare();
      return message;
    }
    constexpr bool announces = std::is_same_v<Message, Round>;
    const auto learnt = admitted(*envelope, announces);
    check_signature(*envelope, Message::kContext, Message::kName, topic);
    Message message = decode<Message>(envelope->body);
    if (learnt) learn(*learnt, envelope->key);
    if (!keys_.empty()) in_order(*envelope, Message::kName, topic, announces);
    return message;
  }

  std::vector<Bytes> keys() const;  // those that are good now
  bool is_stored() const;           // whether a key of the server is in the store, for the next start
  // BundleError for a bundle that is not signed by a known key, where one is known, and for an executable one where none is.
  void check_bundle(const std::string& sha256, std::string_view signature, const std::string& format) const;

 private:
  struct Trusted {
    Bytes first;
    std::vector<Succession> statements;
  };
  void unsigned_message(const char* name, const std::string& topic) const;
  void tell_bare();
  std::optional<Trusted> admitted(const Envelope& envelope, bool announces) const;
  void learn(const Trusted& trusted, const Bytes& key);
  void in_order(const Envelope& envelope, const char* name, const std::string& topic, bool announces);
  std::map<Bytes, int64_t> known() const;
  void read();
  void keep_trusted();
  void keep_heard();

  Store& store_;
  const std::vector<Bytes> pinned_;
  const Say say_;
  mutable std::mutex lock_;
  Trusted trusted_;
  std::map<Bytes, int64_t> keys_;  // and their expiries
  std::map<std::string, std::map<Bytes, int64_t>> numbers_;  // by topic and key: the last message
  Bytes announcer_;
  bool announced_ = false, bare_ = false;
};

}  // namespace edgefl
