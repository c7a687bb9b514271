// Signed messages: version 2 is version 1 in an envelope (docs/protocol.md, Envelopes).
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "wire/mqtt/keys.h"
#include "wire/mqtt/messages.h"

namespace edgefl {

struct Envelope {
  Bytes key;
  int64_t at = 0;
  Bytes signature, body;
  std::vector<Succession> succession;
};

// Of a message that `name` says; nothing for a bare one. ProtocolError if it is malformed.
std::optional<Envelope> unwrap(std::string_view payload, const char* name);
// IdentityError unless its signature holds for its key, the topic and the kind of message.
void check_signature(const Envelope& envelope, const char* context, const char* name, const std::string& topic);

// Numbers that grow, also over restarts and without a clock: blocks of them are taken from what `load` and `save` keep.
class MessageCounter {
 public:
  MessageCounter(int64_t kept, std::function<void(int64_t)> save, int64_t clock_us);
  int64_t next(int64_t count = 1);  // the first of `count` numbers that are used by nobody else

 private:
  std::function<void(int64_t)> save_;
  std::mutex lock_;
  int64_t next_, end_;
};

// Signs what this device says. Thread-safe.
class MessageSigner {
 public:
  MessageSigner(const std::string& key_file, int64_t kept, std::function<void(int64_t)> save, int64_t clock_us);
  const Bytes& public_key() const { return keys_.public_key(); }
  Bytes client_secret() const { return keys_.client_secret(); }
  MessageCounter& numbers() { return numbers_; }

  template <typename Message>
  Bytes seal(const std::string& topic, const Message& message) {
    return seal(topic, message, numbers_.next());
  }
  template <typename Message>
  Bytes seal(const std::string& topic, const Message& message, int64_t at) {
    return sealed(Message::kContext, topic, encode(message), at);
  }

 private:
  Bytes sealed(const std::string& context, const std::string& topic, const Bytes& body, int64_t at) const;
  KeyPair keys_;
  MessageCounter numbers_;
};

Bytes packed_successions(const std::vector<Succession>& statements);
std::vector<Succession> read_successions(const class Fields& fields, std::string_view key);

}  // namespace edgefl
