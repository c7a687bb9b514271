#include "wire/mqtt/envelope.h"

#include <algorithm>

#include "wire/digest.h"
#include "wire/errors.h"
#include "wire/packing.h"

namespace edgefl {
namespace {

constexpr int64_t kSigned = 2, kBlock = 1 << 20, kMostNumber = int64_t{1} << 62;
constexpr size_t kMostSuccessions = 8;

std::string signed_text(const std::string& context, const std::string& topic, int64_t at, std::string_view body) {
  return "edgefl/" + context + "/1\n" + topic + "\n" + std::to_string(at) + "\n" + sha256(body);
}

Bytes exactly(const Fields& fields, std::string_view key, size_t size) {
  Bytes found = fields.bytes(key);
  if (found.size() != size) throw ProtocolError(fields.name(key) + " has " + std::to_string(found.size()) + " bytes, not " + std::to_string(size));
  return found;
}

int64_t within(const Fields& fields, std::string_view key) {
  const int64_t found = fields.integer(key);
  if (found < 0 || found > kMostNumber) throw ProtocolError(fields.name(key) + " is beyond its range");
  return found;
}

}  // namespace

Bytes packed_successions(const std::vector<Succession>& statements) {
  std::vector<Bytes> packed;
  for (const Succession& each : statements)
    packed.push_back(MapOut().bytes("old", each.old).bytes("new", each.fresh).integer("until", each.until).bytes("signature", each.signature).done());
  return packed_list(packed);
}

std::vector<Succession> read_successions(const Fields& fields, std::string_view key) {
  std::vector<Succession> found;
  fields.each(key, [&](const Packable& value) {
    Fields each(value, "Succession");
    found.push_back({exactly(each, "old", kKeyBytes), exactly(each, "new", kKeyBytes), within(each, "until"), exactly(each, "signature", kSignatureBytes)});
  }, false);
  return found;
}

std::optional<Envelope> unwrap(std::string_view payload, const char* name) {
  if (version_of(payload, name) != kSigned) return std::nullopt;
  try {
    const Packed packed(payload);
    const Fields fields(packed.root(), "Envelope");
    Envelope envelope;
    envelope.key = exactly(fields, "key", kKeyBytes);
    envelope.at = within(fields, "at");
    envelope.signature = exactly(fields, "signature", kSignatureBytes);
    envelope.body = fields.bytes("body");
    envelope.succession = read_successions(fields, "succession");
    if (envelope.succession.size() > kMostSuccessions) throw ProtocolError("Envelope.succession is too long");
    return envelope;
  } catch (const ProtocolError& error) {
    throw ProtocolError(std::string("the envelope of a ") + name + " is malformed: " + error.what());
  }
}

void check_signature(const Envelope& envelope, const char* context, const char* name, const std::string& topic) {
  if (!verify(envelope.key, envelope.signature, signed_text(context, topic, envelope.at, envelope.body)))
    throw IdentityError("wrong-signature", std::string("the signature of a ") + name + " on " + topic +
                                               " does not hold: it was changed, or signed for another place");
}

MessageCounter::MessageCounter(int64_t kept, std::function<void(int64_t)> save, int64_t clock_us) : save_(std::move(save)), next_(std::max(kept, clock_us)), end_(next_) {}

int64_t MessageCounter::next(int64_t count) {
  const std::lock_guard<std::mutex> guard(lock_);
  if (next_ + count > end_) {
    end_ = next_ + count + kBlock;
    save_(end_);
  }
  const int64_t number = next_;
  next_ += count;
  return number;
}

MessageSigner::MessageSigner(const std::string& key_file, int64_t kept, std::function<void(int64_t)> save, int64_t clock_us)
    : keys_(key_file), numbers_(kept, std::move(save), clock_us) {}

Bytes MessageSigner::sealed(const std::string& context, const std::string& topic, const Bytes& body, int64_t at) const {
  MapOut out;
  out.integer("v", kSigned).bytes("key", keys_.public_key()).integer("at", at);
  out.bytes("signature", keys_.sign(signed_text(context, topic, at, body))).bytes("body", body);
  if (context == Hello::kContext && !keys_.successions().empty()) out.raw("succession", packed_successions(keys_.successions()));
  return out.done();
}

}  // namespace edgefl
