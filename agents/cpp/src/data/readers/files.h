// Files that a bundle says how to read: in a folder for each class, or records of CSV and JSON lines.
#pragma once

#include <memory>
#include <string>

#include "data/fitted.h"
#include "data/source.h"

namespace edgefl {

// DataError if there are no files at `path` that any agent reads.
std::shared_ptr<DataSource> file_source(const std::string& path, BadRows bad);

// What decides how stored data become samples, as a key.
std::string key_of(const DataSpec& spec, const LabelSpec& label);

}  // namespace edgefl
