#include "wire/digest.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/rand.h>

#include "wire/errors.h"

namespace edgefl {

struct Sha256::Context {
  EVP_MD_CTX* evp = EVP_MD_CTX_new();
  ~Context() { EVP_MD_CTX_free(evp); }
};

Sha256::Sha256() : context_(std::make_unique<Context>()) { EVP_DigestInit_ex(context_->evp, EVP_sha256(), nullptr); }
Sha256::~Sha256() = default;

void Sha256::add(std::string_view data) { EVP_DigestUpdate(context_->evp, data.data(), data.size()); }

Bytes Sha256::done() {
  Bytes found(kDigestBytes, '\0');
  EVP_DigestFinal_ex(context_->evp, reinterpret_cast<unsigned char*>(found.data()), nullptr);
  return found;
}

Bytes sha256(std::string_view data) {
  Sha256 whole;
  whole.add(data);
  return whole.done();
}

std::string sha256_hex(std::string_view data) { return hex(sha256(data)); }

Bytes hmac_sha256(std::string_view secret, std::string_view text) {
  Bytes found(kDigestBytes, '\0');
  unsigned int size = kDigestBytes;
  HMAC(EVP_sha256(), secret.data(), static_cast<int>(secret.size()), reinterpret_cast<const unsigned char*>(text.data()),
       text.size(), reinterpret_cast<unsigned char*>(found.data()), &size);
  return found;
}

std::string hex(std::string_view data) {
  static constexpr char digits[] = "0123456789abcdef";
  std::string text;
  text.reserve(2 * data.size());
  for (const char each : data) {
    const auto byte = static_cast<unsigned char>(each);
    text += digits[byte >> 4];
    text += digits[byte & 15];
  }
  return text;
}

bool is_hex(std::string_view text, size_t digits, bool upper) {
  if (text.size() != digits) return false;
  for (const char c : text)
    if (!((c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (upper && c >= 'A' && c <= 'F'))) return false;
  return true;
}

Bytes from_hex(std::string_view text) {
  if (text.size() % 2 != 0 || !is_hex(text, text.size(), true)) throw ProtocolError("these are no hexadecimal digits");
  const auto value = [](char c) { return c <= '9' ? c - '0' : (c | 32) - 'a' + 10; };
  Bytes found;
  for (size_t i = 0; i < text.size(); i += 2) found += static_cast<char>(value(text[i]) << 4 | value(text[i + 1]));
  return found;
}

Bytes random_bytes(size_t count) {
  Bytes found(count, '\0');
  if (RAND_bytes(reinterpret_cast<unsigned char*>(found.data()), static_cast<int>(count)) != 1)
    throw Error("this system gives no random numbers");
  return found;
}

}  // namespace edgefl
