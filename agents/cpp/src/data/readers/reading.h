// What all readers share: labels, files by their class folder, and files that are decoded when they are asked for.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "data/check.h"
#include "data/fitted.h"
#include "data/readers/find_files.h"
#include "data/records/values.h"
#include "data/source.h"

namespace edgefl {

struct Samples {  // as many rows of each
  RowsPtr x, y;
  NamedRows others;
};

// Files at `source` on their way to samples of `spec` and labels of `label`.
class Reading {
 public:
  using Numbered = std::vector<std::pair<std::filesystem::path, int64_t>>;  // files with the numbers of their classes
  using Decode = std::function<Tensor(const std::filesystem::path&)>;

  Reading(std::string source, const DataSpec& spec, const LabelSpec& label, const DataParts& parts, Problems& problems);

  // DataError unless the model takes samples of one of these shapes, the only ones that the reader makes.
  void check_shape(const std::vector<Shape>& shapes) const;
  // A label as a class number or, if labels are floats, as a number. BadRow if it is none.
  double number(const Value& value) const;
  bool is_label(const Value& value) const;
  // The number of a class by its name, or its number in writing if the federation's classes have no names.
  int64_t class_number(std::string_view text) const;
  // DataError for files outside of a folder.
  Numbered by_folder(const std::vector<FoundFile>& files) const;
  // A sample for each file, decoded again when it is asked for: memory holds a batch of them. Each is decoded once now, so
  // that a broken one is known before a round begins. `then`, unless it is null, makes a sample of `dtype` of it.
  Samples decoded(const Numbered& files, DType dtype, const Decode& decode, const std::function<Tensor(Tensor)>& then = nullptr) const;

  const std::string source;
  const DataSpec& spec;
  const LabelSpec& label;
  const DataParts& parts;
  Problems& problems;

 private:
  std::map<std::string, int64_t> numbers_;  // of the class names, which macOS writes with accents apart
};

std::string listed(const std::vector<std::string>& names);

}  // namespace edgefl
