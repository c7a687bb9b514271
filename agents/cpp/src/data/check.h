// Whether the values of local data are those that a model takes, in whole arrays and row by row.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>

#include "data/rows.h"

namespace edgefl {

// What a message shows of whole numbers. Those beyond int64 count as its largest, and `beyond` is set.
struct Range {
  int64_t least = INT64_MAX, most = INT64_MIN;
  bool beyond = false;
  bool none() const { return least > most; }
};

Range range_of(const Rows& rows, std::optional<int64_t> but = std::nullopt);  // integers or bool
bool all_finite(const Rows& rows, DType as);                                  // once they are floats of this type
uint64_t checksum(const Rows& rows);                                          // of their bytes
std::string whole_numbers(DType dtype);                                       // "-128 to 127"
bool holds(DType dtype, const Range& range);

// Each: DataError that begins with `source`.
void check_finite(const std::string& name, const Rows& rows, const std::string& source);
void check_range(const std::string& name, const Rows& rows, DType dtype, const std::string& source);
void check_below(const std::string& name, const Rows& rows, int64_t below, const std::string& source);

// What is wrong with one row: NaN, infinite, or a whole number that is not 0 .. below-1 (0: says nothing); else "".
// `but`: a number that is right wherever it stands.
std::string bad_value(const std::string& name, const Rows& rows, int64_t row, int64_t below,
                      std::optional<int64_t> but = std::nullopt);

// A row or a file that cannot be used; says why.
struct BadRow : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Rows that are left out, in one line for people; the first of them ends the reading where bad rows are refused.
class Problems {
 public:
  explicit Problems(BadRows policy) : policy_(policy) {}
  void add(const std::string& where, const std::string& text, int64_t rows = 1);  // DataError with BadRows::refuse
  std::string shown() const;
  void check_some(int64_t rows, const std::string& source) const;  // DataError where no row is left

 private:
  BadRows policy_;
  int64_t count_ = 0;
  std::string first_;
};

}  // namespace edgefl
