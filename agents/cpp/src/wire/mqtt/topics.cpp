#include "wire/mqtt/topics.h"

#include <algorithm>

#include "wire/digest.h"
#include "wire/errors.h"
#include "wire/printable.h"

namespace edgefl {
namespace {

bool is_letter(char c) { return (c >= 'A' && c <= 'Z') || (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9'); }

// Base 62 of a digest, the lowest digit first.
std::string letters_of(Bytes number, size_t count) {
  static constexpr char digits[] = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ";
  std::string found;
  for (size_t i = 0; i < count; ++i) {
    unsigned rest = 0;
    for (char& byte : number) {
      const unsigned value = rest * 256 + static_cast<unsigned char>(byte);
      byte = static_cast<char>(value / 62);
      rest = value % 62;
    }
    found += digits[rest];
  }
  return found;
}

}  // namespace

std::string checked_name(const std::string& kind, const std::string& name) {
  const bool good = !name.empty() && name.size() <= 63 && is_letter(name[0]) && std::all_of(name.begin(), name.end(), [](char c) {
    return is_letter(c) || c == '.' || c == '_' || c == '-';
  });
  if (!good)
    throw ConfigError(kind + " " + in_quotes(name) + " is not usable: use 1 to 63 letters, digits, '.', '_' or '-', starting with a letter or digit");
  return name;
}

Topics::Topics(const std::string& federation, const std::string& device)
    : root("edgefl/v1/" + checked_name("federation", federation)), below(root + "/devices/" + checked_name("device", device)) {}

std::string Topics::update(int64_t round, int64_t index, int64_t shard) const {
  const std::string leaf = shard == kNoShard ? "/updates/" : "/shards/" + std::to_string(shard) + "/";
  return below + leaf + std::to_string(round) + "/" + std::to_string(index);
}

std::string client_id(const Bytes& secret, const std::string& role, const std::string& federation, const std::string& name, bool readable) {
  const std::string whole = "edgefl:" + role + ":" + federation + (name.empty() ? "" : ":" + name);
  if (!readable) return letters_of(hmac_sha256(secret, whole), 23);
  return whole.size() <= 128 ? whole : "edgefl:" + role + "=" + letters_of(sha256(whole), 43);
}

int64_t publish_bytes(const std::string& topic, size_t payload, int qos) {
  const int64_t rest = 2 + static_cast<int64_t>(topic.size()) + (qos > 0 ? 2 : 0) + static_cast<int64_t>(payload);
  int64_t digits = 1;
  for (int64_t reach = 128; rest >= reach; reach *= 128) ++digits;
  return 1 + digits + rest;
}

}  // namespace edgefl
