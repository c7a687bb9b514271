// Rows of CSV as Python's csv module reads them.
#pragma once

#include <functional>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace edgefl {

using CsvFields = std::vector<std::string>;
// The next line with its end, or nothing. It is valid until the next call.
using NextLine = std::function<std::optional<std::string_view>()>;

// The first line of `text` with its end: \n, \r or \r\n.
std::string_view first_line(std::string_view text);

struct CsvError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Quotes { strict, lenient, none };  // `none`: a quotation mark is a letter as any other

class CsvReader {
 public:
  // `skip_blanks`: blanks behind a comma are no part of a field.
  CsvReader(NextLine next, Quotes quotes, bool skip_blanks = false) : next_(std::move(next)), quotes_(quotes), skip_blanks_(skip_blanks) {}

  // Read the next row into `fields`, none for a blank line. False at the end. CsvError for what is no CSV: the rest of its
  // line is left out, and the next call goes on behind it.
  bool read(CsvFields& fields);

 private:
  enum class State { record, field, plain, quoted, quote, end };

  void take(char letter, CsvFields& fields);
  void end_of_line(CsvFields& fields);
  void save(CsvFields& fields);
  void add(char letter);

  NextLine next_;
  Quotes quotes_;
  bool skip_blanks_;
  State state_ = State::record;
  std::string field_;
  size_t letters_ = 0;
};

// The first row of `line`, as csv.reader([line]) gives it.
CsvFields fields_of(std::string_view line, Quotes quotes = Quotes::lenient);

}  // namespace edgefl
