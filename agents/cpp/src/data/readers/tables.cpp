#include "data/readers/tables.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <list>
#include <utility>

#include "data/files/spool.h"
#include "data/records/records.h"
#include "data/records/unicode.h"

namespace edgefl {
namespace {

constexpr size_t kTogether = 4096;  // rows that are kept as doubles until they get their type

// One array of the samples: the columns that it is read from.
struct Part {
  std::vector<size_t> places;  // in a record
  DType dtype;
  int64_t below;
  Spool spool;

  Part(std::vector<size_t> columns, DType type, const Shape& shape, int64_t tokens)
      : places(std::move(columns)), dtype(type), below(tokens), spool(type, shape) {}
};

class Tables {
 public:
  Tables(const Reading& reading, const TableSpec& reader) : reading_(reading), reader_(reader) {
    reading.check_shape({{static_cast<int64_t>(reader.columns.size())}});
    const auto numeric = [](const Value& value) { return is_number(value); };
    parts_.emplace_back(places_of(reader.columns, numeric), reading.spec.dtype, reading.spec.shape, reading.spec.below);
    for (const Input& each : reading.spec.others) {
      parts_.emplace_back(places_of(columns_of(each), numeric), each.dtype, each.shape, each.below);
    }
    label_ = places_of({reader.label}, [this](const Value& value) { return reading_.is_label(value); }).front();
    columns_[label_].check = [this](const Value& value) { return reading_.is_label(value); };
  }

  void read(const std::string& path) {
    each_record(path, columns_, [&](const TableRecord& record) {
      try {
        add(record);
      } catch (const BadRow& bad) {
        reading_.problems.add(path + ", line " + std::to_string(record.line), bad.what());
      }
    });
  }

  Samples samples() {
    Samples found{parts_.front().spool.rows(), labels_.rows(), {}};
    auto part = parts_.begin();
    for (const Input& each : reading_.spec.others) found.others[each.name] = (++part)->spool.rows();
    return found;
  }

 private:
  std::vector<size_t> places_of(const std::vector<std::string>& names, const std::function<bool(const Value&)>& check) {
    std::vector<size_t> places;
    for (const std::string& name : names) {
      const auto found = std::find_if(columns_.begin(), columns_.end(), [&](const Column& each) { return each.name == name; });
      places.push_back(static_cast<size_t>(found - columns_.begin()));
      if (found == columns_.end()) columns_.push_back({name, check});
    }
    return places;
  }

  std::vector<std::string> columns_of(const Input& wanted) const {
    const auto named = reader_.others.find(wanted.name);
    const std::vector<std::string> columns = named == reader_.others.end() ? std::vector<std::string>{wanted.name} : named->second;
    if (static_cast<int64_t>(columns.size()) != elements(wanted.shape)) {
      throw DataError("input " + repr_of_text(wanted.name) + " has shape " + shown(wanted.shape) + ", and the federation reads it of " +
                      std::to_string(columns.size()) + " columns: name as many in `others` of its reader");
    }
    return columns;
  }

  void add(const TableRecord& record) {
    if (!record.wrong.empty()) throw BadRow(record.wrong);
    row_.clear();
    for (const Part& part : parts_) add_numbers(record, part);
    const double label = reading_.number(record.values[label_]);
    const double* from = row_.data();
    for (Part& part : parts_) {
      for (size_t at = 0; at < part.places.size(); ++at) part.spool.add(&part == &parts_.front() ? scaled(*from++, at) : *from++);
    }
    labels_.add(label);
    if (++count_ % kTogether != 0) return;
    for (Part& part : parts_) part.spool.flush();
    labels_.flush();
    if (reading_.parts.between) reading_.parts.between();
  }

  // BadRow for a column that is missing, no number, or no whole number that the model takes.
  void add_numbers(const TableRecord& record, const Part& part) {
    const auto column = [&](size_t place) { return "column " + repr_of_text(columns_[place].name); };
    const size_t begin = row_.size();
    for (const size_t place : part.places) row_.push_back(finite(record.values[place], column(place), part.dtype));
    if (dtype_floats(part.dtype)) return;
    for (size_t at = 0; at < part.places.size(); ++at) {
      const size_t place = part.places[at];
      const double value = row_[begin + at];
      if (value != std::trunc(value)) throw BadRow(column(place) + " is " + record.values[place].shown() + ", which is no whole number");
      if (part.below != 0 && (value < 0 || value >= static_cast<double>(part.below))) {
        char whole[400];
        std::snprintf(whole, sizeof whole, "%.0f", value);
        throw BadRow(column(place) + " is " + whole + ", the model takes whole numbers from 0 to " + std::to_string(part.below - 1));
      }
    }
  }

  // With the federation's mean and deviation taken out.
  double scaled(double value, size_t column) const {
    if (!reader_.mean.empty()) value -= reader_.mean[column];
    return reader_.deviation.empty() ? value : value / reader_.deviation[column];
  }

  const Reading& reading_;
  const TableSpec& reader_;
  std::vector<Column> columns_;
  std::list<Part> parts_;  // x, and each input beside it
  Spool labels_{reading_.label.floats() ? reading_.label.dtype : DType::i64, {}};
  size_t label_ = 0, count_ = 0;
  std::vector<double> row_;
};

}  // namespace

Samples read_tables(const Reading& reading, const TableSpec& reader, const std::vector<FoundFile>& files) {
  Tables tables(reading, reader);
  for (const FoundFile& file : files) tables.read(file.path.string());
  return tables.samples();
}

}  // namespace edgefl
