// A CSV with a head: its columns, and quotation marks that hide rows.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "data/records/csv.h"
#include "data/records/records.h"
#include "wire/errors.h"

namespace edgefl {

class CsvTable {
 public:
  // The names of the columns are read now. DataError if one of `columns` is missing or there twice.
  CsvTable(std::string path, std::string_view text, const std::vector<Column>& columns);

  // Read the next record that is no blank line. False at the end. DataError for a quotation mark that hides the rows behind
  // it: it is open at the end of the file, or closed by that of a later row.
  bool next(TableRecord& record);

 private:
  NextLine lines();
  CsvFields first();
  void read_head();
  void check_columns() const;
  bool hides_rows(const std::string& wrong) const;
  bool is_row(const CsvFields& row, size_t skipped, size_t before) const;
  void fill(TableRecord& record, CsvFields& fields) const;
  DataError open_quote(int64_t line, const std::string& wrong = "") const;

  std::string path_;
  std::string_view rest_;  // lines that are not read yet
  const std::vector<Column>& columns_;
  CsvFields head_;
  std::vector<size_t> places_;          // of each of `columns_` in a row
  int64_t number_ = 0;                  // lines read
  std::vector<std::string_view> last_;  // lines of the current record
  bool spaced_ = false;                 // a blank may follow a comma
  CsvReader reader_;
};

}  // namespace edgefl
