// Tables of CSV or JSON lines: a sample for each record.
#pragma once

#include <vector>

#include "data/readers/reading.h"

namespace edgefl {

Samples read_tables(const Reading& reading, const TableSpec& reader, const std::vector<FoundFile>& files);

}  // namespace edgefl
