#include "data/records/records.h"

#include <algorithm>
#include <cctype>
#include <map>

#include "data/files/mapped_file.h"
#include "data/records/csv_table.h"
#include "data/records/json.h"
#include "data/records/unicode.h"
#include "wire/printable.h"

namespace edgefl {
namespace {

constexpr int64_t kReleaseEvery = 4096;  // records
constexpr std::string_view kMark = "\xEF\xBB\xBF";

// What a file begins with says that it is UTF-8, and is no part of the text.
std::string_view without_mark(std::string_view text) {
  if (text.size() < kMark.size() && kMark.substr(0, text.size()) == text) return {};
  if (text.substr(0, kMark.size()) == kMark) text.remove_prefix(kMark.size());
  return text;
}

class JsonLines {
 public:
  JsonLines(std::string_view text, const std::vector<Column>& columns) : rest_(text), columns_(columns) {}

  bool next(TableRecord& record) {
    while (!rest_.empty()) {
      const std::string_view line = first_line(rest_);
      rest_.remove_prefix(line.size());
      ++record.line;
      if (stripped(line).empty()) continue;
      fill(record, line);
      return true;
    }
    return false;
  }

 private:
  void fill(TableRecord& record, std::string_view line) const {
    record.values.assign(columns_.size(), Value());
    record.wrong = is_utf8(line) ? "" : kNoText;
    if (!record.wrong.empty()) return;
    try {
      const std::map<std::string, Value> found = json_object(line);
      for (size_t at = 0; at < columns_.size(); ++at) {
        const auto value = found.find(columns_[at].name);
        if (value != found.end()) record.values[at] = value->second;
      }
    } catch (const BadRow& bad) {
      record.wrong = bad.what();
    }
  }

  std::string_view rest_;
  const std::vector<Column>& columns_;
};

template <typename Source>
void read_all(Source& source, const MappedFile& file, const std::function<void(const TableRecord&)>& use) {
  TableRecord record;
  for (int64_t count = 1; source.next(record); ++count) {
    use(record);
    if (count % kReleaseEvery == 0) file.released();
  }
}

bool is_json(std::string path) {
  std::transform(path.begin(), path.end(), path.begin(), [](unsigned char each) { return std::tolower(each); });
  return path.size() > 6 && path.compare(path.size() - 6, 6, ".jsonl") == 0;
}

}  // namespace

void each_record(const std::string& path, const std::vector<Column>& columns, const std::function<void(const TableRecord&)>& use) {
  const MappedFile file(path);
  const std::string_view text = without_mark(file.text());
  if (is_json(path)) {
    JsonLines lines(text, columns);
    read_all(lines, file, use);
  } else {
    CsvTable table(path, text, columns);
    read_all(table, file, use);
  }
}

}  // namespace edgefl
