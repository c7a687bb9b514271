// Named tensors as bytes: safetensors, with the checks an untrusted sender needs. Masks travel packed or as gaps,
// whichever is less; only this file knows.
#pragma once

#include <map>
#include <string>
#include <string_view>

#include "wire/bytes/bits.h"
#include "wire/tensor.h"

namespace edgefl {

// Equal tensors give equal bytes: by alignment, then by name. `masks`: those that are packed masks, with their entries.
Bytes dump_tensors(const Tensors& tensors, const std::map<std::string, int64_t>& masks = {});

// ProtocolError if the bytes are no valid safetensors, a name occurs twice or is reserved, gaps are malformed, or masks
// that travel as gaps have more than `most_bits` entries together.
Tensors load_tensors(std::string_view data, int64_t most_bits = kMostMaskBits);

}  // namespace edgefl
