// The rows that a bundle uses: all of them, or the training or the held-out part (docs/protocol.md, Held-out rows).
#pragma once

#include <memory>

#include "data/source.h"

namespace edgefl {

// The rows of `source` that `manifest` uses; DataError if the data do not fit, or if none is in its part. The division is
// computed once for equal data: a later round with the same source and split hashes no row.
std::shared_ptr<FittedData> fit_rows(const DataSource& source, const Manifest& manifest, const DataParts& parts);

}  // namespace edgefl
