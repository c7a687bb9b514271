// Local arrays that fit a model.
#pragma once

#include <map>
#include <optional>
#include <string>

#include "data/check.h"
#include "data/rows.h"
#include "data/source.h"

namespace edgefl {

// One sample's label: integers are class numbers (one, or one per token), floats are answers or targets.
struct LabelSpec {
  Shape shape;
  DType dtype = DType::i64;
  std::optional<int64_t> ignored;  // a number that stands beside the classes and counts for nothing

  // What the bundle's graphs read as labels; one class number where none of them reads any.
  static LabelSpec of(const Manifest& manifest);
  bool floats() const { return dtype_floats(dtype); }
  // `y` as they lie there, with the axis that (1,) has; DataError for another shape, or for no numbers.
  RowsPtr shaped(RowsPtr y, const std::string& source) const;
  // The same, and each value is one that the model takes.
  RowsPtr fitted(RowsPtr y, int64_t classes, const std::string& source) const;
};

// As many rows of each, as they lie in the file; integer samples are scaled when a batch is drawn, not before.
struct FittedRows {
  RowsPtr x, y;
  NamedRows others;
  DataSpec spec;
  LabelSpec label;
  std::string skipped;
};

std::shared_ptr<FittedData> fitted_data(FittedRows rows);

}  // namespace edgefl
