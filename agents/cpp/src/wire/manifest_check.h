// Whether a manifest that can be read makes sense.
#pragma once

#include "wire/manifest.h"

namespace edgefl {

// BundleError says what does not fit.
void check_manifest(const Manifest& manifest);

}  // namespace edgefl
