// Files in a folder for each class, which become samples when they are asked for.
#pragma once

#include <memory>
#include <string>

#include "data/source.h"

namespace edgefl {

// DataError if `path` is no folder with files in it that any agent reads.
std::shared_ptr<DataSource> class_folders(const std::string& path, BadRows bad);

}  // namespace edgefl
