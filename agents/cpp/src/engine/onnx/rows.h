// Ports of a graph that are rows of a port of its manifest: "state.weights.fc.weight[0:32]" (docs/protocol.md, Variants).
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace edgefl {

struct RowsOf {
  std::string whole;
  int64_t start = 0, stop = 0;  // of the leading axis, `stop` not included
};

// What a graph's port is a part of; none for a whole one.
std::optional<RowsOf> rows_in(const std::string& name);

}  // namespace edgefl
