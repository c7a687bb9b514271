#include "data/files/class_folders.h"

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include "data/convert.h"
#include "data/fitted.h"
#include "data/files/images.h"
#include "data/files/npy.h"

namespace edgefl {
namespace {

namespace fs = std::filesystem;

const std::set<std::string> kKnown = {".npy", ".wav", ".png", ".jpg", ".jpeg", ".csv", ".jsonl", ".tsv", ".txt"};
constexpr size_t kNamed = 12, kDigits = 12, kShown = 60;
constexpr int64_t kMostBytes = int64_t{1} << 28;  // of one image as a sample: a manifest may say anything

const std::set<std::string> kImages = {".png", ".jpg", ".jpeg"};

struct File {
  fs::path path;
  std::string folder;  // the class that it is in, "" outside of one
};

std::string ending(const fs::path& path) {
  std::string text = path.extension().string();
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char each) { return std::tolower(each); });
  return text;
}

std::vector<fs::path> visible(const fs::path& folder) {
  std::error_code failed;
  std::vector<fs::path> found;
  for (fs::directory_iterator at(folder, failed), end; !failed && at != end; at.increment(failed)) {
    if (at->path().filename().string().front() != '.') found.push_back(at->path());
  }
  if (failed) throw DataError(folder.string() + " cannot be read: " + failed.message());
  std::sort(found.begin(), found.end());
  return found;
}

std::vector<File> files_in(const fs::path& root) {
  std::vector<File> found;
  std::vector<fs::path> folders;
  for (const fs::path& child : visible(root)) {
    if (fs::is_directory(child)) {
      folders.push_back(child);
    } else if (kKnown.count(ending(child)) != 0) {
      found.push_back({child, ""});
    }
  }
  for (const fs::path& folder : folders) {
    for (const fs::path& file : visible(folder)) {
      if (fs::is_regular_file(file) && kKnown.count(ending(file)) != 0) found.push_back({file, folder.filename().string()});
    }
  }
  return found;
}

std::string listed(const std::vector<std::string>& names) {
  std::string text;
  for (size_t at = 0; at < std::min(names.size(), kNamed); ++at) text += (at == 0 ? "" : ", ") + names[at];
  return names.size() > kNamed ? text + ", ... (" + std::to_string(names.size()) + " in all)" : text;
}

// The number of a class by its name, or where the federation's classes have none, by its number in writing.
int64_t class_number(const DataSpec& spec, const std::string& folder) {
  const std::string text = "'" + (folder.size() > kShown ? folder.substr(0, kShown) + "..." : folder) + "'";
  if (!spec.names.empty()) {
    const auto found = std::find(spec.names.begin(), spec.names.end(), folder);
    if (found != spec.names.end()) return found - spec.names.begin();
    throw BadRow("no class is called " + text + "; the federation's are " + listed(spec.names));
  }
  const bool digits = !folder.empty() && folder.size() <= kDigits && std::all_of(folder.begin(), folder.end(), [](char each) {
    return each >= '0' && each <= '9';
  });
  if (digits && std::stoll(folder) < spec.classes) return std::stoll(folder);
  throw BadRow("class " + text + " is no number from 0 to " + std::to_string(spec.classes - 1) +
               ", which is what the federation's classes are called by");
}

// A sample as the model reads it: files may hold integers and floats, and only integers are scaled.
Tensor sample(const fs::path& path, const DataSpec& spec) {
  Tensor found;
  try {
    auto file = std::make_shared<MappedFile>(path.string());
    found = npy_tensor(file->text(), path.string());
  } catch (const DataError& error) {
    throw BadRow(std::string("cannot be read: ") + error.what());
  }
  Shape grey{1};
  grey.insert(grey.end(), found.shape.begin(), found.shape.end());
  if (found.shape != spec.shape && grey != spec.shape) {
    throw BadRow("the sample has shape " + shown(found.shape) + ", the model takes " + shown(spec.shape));
  }
  if (!dtype_integers(found.dtype) && found.dtype != spec.dtype) {
    throw BadRow("the sample is " + std::string(dtype_name(found.dtype)) + ", the model takes " +
                 std::string(dtype_name(spec.dtype)) + " or integers to be scaled");
  }
  found.shape = spec.shape;
  Tensor one = found;
  one.shape.insert(one.shape.begin(), 1);
  const RowsPtr row = rows_of(std::move(one));
  if (dtype_floats(found.dtype) && !all_finite(*row, found.dtype)) {
    throw BadRow("the sample has a value that is NaN or infinite");
  }
  if (dtype_integers(spec.dtype)) {
    const std::string wrong = bad_value("the sample", *row, 0, spec.below);
    if (!wrong.empty()) throw BadRow(wrong);
    if (spec.below == 0 && !holds(spec.dtype, range_of(*row))) {
      throw BadRow("the sample has values beyond what " + std::string(dtype_name(spec.dtype)) + " holds");
    }
  }
  return as_read(std::move(found), spec);
}

Tensor image(const fs::path& path, const DataSpec& spec) {
  const auto* reader = std::get_if<ImageReader>(&spec.reader);
  try {
    return image_sample(MappedFile(path.string()).text(), spec.shape, reader == nullptr ? 255 : reader->white);
  } catch (const DataError& error) {
    throw BadRow(std::string("cannot be read: ") + error.what());
  }
}

using Sample = Tensor (*)(const fs::path& path, const DataSpec& spec);

// What decides how files become samples, as a key.
std::string text_of(const DataSpec& spec, const LabelSpec& label) {
  const auto* reader = std::get_if<ImageReader>(&spec.reader);
  std::string text = shown(spec.shape) + std::string(dtype_name(spec.dtype));
  text += shown(label.shape) + std::string(dtype_name(label.dtype));
  char bits[64];
  std::snprintf(bits, sizeof bits, " %a %a", spec.scale, spec.shift);
  text += bits;
  for (const int64_t each : {spec.classes, spec.below, reader == nullptr ? 0 : reader->white, label.ignored.value_or(-1)}) {
    text += " " + std::to_string(each);
  }
  for (const std::string& name : spec.names) text += "\n" + name;
  return text;
}

class ClassFolders : public DataSource {
 public:
  ClassFolders(std::string path, BadRows bad) : path_(std::move(path)), bad_(bad), files_(files_in(path_)) {}

  std::string name() const override { return path_; }
  int64_t size() const override { return static_cast<int64_t>(files_.size()); }

  std::shared_ptr<FittedData> fitted(const Manifest& manifest, const DataParts& parts) const override {
    const LabelSpec label = LabelSpec::of(manifest);
    const std::string key = text_of(manifest.data, label);
    if (!last_ || key != last_key_) {  // what was read stays until another bundle asks
      last_ = read(manifest.data, label, parts);
      last_key_ = key;
    }
    return last_;
  }

 private:
  std::shared_ptr<FittedData> read(const DataSpec& spec, const LabelSpec& label, const DataParts& parts) const {
    const bool arrays = of_arrays(spec);
    const std::vector<File> files = those_of(arrays, spec);
    const Sample sample_of = arrays ? sample : image;
    if (!label.shape.empty() || label.floats()) {
      throw DataError(path_ + ": a folder gives its files one class, the model takes labels " +
                      std::string(dtype_name(label.dtype)) + " " + shown(label.shape) + " of each sample: give arrays (.npz)");
    }
    Problems problems(bad_);
    const std::map<std::string, std::optional<int64_t>> classes = numbered(files, spec, problems);
    std::vector<fs::path> paths;
    std::vector<int64_t> labels;
    for (const File& file : files) {
      const std::optional<int64_t> number = classes.at(file.folder);
      if (!number) continue;
      if (parts.between) parts.between();
      try {
        (void)sample_of(file.path, spec);  // once now, so that a broken one is known before a round begins
        paths.push_back(file.path);
        labels.push_back(*number);
      } catch (const BadRow& bad) {
        problems.add(file.path.string(), bad.what());
      }
    }
    problems.check_some(static_cast<int64_t>(paths.size()), path_);
    const DType dtype = arrays ? spec.dtype : DType::u8;
    return fitted_data({of_files(std::move(paths), spec, dtype, sample_of), of_labels(labels), {}, spec, label, problems.shown()});
  }

  // Whether the files are arrays, and not images; DataError for others, which the bundle may say how to read.
  bool of_arrays(const DataSpec& spec) const {
    std::map<std::string, int64_t> endings;
    for (const File& file : files_) ++endings[ending(file.path)];
    const bool images = std::any_of(kImages.begin(), kImages.end(), [&](const auto& each) { return endings.count(each) != 0; });
    const bool no_reader = std::holds_alternative<std::monostate>(spec.reader);
    const bool reads = std::holds_alternative<ImageReader>(spec.reader) || (no_reader && spec.shape.size() == 3);
    if (endings.count(".npy") != 0 && (no_reader || !images)) return true;
    if (images && reads && reads_images()) return false;
    std::string found;
    for (const auto& [each, count] : endings) found += (found.empty() ? "" : ", ") + std::to_string(count) + " " + each;
    throw DataError(path_ + " has " + found + ", and this agent reads .npy" + (reads_images() ? ", .png and .jpg" : "") +
                    " files: convert them, give arrays (.npz), or use the Python agent, which reads sounds, texts and tables");
  }

  std::vector<File> those_of(bool arrays, const DataSpec& spec) const {
    const bool colours = spec.shape.size() == 3 && (spec.shape.front() == 1 || spec.shape.front() == 3);
    if (!arrays && (!colours || spec.shape[1] < 1 || spec.shape[2] < 1 || elements(spec.shape) > kMostBytes)) {
      throw DataError(path_ + ": images become samples of shape (1, H, W) or (3, H, W), the model takes " + shown(spec.shape) +
                      ": give arrays (.npz)");
    }
    std::vector<File> found, outside;
    for (const File& file : files_) {
      if (arrays ? ending(file.path) == ".npy" : kImages.count(ending(file.path)) != 0) found.push_back(file);
    }
    for (const File& file : found) {
      if (file.folder.empty()) outside.push_back(file);
    }
    if (!outside.empty()) {
      throw DataError(path_ + " has " + std::to_string(outside.size()) + " files that are in no folder, such as " +
                      outside.front().path.filename().string() + ": put the files of each class in a folder that is called " +
                      "as the class is (" + (spec.names.empty() ? "its number" : listed(spec.names)) + ")");
    }
    return found;
  }

  std::map<std::string, std::optional<int64_t>> numbered(const std::vector<File>& files, const DataSpec& spec,
                                                         Problems& problems) const {
    std::map<std::string, std::optional<int64_t>> numbers;
    for (const File& file : files) {
      if (numbers.count(file.folder) != 0) continue;
      try {
        numbers[file.folder] = class_number(spec, file.folder);
      } catch (const BadRow& bad) {
        numbers[file.folder] = std::nullopt;
        problems.add(path_ + "/" + file.folder, bad.what(), std::count_if(files.begin(), files.end(), [&](const File& each) {
                       return each.folder == file.folder;
                     }));
      }
    }
    return numbers;
  }

  static RowsPtr of_files(std::vector<fs::path> paths, const DataSpec& spec, DType dtype, Sample sample_of) {
    const auto count = static_cast<int64_t>(paths.size());
    return made_rows(dtype, spec.shape, count, [paths = std::move(paths), spec, sample_of](int64_t row, std::byte* into) {
      const fs::path& path = paths[static_cast<size_t>(row)];
      try {
        const Tensor found = sample_of(path, spec);
        std::copy(found.data.begin(), found.data.end(), into);
      } catch (const BadRow& bad) {
        throw DataError(path.string() + " " + bad.what() + "; it could be read before: start the device again, which then reads its files anew");
      }
    });
  }

  static RowsPtr of_labels(const std::vector<int64_t>& labels) {
    Tensor values(DType::i64, {static_cast<int64_t>(labels.size())});
    std::copy(labels.begin(), labels.end(), values.as<int64_t>());
    return rows_of(std::move(values));
  }

  std::string path_;
  BadRows bad_;
  std::vector<File> files_;
  mutable std::shared_ptr<FittedData> last_;
  mutable std::string last_key_;
};

}  // namespace

std::shared_ptr<DataSource> class_folders(const std::string& path, BadRows bad) {
  auto made = std::make_shared<ClassFolders>(path, bad);
  if (made->size() == 0) {
    throw DataError(path + " is no training data: give an .npz with arrays x and y, a folder with x.npy and y.npy, a folder "
                    "with idx files, or a folder with one sub-folder of files (.npy, .png, .jpg) per class");
  }
  return made;
}

}  // namespace edgefl
