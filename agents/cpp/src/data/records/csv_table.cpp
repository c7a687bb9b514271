#include "data/records/csv_table.h"

#include <algorithm>
#include <cctype>
#include <utility>

#include "data/records/unicode.h"
#include "wire/printable.h"

namespace edgefl {
namespace {

constexpr const char* kUnclosed = "unexpected end of data";  // the reader's error for an open quotation mark
constexpr size_t kNamed = 12;                                // columns that a message lists

bool has_blanks(const CsvFields& row) {
  return row.size() > 1 && std::any_of(row.begin() + 1, row.end(), [](const auto& field) { return field.substr(0, 1) == " "; });
}

bool has_lines(const std::string& text) {
  for (size_t place = 0; place < text.size();) {
    const auto [code, size] = code_point_at(text, place);
    place += size;
    if (code == '\r' && place < text.size() && text[place] == '\n') continue;
    if (is_line_end(code)) return place < text.size();
  }
  return false;
}

// Excel's line on what separates columns, before their names.
bool is_separator_line(const CsvFields& fields) {
  std::string text;
  for (const std::string& field : fields) text += (&field == &fields.front() ? "" : ",") + field;
  for (size_t at = 0; at < 4 && at < text.size(); ++at) text[at] = static_cast<char>(std::tolower(static_cast<unsigned char>(text[at])));
  return text.substr(0, 4) == "sep=" && code_points(text) == 5 && text[4] != '\n';
}

std::string trimmed(const std::string& field) {
  const size_t begin = field.find_first_not_of("\" \t\r\n");
  return begin == std::string::npos ? "" : field.substr(begin, field.find_last_not_of("\" \t\r\n") + 1 - begin);
}

}  // namespace

CsvTable::CsvTable(std::string path, std::string_view text, const std::vector<Column>& columns)
    : path_(std::move(path)), rest_(text), columns_(columns), reader_(lines(), Quotes::strict) {
  read_head();
  check_columns();
  for (const Column& column : columns_) {
    places_.push_back(static_cast<size_t>(std::find(head_.begin(), head_.end(), column.name) - head_.begin()));
  }
  reader_ = CsvReader(lines(), Quotes::strict, spaced_);
}

NextLine CsvTable::lines() {
  return [this]() -> std::optional<std::string_view> {
    if (rest_.empty()) return std::nullopt;
    const std::string_view line = first_line(rest_);
    rest_.remove_prefix(line.size());
    ++number_;
    last_.push_back(line);
    return line;
  };
}

CsvFields CsvTable::first() {
  CsvFields fields;
  try {
    while (reader_.read(fields)) {
      if (!fields.empty()) return fields;
    }
  } catch (const CsvError& error) {
    throw open_quote(1, error.what());
  }
  return {};
}

void CsvTable::read_head() {
  CsvFields names = first();
  if (is_separator_line(names)) {
    last_.clear();
    names = first();
  }
  std::string joined;
  for (size_t at = 0; at < names.size(); ++at) {
    joined += names[at];
    const bool needed = std::any_of(columns_.begin(), columns_.end(), [&](const Column& each) { return each.name == names[at]; });
    head_.push_back(needed ? names[at] : std::string(stripped(names[at])));
    spaced_ = spaced_ || (at > 0 && head_[at] != names[at]);
  }
  const bool all = std::all_of(columns_.begin(), columns_.end(), [&](const Column& each) {
    return std::find(head_.begin(), head_.end(), each.name) != head_.end();
  });
  if (!all && has_lines(joined)) throw open_quote(number_ - static_cast<int64_t>(last_.size()) + 1);
}

void CsvTable::check_columns() const {
  for (const std::string& name : head_) {
    if (!is_utf8(name) || name.find('\0') != std::string::npos) throw DataError(path_ + " cannot be read as text (UTF-8): convert it");  // UTF-16 has zeros
  }
  for (const Column& column : columns_) {
    if (std::count(head_.begin(), head_.end(), column.name) > 0) continue;
    const size_t separator = head_.size() == 1 ? std::string(";\t|").find_first_of(head_.front()) : std::string::npos;
    if (separator != std::string::npos) {
      throw DataError(path_ + " separates its columns by " + repr_of_text(std::string(1, ";\t|"[separator])) +
                      ", expected commas: write it with commas between the columns and points in the numbers");
    }
    std::string found;
    for (size_t at = 0; at < std::min(head_.size(), kNamed); ++at) found += (at == 0 ? "" : ", ") + repr_of_text(head_[at]);
    if (head_.size() > kNamed) found += ", ... (" + std::to_string(head_.size()) + " in all)";
    throw DataError(path_ + " has no column " + repr_of_text(column.name) + "; it has " + (found.empty() ? "none" : found) +
                    ": columns are called as the federation calls them, in the first line");
  }
  for (const Column& column : columns_) {
    if (std::count(head_.begin(), head_.end(), column.name) > 1) {
      throw DataError(path_ + " has column " + repr_of_text(column.name) + " more than once: give each a name of its own, in the first line");
    }
  }
}

bool CsvTable::next(TableRecord& record) {
  CsvFields fields;
  while (true) {
    last_.clear();
    record.line = number_ + 1;
    record.wrong.clear();
    std::string wrong;
    try {
      if (!reader_.read(fields)) return false;
    } catch (const CsvError& error) {
      wrong = error.what();
      fields.clear();
      if (wrong == kUnclosed) throw open_quote(record.line, wrong);
    }
    if (last_.size() > 1 && hides_rows(wrong)) throw open_quote(record.line);
    if (!wrong.empty()) {
      record.wrong = "it is no line of a CSV (" + wrong + "); quote the field, and double quotation marks inside of it";
      return true;
    }
    if (fields.empty()) continue;
    spaced_ = spaced_ || (last_.size() == 1 && has_blanks(fields));
    fill(record, fields);
    return true;
  }
}

void CsvTable::fill(TableRecord& record, CsvFields& fields) const {
  if (fields.size() > head_.size()) {
    record.wrong = "it has " + std::to_string(fields.size()) + " fields, and there are " + std::to_string(head_.size()) + " columns";
  } else if (!std::all_of(fields.begin(), fields.end(), is_utf8)) {
    record.wrong = kNoText;
  }
  record.values.assign(columns_.size(), Value());
  for (size_t at = 0; at < columns_.size() && record.wrong.empty(); ++at) {
    if (places_[at] < fields.size()) record.values[at] = text_value(fields[places_[at]]);
  }
}

// Whether the lines of a quoted field are rows by themselves, so that its quotation mark must be a mistake.
//
// Text may have as many commas as there are columns. What distinguishes a row from it: its label is one of the classes, its
// numbers are numbers, and no blank is behind its commas if other rows have none there. The line that opens the quote is
// judged too, unless the CSV is `wrong` at the closing one: a text rarely ends in a label.
bool CsvTable::hides_rows(const std::string& wrong) const {
  const size_t before = fields_of(last_.front()).size() - 1;
  const CsvFields opening = fields_of(last_.front(), Quotes::none);
  const bool opens_row = opening.size() >= head_.size() && is_row(opening, opening.size() - head_.size(), before);
  if (columns_.empty() || (wrong.empty() && !opens_row)) return false;
  size_t inside = 0, rows = 0;
  for (size_t at = 1; at < last_.size(); ++at) {
    const CsvFields row = fields_of(last_[at]);
    if (row.empty()) continue;
    ++inside;
    if (row.size() == head_.size() && is_row(row, 0, before) && (spaced_ || !has_blanks(row))) ++rows;
  }
  return 2 * rows >= inside;
}

// `skipped`: how many fields the commas inside of the open quote add behind place `before`.
bool CsvTable::is_row(const CsvFields& row, size_t skipped, size_t before) const {
  for (size_t at = 0; at < columns_.size(); ++at) {
    const size_t place = places_[at] + (places_[at] > before ? skipped : 0);
    if (!columns_[at].check(text_value(trimmed(row[place])))) return false;
  }
  return true;
}

DataError CsvTable::open_quote(int64_t line, const std::string& wrong) const {
  std::string what = wrong;
  if (wrong == kUnclosed) {
    what = "a quotation mark is opened here and never closed";
  } else if (wrong.empty()) {
    what = "a quotation mark is opened here and closed in line " + std::to_string(number_) + ", and what is in between are rows";
  }
  return DataError(path_ + ", line " + std::to_string(line) + ": " + what + "; close it, or double it inside of a field");
}

}  // namespace edgefl
