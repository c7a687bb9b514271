// A blob by its digest, and how it is cut into chunks.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace edgefl {

using Bytes = std::string;  // bytes, not text; std::string moves and compares well

struct BlobRef {
  std::string sha256;  // of the bytes that travel, 64 lower-case hexadecimal digits
  int64_t size = 0;
  int64_t chunk = 0;
  Bytes digests;      // 32 bytes per chunk, empty for one
  std::string codec;  // "" or "zstd"
  int64_t raw = 0;    // bytes unfolded, of "zstd"

  int64_t count() const;  // of chunks, at least 1
  // BundleError unless it is sound and within `limit` bytes, folded and unfolded.
  void check(int64_t limit) const;
  // Whether `data` is chunk `index`.
  bool accepts(int64_t index, std::string_view data) const;
  bool operator==(const BlobRef& other) const;
};

}  // namespace edgefl
