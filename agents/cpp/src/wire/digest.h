// Digests and hexadecimal digits.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "wire/blob_ref.h"

namespace edgefl {

constexpr size_t kDigestBytes = 32;

Bytes sha256(std::string_view data);                             // 32 bytes
std::string sha256_hex(std::string_view data);                   // 64 digits
Bytes hmac_sha256(std::string_view secret, std::string_view text);
std::string hex(std::string_view data);
bool is_hex(std::string_view text, size_t digits, bool upper = false);  // exactly so many
Bytes from_hex(std::string_view text);                           // ProtocolError for another text
Bytes random_bytes(size_t count);

// SHA-256 of what comes piece by piece.
class Sha256 {
 public:
  Sha256();
  ~Sha256();
  void add(std::string_view data);
  Bytes done();

 private:
  struct Context;
  std::unique_ptr<Context> context_;
};

}  // namespace edgefl
