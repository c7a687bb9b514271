// What leads from the weights a device has to the next ones (docs/protocol.md, Weights of a round).
#pragma once

#include <string_view>

#include "wire/blob_ref.h"
#include "wire/tensor.h"

namespace edgefl {

// The weights after the patch; BundleError if it does not belong to them or leads beyond float32.
Tensors patched(Tensors weights, std::string_view patch);
// What travelled as float16 in float32; the rest as it is.
Tensors widened(Tensors weights);

}  // namespace edgefl
