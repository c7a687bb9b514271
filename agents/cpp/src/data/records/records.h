// Records of CSV or JSON lines, their columns by name.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "data/records/values.h"

namespace edgefl {

inline constexpr const char* kNoText = "it is no text in UTF-8";

// A column that a file must have. `check` returns false for a value that cannot be in it, so that a row of text is told
// from one of the table.
struct Column {
  std::string name;
  std::function<bool(const Value&)> check;
};

// One record: the values of the columns asked for, in their order. `wrong`, unless it is "", says why the line is no record.
struct TableRecord {
  int64_t line = 0;
  std::vector<Value> values;
  std::string wrong;
};

// Call `use` for each record of a file: a CSV with a head, or JSON lines if its name ends in .jsonl.
// DataError if a CSV lacks a column or has it twice, a quotation mark hides rows, or the file cannot be read as text.
void each_record(const std::string& path, const std::vector<Column>& columns, const std::function<void(const TableRecord&)>& use);

}  // namespace edgefl
