// Samples that lie there as arrays: x, y, and what else there is of each sample by name.
#pragma once

#include <memory>
#include <string>

#include "data/rows.h"
#include "data/source.h"

namespace edgefl {

// `checked`: looked at right away, as files are; else when a bundle asks. DataError says what is wrong with them.
std::shared_ptr<DataSource> array_source(NamedRows arrays, std::string name, BadRows bad, bool checked);

}  // namespace edgefl
