#include "wire/blob_ref.h"

#include <algorithm>

#include "wire/digest.h"
#include "wire/errors.h"
#include "wire/printable.h"

namespace edgefl {

namespace {
constexpr int64_t kMostChunkBytes = 1 << 27;  // half of the largest packet of MQTT
}  // namespace

int64_t BlobRef::count() const {
  return std::max<int64_t>(1, size / chunk + (size % chunk != 0));
}

void BlobRef::check(int64_t limit) const {
  const std::string shown = in_quotes(std::string_view(sha256).substr(0, 12));
  const bool sizes = size >= 0 && chunk > 0;
  const size_t expected = sizes && count() > 1 ? static_cast<size_t>(std::min<int64_t>(count(), 1 << 25)) * kDigestBytes : 0;
  const bool unfolds = codec.empty() ? raw == 0 : raw > 0;
  const BundleError malformed("blob reference " + shown + " is malformed; ask the server to publish it again");
  if (!sizes || !is_hex(sha256, 64) || digests.size() != expected || !unfolds) throw malformed;
  const int64_t largest = std::max(size, raw);
  if (largest > limit)
    throw BundleError("blob " + sha256.substr(0, 12) + " has " + std::to_string(largest) + " bytes, more than the limit of " +
                      std::to_string(limit) + ": raise limits.max_blob_bytes or give this device a smaller tier");
  if (chunk > kMostChunkBytes) throw malformed;
}

bool BlobRef::accepts(int64_t index, std::string_view data) const {
  if (index < 0 || index >= count()) return false;
  if (static_cast<int64_t>(data.size()) != std::min(chunk, size - index * chunk)) return false;
  const Bytes wanted = count() == 1 ? from_hex(sha256) : digests.substr(static_cast<size_t>(index) * kDigestBytes, kDigestBytes);
  return edgefl::sha256(data) == wanted;
}

bool BlobRef::operator==(const BlobRef& other) const {
  return sha256 == other.sha256 && size == other.size && chunk == other.chunk && digests == other.digests &&
         codec == other.codec && raw == other.raw;
}

}  // namespace edgefl
