#include "wire/mqtt/keys.h"

#include <algorithm>
#include <fstream>
#include <openssl/evp.h>
#include <sstream>

#include "wire/digest.h"
#include "wire/errors.h"
#include "wire/files.h"

namespace edgefl {
namespace {

constexpr size_t kMostSuccessions = 8;

std::string succession_text(const Bytes& old, const Bytes& fresh, int64_t until) {
  return "edgefl/succession/1\n" + hex(old) + "\n" + hex(fresh) + "\n" + std::to_string(until) + "\n";
}

std::vector<Succession> read_chain(const std::string& path) {
  std::vector<Succession> chain;
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream parts(line);
    std::string old, fresh, signature;
    Succession each;
    parts >> old >> fresh >> each.until >> signature;
    if (!is_hex(old, 64, true) || !is_hex(fresh, 64, true) || !is_hex(signature, 128, true))
      throw ConfigError(path + " is damaged; restore it, or move it away and give the new key to all who know the old one");
    each.old = from_hex(old);
    each.fresh = from_hex(fresh);
    each.signature = from_hex(signature);
    chain.push_back(each);
  }
  if (chain.size() > kMostSuccessions) chain.erase(chain.begin(), chain.end() - kMostSuccessions);
  return chain;
}

std::string_view trimmed(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t\r\n");
  return begin == std::string_view::npos ? "" : text.substr(begin, text.find_last_not_of(" \t\r\n") - begin + 1);
}

const unsigned char* raw(std::string_view bytes) { return reinterpret_cast<const unsigned char*>(bytes.data()); }

}  // namespace

struct KeyPair::Private {
  EVP_PKEY* key = nullptr;
  ~Private() { EVP_PKEY_free(key); }
};

KeyPair::KeyPair(const std::string& path) : private_(std::make_unique<Private>()) {
  if (!file_exists(path)) write_secret(path, hex(random_bytes(kKeyBytes)) + "\n");
  const std::string text = read_file(path, 1024);
  const std::string_view digits = trimmed(text);
  if (!is_hex(digits, 2 * kKeyBytes, true))
    throw ConfigError(path + " holds no signing key: a key has 64 hexadecimal digits; move it away and a new one is made");
  const Bytes secret = from_hex(digits);
  private_->key = EVP_PKEY_new_raw_private_key(EVP_PKEY_ED25519, nullptr, raw(secret), secret.size());
  public_.resize(kKeyBytes);
  size_t size = kKeyBytes;
  if (private_->key == nullptr || EVP_PKEY_get_raw_public_key(private_->key, reinterpret_cast<unsigned char*>(public_.data()), &size) != 1)
    throw ConfigError(path + " holds no signing key that can be used; move it away and a new one is made");
  for (const Succession& each : read_chain(path + ".chain"))
    if (each.old != public_) successions_.push_back(each);  // a rotation that was interrupted left a key that is nowhere
}

KeyPair::~KeyPair() = default;

Bytes KeyPair::sign(std::string_view text) const {
  EVP_MD_CTX* context = EVP_MD_CTX_new();
  Bytes signature(kSignatureBytes, '\0');
  size_t size = kSignatureBytes;
  EVP_DigestSignInit(context, nullptr, nullptr, nullptr, private_->key);
  const int good = EVP_DigestSign(context, reinterpret_cast<unsigned char*>(signature.data()), &size, raw(text), text.size());
  EVP_MD_CTX_free(context);
  if (good != 1) throw Error("a message cannot be signed");
  return signature;
}

bool verify(std::string_view public_key, std::string_view signature, std::string_view text) {
  if (public_key.size() != kKeyBytes || signature.size() != kSignatureBytes) return false;
  EVP_PKEY* key = EVP_PKEY_new_raw_public_key(EVP_PKEY_ED25519, nullptr, raw(public_key), public_key.size());
  if (key == nullptr) return false;
  EVP_MD_CTX* context = EVP_MD_CTX_new();
  const bool good = EVP_DigestVerifyInit(context, nullptr, nullptr, nullptr, key) == 1 &&
                    EVP_DigestVerify(context, raw(signature), signature.size(), raw(text), text.size()) == 1;
  EVP_MD_CTX_free(context);
  EVP_PKEY_free(key);
  return good;
}

bool Succession::holds() const { return verify(old, signature, succession_text(old, fresh, until)); }

bool Succession::operator==(const Succession& other) const {
  return old == other.old && fresh == other.fresh && until == other.until && signature == other.signature;
}

Bytes parse_key(std::string_view text) {
  if (!is_hex(text, 2 * kKeyBytes, true))
    throw ConfigError("a key has 64 hexadecimal digits, found " + std::to_string(text.size()) + " characters");
  return from_hex(text);
}

std::vector<Bytes> parse_keys(std::string_view text) {
  std::vector<Bytes> keys;
  while (!text.empty()) {
    const size_t comma = text.find(',');
    keys.push_back(parse_key(trimmed(text.substr(0, comma))));
    text = comma == std::string_view::npos ? "" : text.substr(comma + 1);
  }
  return keys;
}

std::string shown_key(std::string_view key) { return hex(key).substr(0, 12); }

std::map<Bytes, int64_t> known_after(std::map<Bytes, int64_t> known, const std::vector<Succession>& statements) {
  std::vector<Succession> waiting = statements;
  for (;;) {
    const auto found = std::find_if(waiting.begin(), waiting.end(), [&](const Succession& each) {
      const auto old = known.find(each.old);
      return old != known.end() && old->second == kForever && each.holds();
    });
    if (found == waiting.end()) return known;
    const Succession each = *found;
    waiting.erase(found);
    if (known.count(each.fresh) == 0) {  // a key that has a successor introduces no second one
      known[each.old] = std::min(each.until, kForever - 1);
      known[each.fresh] = kForever;
    }
  }
}

void check_bundle_signature(const std::vector<Bytes>& known, const std::string& sha256, std::string_view signature) {
  const std::string text = "edgefl/v1/bundle/" + sha256;
  std::string keys;
  for (const Bytes& key : known) {
    if (!signature.empty() && verify(key, signature, text)) return;
    keys += (keys.empty() ? "" : ", ") + shown_key(key);
  }
  throw BundleError("bundle " + sha256.substr(0, 12) + " carries " + (signature.empty() ? "no signature" : "a wrong signature") +
                    " for the server key " + (keys.empty() ? "none" : keys) +
                    ": it is not loaded; give the device the key that the server prints, or find out who published this bundle");
}

Token Token::parse(std::string_view text) {
  text = trimmed(text);
  const bool shaped = text.size() == 5 + 16 + 1 + 64 + 1 + 64 && text.substr(0, 5) == "efl1." && text[21] == '.' && text[86] == '.' &&
                      is_hex(text.substr(5, 16), 16) && is_hex(text.substr(22, 64), 64) && is_hex(text.substr(87), 64);
  if (!shaped)
    throw ConfigError("the token is not one of `edgefl enroll token`: it begins with efl1. and has three parts of hexadecimal digits");
  return {std::string(text.substr(5, 16)), from_hex(text.substr(22, 64)), from_hex(text.substr(87))};
}

Bytes Token::proof(const std::string& hello_topic, std::string_view public_key) const {
  return hmac_sha256(secret, "edgefl/enrolment/1\n" + hello_topic + "\n" + hex(public_key) + "\n");
}

}  // namespace edgefl
