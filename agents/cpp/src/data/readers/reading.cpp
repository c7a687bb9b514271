#include "data/readers/reading.h"

#include <algorithm>
#include <optional>
#include <set>

#include "data/records/unicode.h"

namespace edgefl {
namespace {

constexpr size_t kNamed = 12;   // classes that a message lists
constexpr size_t kDigits = 12;  // no class has a longer number

// Without what programs for tables write behind a whole number: "1.0" is "1".
std::string_view whole(std::string_view text) {
  const size_t end = text.find_last_not_of('0');
  return end != std::string_view::npos && text[end] == '.' ? text.substr(0, end) : text;
}

std::optional<int64_t> number_in(std::string_view digits) {
  int64_t number = 0;
  size_t count = 0;
  for (size_t place = 0; place < digits.size(); ++count) {
    const auto [code, size] = code_point_at(digits, place);
    const int digit = decimal_digit(code);
    if (digit < 0 || count == kDigits) return std::nullopt;
    number = number * 10 + digit;
    place += size;
  }
  if (count == 0) return std::nullopt;
  return number;
}

RowsPtr of_labels(const std::vector<int64_t>& labels) {
  Tensor values(DType::i64, {static_cast<int64_t>(labels.size())});
  std::copy(labels.begin(), labels.end(), values.as<int64_t>());
  return rows_of(std::move(values));
}

}  // namespace

std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (size_t at = 0; at < std::min(names.size(), kNamed); ++at) text += (at == 0 ? "" : ", ") + names[at];
  return names.size() > kNamed ? text + ", ... (" + std::to_string(names.size()) + " in all)" : text;
}

Reading::Reading(std::string source, const DataSpec& spec, const LabelSpec& label, const DataParts& parts, Problems& problems)
    : source(std::move(source)), spec(spec), label(label), parts(parts), problems(problems) {
  for (size_t at = 0; at < spec.names.size(); ++at) numbers_.emplace(decomposed(spec.names[at]), static_cast<int64_t>(at));
}

void Reading::check_shape(const std::vector<Shape>& shapes) const {
  std::string made;
  for (const Shape& shape : shapes) {
    if (shape == spec.shape) return;
    made += (made.empty() ? "" : " or ") + shown(shape);
  }
  throw DataError("the bundle's model takes samples of shape " + shown(spec.shape) + ", and its reader makes " + made +
                  ": the federation's `reader` does not go with its data");
}

double Reading::number(const Value& value) const {
  if (value.empty()) throw BadRow("the label is empty");
  return label.floats() ? finite(value, "the label", label.dtype) : static_cast<double>(class_number(value.text));
}

bool Reading::is_label(const Value& value) const {
  try {
    (void)number(value);
    return true;
  } catch (const BadRow&) {
    return false;
  }
}

int64_t Reading::class_number(std::string_view text) const {
  text = stripped(text);
  if (!spec.names.empty()) {
    const std::string written = decomposed(text);
    for (const std::string_view each : {std::string_view(written), whole(written)}) {
      const auto found = numbers_.find(std::string(each));
      if (found != numbers_.end()) return found->second;
    }
    throw BadRow("no class is called " + shortened(repr_of_text(text)) + "; the federation's are " + listed(spec.names));
  }
  const std::optional<int64_t> found = number_in(whole(text));
  if (found && *found < spec.classes) return *found;
  throw BadRow("class " + shortened(repr_of_text(text)) + " is no number from 0 to " + std::to_string(spec.classes - 1) +
               ", which is what the federation's classes are called by");
}

Reading::Numbered Reading::by_folder(const std::vector<FoundFile>& files) const {
  if (!label.shape.empty() || label.floats()) {
    throw DataError(source + ": a folder gives its files one class, the model takes labels " + std::string(dtype_name(label.dtype)) +
                    " " + shown(label.shape) + " of each sample: give arrays (.npz)");
  }
  const auto is_outside = [](const FoundFile& each) { return each.folder.empty(); };
  if (const auto outside = std::find_if(files.begin(), files.end(), is_outside); outside != files.end()) {
    throw DataError(source + " has " + std::to_string(std::count_if(files.begin(), files.end(), is_outside)) +
                    " files that are in no folder, such as " + outside->path.filename().string() +
                    ": put the files of each class in a folder that is called as the class is (" +
                    (spec.names.empty() ? "its number" : listed(spec.names)) + ")");
  }
  std::map<std::string, std::optional<int64_t>> numbers;
  for (const FoundFile& file : files) {
    if (numbers.count(file.folder) != 0) continue;
    std::optional<int64_t>& number = numbers[file.folder];
    try {
      number = class_number(file.folder);
    } catch (const BadRow& bad) {
      const auto count = std::count_if(files.begin(), files.end(), [&](const FoundFile& each) { return each.folder == file.folder; });
      problems.add(source + "/" + file.folder, bad.what(), count);
    }
  }
  Numbered found;
  for (const FoundFile& file : files) {
    if (const auto number = numbers.at(file.folder)) found.emplace_back(file.path, *number);
  }
  return found;
}

Samples Reading::decoded(const Numbered& files, DType dtype, const Decode& decode, const std::function<Tensor(Tensor)>& then) const {
  std::vector<std::filesystem::path> paths;
  std::vector<int64_t> labels;
  for (const auto& [path, number] : files) {
    if (parts.between) parts.between();
    try {
      (void)decode(path);
      paths.push_back(path);
      labels.push_back(number);
    } catch (const BadRow& bad) {
      problems.add(path.string(), bad.what());
    }
  }
  const auto count = static_cast<int64_t>(paths.size());
  const auto again = [paths = std::move(paths), decode, then](int64_t row, std::byte* into) {
    const std::filesystem::path& path = paths[static_cast<size_t>(row)];
    try {
      Tensor found = decode(path);
      if (then) found = then(std::move(found));
      std::copy(found.data.begin(), found.data.end(), into);
    } catch (const BadRow& bad) {
      throw DataError(path.string() + " " + bad.what() + "; it could be read before: start the device again, which then reads its files anew");
    }
  };
  return {made_rows(dtype, spec.shape, count, again), of_labels(labels), {}};
}

}  // namespace edgefl
