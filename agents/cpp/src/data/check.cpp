#include "data/check.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "data/convert.h"

namespace edgefl {
namespace {

constexpr int64_t kReleaseEvery = 1024;  // rows

// Calls `use(row, bytes)` for every row, until it says false.
template <typename Use>
void each_row(const Rows& rows, Use use) {
  std::vector<std::byte> buffer(rows.row_bytes());
  for (int64_t row = 0; row < rows.count; ++row) {
    rows.read(row, buffer.data());
    if (!use(row, buffer.data())) break;
    if (row % kReleaseEvery == kReleaseEvery - 1) rows.released();
  }
  rows.released();
}

// Calls `use(value)` for every entry of a row.
template <typename Use>
void each_entry(const Rows& rows, const std::byte* data, Use use) {
  with_type(rows.dtype, [&](auto zero) {
    for (int64_t at = 0, count = rows.row_count(); at < count; ++at) use(entry<decltype(zero)>(data, at));
  });
}

void widen(Range& range, uint64_t value) {
  const bool beyond = value > static_cast<uint64_t>(INT64_MAX);
  range.beyond = range.beyond || beyond;
  const int64_t number = beyond ? INT64_MAX : static_cast<int64_t>(value);
  range.least = std::min(range.least, number);
  range.most = std::max(range.most, number);
}

void widen(Range& range, int64_t value) {
  range.least = std::min(range.least, value);
  range.most = std::max(range.most, value);
}

template <typename T>
void widen_by(Range& range, T value, std::optional<int64_t> but) {
  if constexpr (std::is_integral_v<T>) {
    using Wide = std::conditional_t<std::is_same_v<T, uint64_t>, uint64_t, int64_t>;
    if (!but || static_cast<int64_t>(value) != *but) widen(range, static_cast<Wide>(value));
  }
}

Range limits_of(DType dtype) {
  Range found;
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    widen_by(found, std::numeric_limits<T>::min(), std::nullopt);
    widen_by(found, std::numeric_limits<T>::max(), std::nullopt);
  });
  return found;
}

std::string ends(const Range& range) { return std::to_string(range.least) + " to " + std::to_string(range.most); }

}  // namespace

Range range_of(const Rows& rows, std::optional<int64_t> but) {
  Range range;
  each_row(rows, [&](int64_t, const std::byte* data) {
    each_entry(rows, data, [&](auto value) { widen_by(range, value, but); });
    return true;
  });
  return range;
}

bool all_finite(const Rows& rows, DType as) {
  bool finite = true;
  each_row(rows, [&](int64_t, const std::byte* data) {
    each_entry(rows, data, [&](auto value) {
      const double number = as == DType::f64 ? static_cast<double>(value) : static_cast<float>(value);
      finite = finite && std::isfinite(number) && (as != DType::f16 || std::fabs(number) < 65520.0);
    });
    return finite;
  });
  return finite;
}

uint64_t checksum(const Rows& rows) {
  constexpr uint64_t kOdd = 0x9e3779b97f4a7c15;
  const size_t bytes = rows.row_bytes();
  uint64_t sum = static_cast<uint64_t>(rows.count);
  each_row(rows, [&](int64_t, const std::byte* data) {
    for (size_t at = 0; at < bytes; at += sizeof(uint64_t)) {
      uint64_t word = 0;
      std::memcpy(&word, data + at, std::min(sizeof word, bytes - at));
      sum = (sum ^ word) * kOdd;
      sum ^= sum >> 32;
    }
    return true;
  });
  return sum;
}

std::string whole_numbers(DType dtype) {
  return dtype == DType::u64 ? "0 to " + std::to_string(UINT64_MAX) : ends(limits_of(dtype));
}

bool holds(DType dtype, const Range& range) {
  const Range limits = limits_of(dtype);
  return limits.least <= range.least && range.most <= limits.most && (!range.beyond || limits.beyond);
}

void check_finite(const std::string& name, const Rows& rows, const std::string& source) {
  if (!dtype_floats(rows.dtype)) return;
  int64_t nan = 0, infinite = 0, first = -1;
  each_row(rows, [&](int64_t row, const std::byte* data) {
    each_entry(rows, data, [&](auto value) {
      const double number = static_cast<double>(value);
      if (std::isfinite(number)) return;
      ++(std::isnan(number) ? nan : infinite);
      if (first < 0) first = row;
    });
    return true;
  });
  if (first < 0) return;
  const std::string kinds = nan == 0 ? "infinite" : infinite == 0 ? "NaN" : "NaN or infinite";
  const int64_t count = nan + infinite;
  const std::string values = count == 1 ? "1 value of " + name + " is" : std::to_string(count) + " values of " + name + " are";
  throw DataError(source + ": " + values + " " + kinds + ", first at row " + std::to_string(first) +
                  ": repair or remove such rows (rows count from 0)");
}

void check_range(const std::string& name, const Rows& rows, DType dtype, const std::string& source) {
  const Range found = range_of(rows);
  if (!found.none() && !holds(dtype, found)) {
    throw DataError(source + ": " + name + " go from " + ends(found) + ", the model takes " +
                    std::string(dtype_name(dtype)) + ", " + whole_numbers(dtype));
  }
}

void check_below(const std::string& name, const Rows& rows, int64_t below, const std::string& source) {
  if (below == 0) return;
  const Range found = range_of(rows);
  if (!found.none() && (found.least < 0 || found.most >= below || found.beyond)) {
    throw DataError(source + ": " + name + " go from " + ends(found) + ", the model takes whole numbers from 0 to " +
                    std::to_string(below - 1) + ": prepare the data with the vocabulary of the federation");
  }
}

std::string bad_value(const std::string& name, const Rows& rows, int64_t row, int64_t below, std::optional<int64_t> but) {
  std::vector<std::byte> buffer(rows.row_bytes());
  rows.read(row, buffer.data());
  std::string wrong;
  each_entry(rows, buffer.data(), [&](auto value) {
    if (!wrong.empty()) return;
    if constexpr (std::is_floating_point_v<decltype(value)>) {
      if (!std::isfinite(value)) wrong = name + " has a value that is NaN or infinite";
    } else {
      Range one;
      widen_by(one, value, but);
      if (below != 0 && !one.none() && (one.least < 0 || one.most >= below || one.beyond)) {
        wrong = name + " has " + std::to_string(value) + ", the model takes whole numbers from 0 to " +
                std::to_string(below - 1);
      }
    }
  });
  return wrong;
}

void Problems::add(const std::string& where, const std::string& text, int64_t rows) {
  if (policy_ == BadRows::refuse) {
    throw DataError(where + ": " + text + "; repair or remove it, or have bad rows skipped");
  }
  if (count_ == 0) first_ = where + ": " + text;
  count_ += rows;
}

std::string Problems::shown() const {
  if (count_ == 0) return "";
  return count_ == 1 ? "1 row is left out, " + first_
                     : std::to_string(count_) + " rows are left out, the first is " + first_;
}

void Problems::check_some(int64_t rows, const std::string& source) const {
  if (rows == 0) {
    throw DataError(source + " has no sample that can be used" + (count_ == 0 ? "" : ": " + shown()));
  }
}

}  // namespace edgefl
