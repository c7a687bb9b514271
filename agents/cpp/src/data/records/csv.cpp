#include "data/records/csv.h"

#include <utility>

namespace edgefl {
namespace {

constexpr size_t kLongestField = size_t{1} << 26;  // letters

}  // namespace

std::string_view first_line(std::string_view text) {
  const size_t end = text.find_first_of("\r\n");
  if (end == std::string_view::npos) return text;
  return text.substr(0, end + (text.substr(end, 2) == "\r\n" ? 2 : 1));
}

void CsvReader::add(char letter) {
  if ((static_cast<unsigned char>(letter) & 0xC0) != 0x80 && ++letters_ > kLongestField) {
    throw CsvError("field larger than field limit (" + std::to_string(kLongestField) + ")");
  }
  field_ += letter;
}

void CsvReader::save(CsvFields& fields) {
  fields.push_back(std::move(field_));
  field_.clear();
  letters_ = 0;
}

void CsvReader::take(char letter, CsvFields& fields) {
  const bool line_end = letter == '\n' || letter == '\r', mark = letter == '"' && quotes_ != Quotes::none;
  switch (state_) {
    case State::record:
      if (line_end) {
        state_ = State::end;
        return;
      }
      state_ = State::field;
      [[fallthrough]];
    case State::field:
      if (mark) {
        state_ = State::quoted;
        return;
      }
      if (letter == ' ' && skip_blanks_) return;
      [[fallthrough]];
    case State::plain:
      if (line_end) {
        save(fields);
        state_ = State::end;
      } else if (letter == ',') {
        save(fields);
        state_ = State::field;
      } else {
        add(letter);
        state_ = State::plain;
      }
      return;
    case State::quoted:
      if (mark) {
        state_ = State::quote;
      } else {
        add(letter);
      }
      return;
    case State::quote:
      if (mark) {
        add(letter);
        state_ = State::quoted;
      } else if (letter == ',' || line_end) {
        save(fields);
        state_ = line_end ? State::end : State::field;
      } else if (quotes_ == Quotes::strict) {
        throw CsvError("',' expected after '\"'");
      } else {
        add(letter);
        state_ = State::plain;
      }
      return;
    case State::end:
      return;  // the \n of \r\n
  }
}

void CsvReader::end_of_line(CsvFields& fields) {
  if (state_ == State::quoted) return;
  if (state_ == State::field || state_ == State::plain || state_ == State::quote) save(fields);
  state_ = State::record;
}

bool CsvReader::read(CsvFields& fields) {
  fields.clear();
  field_.clear();
  letters_ = 0;
  state_ = State::record;
  do {
    const std::optional<std::string_view> line = next_();
    if (!line) {
      if (state_ != State::quoted) return false;
      if (quotes_ == Quotes::strict) throw CsvError("unexpected end of data");
      save(fields);
      return true;
    }
    for (const char letter : *line) take(letter, fields);
    end_of_line(fields);
  } while (state_ != State::record);
  return true;
}

CsvFields fields_of(std::string_view line, Quotes quotes) {
  std::optional<std::string_view> rest = line;
  CsvReader reader([&] { return std::exchange(rest, std::nullopt); }, quotes);
  CsvFields fields;
  reader.read(fields);
  return fields;
}

}  // namespace edgefl
