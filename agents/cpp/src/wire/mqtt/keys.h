// Ed25519: this device's key in its file, signatures, and how one key of a server follows another.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "wire/blob_ref.h"

namespace edgefl {

constexpr size_t kKeyBytes = 32, kSignatureBytes = 64;
constexpr int64_t kForever = int64_t{1} << 62;

// A key's own word that `fresh` takes its place; `old` is good until `until`, seconds since 1970.
struct Succession {
  Bytes old, fresh;
  int64_t until = 0;
  Bytes signature;
  bool holds() const;
  bool operator==(const Succession& other) const;
};

// A private key in a file that only its owner may read, as 64 hexadecimal digits; made if there is none. ConfigError if the
// file holds something else, StoreError if it cannot be written. `<file>.chain` holds how it followed from earlier ones.
class KeyPair {
 public:
  explicit KeyPair(const std::string& path);
  ~KeyPair();
  const Bytes& public_key() const { return public_; }
  const std::vector<Succession>& successions() const { return successions_; }
  Bytes sign(std::string_view text) const;
  Bytes client_secret() const { return sign("edgefl/v1/client-id"); }  // for client ids; never sent

 private:
  struct Private;
  std::unique_ptr<Private> private_;
  Bytes public_;
  std::vector<Succession> successions_;
};

bool verify(std::string_view public_key, std::string_view signature, std::string_view text);
Bytes parse_key(std::string_view text);                      // ConfigError unless it is 64 hexadecimal digits
std::vector<Bytes> parse_keys(std::string_view text);        // with commas between them
std::string shown_key(std::string_view key);                 // what people are shown of it

// Known keys and their expiries, and those that `statements` introduce one after the other.
std::map<Bytes, int64_t> known_after(std::map<Bytes, int64_t> known, const std::vector<Succession>& statements);

// BundleError unless `signature` is that of one of `known` for the bundle whose manifest has this digest.
void check_bundle_signature(const std::vector<Bytes>& known, const std::string& sha256, std::string_view signature);

// A one-time token, `efl1.<name>.<secret>.<server key>`; ConfigError for another text, which it does not repeat.
struct Token {
  std::string name;
  Bytes secret, server;
  static Token parse(std::string_view text);
  Bytes proof(const std::string& hello_topic, std::string_view public_key) const;
};

}  // namespace edgefl
