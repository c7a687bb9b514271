// Packed masks and their gaps (docs/protocol.md, Bit masks).
#pragma once

#include <cstdint>
#include <string_view>

#include "wire/blob_ref.h"
#include "wire/tensor.h"

namespace edgefl {

constexpr int64_t kMostMaskBits = int64_t{1} << 33;

int64_t packed_mask_bytes(int64_t entries);
// ProtocolError unless it is uint8 of so many entries with no bit set beyond them.
void check_mask(const Tensor& packed, int64_t entries);
Bytes mask_to_gaps(const Tensor& packed, int64_t entries);
Tensor mask_from_gaps(std::string_view gaps, int64_t entries);

}  // namespace edgefl
