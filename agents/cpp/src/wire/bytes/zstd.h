// Unfolding zstd without believing what its frame says.
#pragma once

#include <string_view>

#include "wire/blob_ref.h"

namespace edgefl {

// The blob's own bytes from those that travelled and were verified. BundleError, before anything is set aside for it, where
// they are more than `limit` or other than the reference says.
Bytes unpacked(const BlobRef& ref, Bytes data, int64_t limit);

}  // namespace edgefl
