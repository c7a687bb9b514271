// Files that a bundle says how to read: in a folder for each class, or records of CSV and JSON lines.
#pragma once

#include <memory>
#include <string>

#include "data/source.h"

namespace edgefl {

// DataError if there are no files at `path` that any agent reads.
std::shared_ptr<DataSource> file_source(const std::string& path, BadRows bad);

}  // namespace edgefl
