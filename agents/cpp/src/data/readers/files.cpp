#include "data/readers/files.h"

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <sys/stat.h>
#include <system_error>
#include <utility>

#include "data/fitted.h"
#include "data/readers/class_files.h"
#include "data/readers/find_files.h"
#include "data/readers/sounds.h"
#include "data/readers/tables.h"
#include "wire/digest.h"

namespace edgefl {
namespace {

namespace fs = std::filesystem;

std::string text_of(const std::vector<double>& numbers) {
  std::string text;
  char bits[40];
  for (const double each : numbers) {
    std::snprintf(bits, sizeof bits, " %a", each);
    text += bits;
  }
  return text + "\n";
}

std::string text_of(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += std::to_string(name.size()) + " " + name;
  return text + "\n";
}

std::string text_of(const Reader& reader) {
  std::string text = std::to_string(reader.index()) + " ";
  if (const auto* image = std::get_if<ImageSpec>(&reader)) text += std::to_string(image->white);
  if (const auto* table = std::get_if<TableSpec>(&reader)) {
    text += text_of(table->columns) + text_of(std::vector{table->label}) + text_of(table->mean) + text_of(table->deviation);
    for (const auto& [name, columns] : table->others) text += text_of(std::vector{name}) + text_of(columns);
  }
  if (const auto* sound = std::get_if<SoundSpec>(&reader)) text += std::to_string(sound->rate) + " " + std::to_string(sound->length);
  return text;
}

Endings all_images() {
  Endings all = kImages;
  all.insert(kOtherImages.begin(), kOtherImages.end());
  return all;
}

// The endings of files that a reader reads; none for those that this agent has not.
Endings endings_of(const Reader& reader) {
  if (std::holds_alternative<ImageSpec>(reader)) return all_images();
  if (std::holds_alternative<TableSpec>(reader)) return kRecords;
  if (std::holds_alternative<SoundSpec>(reader)) return kSounds;
  return std::holds_alternative<std::monostate>(reader) ? kArrays : Endings{};
}

class Files : public DataSource {
 public:
  Files(std::string path, BadRows bad) : path_(std::move(path)), bad_(bad), found_(find_files(path_)) {
    for (const FoundFile& file : found_.files) rows_ += rows_of(file);
  }

  std::string name() const override { return path_; }
  int64_t size() const override { return rows_; }
  std::string state() const override {
    Sha256 hash;
    for (const FoundFile& file : found_.files) {
      struct stat facts {};
      std::error_code missing;
      if (stat(file.path.c_str(), &facts) != 0) facts = {};
      const auto changed = fs::last_write_time(file.path, missing).time_since_epoch().count();
      hash.add(std::to_string(facts.st_ino) + " " + std::to_string(facts.st_size) + " " + std::to_string(changed) + "\n");
    }
    return hash.done();
  }

  std::shared_ptr<FittedData> fitted(const Manifest& manifest, const DataParts& parts) const override {
    const LabelSpec label = LabelSpec::of(manifest);
    const std::string key = key_of(manifest.data, label);
    if (last_ && key == last_key_) return last_;
    std::shared_ptr<FittedData> fitted = read(manifest, label, parts);
    const auto* sound = std::get_if<SoundSpec>(&manifest.data.reader);
    const bool graph = sound != nullptr && !sound->features.empty();  // its rows hold a graph of this round
    last_ = graph ? nullptr : fitted;  // what was read stays until another bundle asks
    last_key_ = key;
    return fitted;
  }

 private:
  std::shared_ptr<FittedData> read(const Manifest& manifest, const LabelSpec& label, const DataParts& parts) const {
    const DataSpec& spec = manifest.data;
    const Reader reader = reader_of(spec);
    const Endings endings = endings_of(reader);
    std::vector<FoundFile> files;
    std::copy_if(found_.files.begin(), found_.files.end(), std::back_inserter(files), [&](const FoundFile& each) { return endings.count(ending(each.path)) != 0; });
    if (files.empty()) {
      std::string read;
      for (const std::string& each : endings) read += (read.empty() ? "" : ", ") + each;
      throw DataError(path_ + " has " + counted() + ", and the federation's samples are read of " + read + ": convert the files, or give arrays");
    }
    Problems problems(bad_);
    for (const auto& folder : found_.nested) problems.add(folder.string(), "is a folder inside of a class's folder; move its files up", data_files_in(folder));
    const Reading reading(path_, spec, label, parts, problems);
    Samples samples = read(reading, reader, manifest, files);
    problems.check_some(samples.y->count, path_);
    const RowsPtr y = label.fitted(samples.y, spec.classes, path_);
    return fitted_data({samples.x, y, std::move(samples.others), spec, label, problems.shown()});
  }

  static Samples read(const Reading& reading, const Reader& reader, const Manifest& manifest, const std::vector<FoundFile>& files) {
    if (const auto* image = std::get_if<ImageSpec>(&reader)) return read_images(reading, *image, files);
    if (const auto* table = std::get_if<TableSpec>(&reader)) return read_tables(reading, *table, files);
    if (const auto* sound = std::get_if<SoundSpec>(&reader)) return read_sounds(reading, *sound, manifest, files);
    return read_arrays(reading, files);
  }

  // None for .npy files, whose samples are arrays already, if there is no file that the bundle's reader reads.
  Reader reader_of(const DataSpec& spec) const {
    const bool none = std::holds_alternative<std::monostate>(spec.reader);
    if (!none && endings_of(spec.reader).empty()) {
      throw DataError(path_ + ": the federation reads " + (std::holds_alternative<SeriesSpec>(spec.reader) ? "windows of sensor series" : "texts") +
                      ", which the C++ agent does not: give arrays (.npz), or use the Python agent (edgefl device)");
    }
    if (has(kArrays) && (none || !has(endings_of(spec.reader)))) return std::monostate();
    if (none && spec.shape.size() == 3 && has(all_images())) return ImageSpec{};
    if (none) {
      throw DataError(path_ + " has " + counted() + ", and the bundle does not say how they become samples of shape " + shown(spec.shape) +
                      ": give arrays (.npz), or have the federation say it (`reader` in its [data])");
    }
    return spec.reader;
  }

  bool has(const Endings& endings) const {
    return std::any_of(found_.files.begin(), found_.files.end(), [&](const FoundFile& each) { return endings.count(ending(each.path)) != 0; });
  }

  // How many files there are of each kind, in the order in which they were found.
  std::string counted() const {
    std::vector<std::pair<std::string, int64_t>> counts;
    for (const FoundFile& file : found_.files) {
      const std::string kind = ending(file.path);
      const auto known = std::find_if(counts.begin(), counts.end(), [&](const auto& each) { return each.first == kind; });
      if (known == counts.end()) {
        counts.emplace_back(kind, 1);
      } else {
        ++known->second;
      }
    }
    std::string text;
    for (const auto& [kind, count] : counts) text += (text.empty() ? "" : ", ") + std::to_string(count) + " " + kind;
    return text;
  }

  std::string path_;
  BadRows bad_;
  FoundFiles found_;
  int64_t rows_ = 0;
  mutable std::shared_ptr<FittedData> last_;
  mutable std::string last_key_;
};

}  // namespace

std::string key_of(const DataSpec& spec, const LabelSpec& label) {
  std::string text = shown(spec.shape) + std::string(dtype_name(spec.dtype)) + shown(label.shape) + std::string(dtype_name(label.dtype));
  text += text_of(std::vector{spec.scale, spec.shift});
  for (const int64_t each : {spec.classes, spec.below, label.ignored.value_or(-1)}) text += " " + std::to_string(each);
  for (const Input& each : spec.others) {
    text += text_of(std::vector{each.name, shown(each.shape), std::string(dtype_name(each.dtype)), std::to_string(each.below)});
  }
  return text + text_of(spec.names) + text_of(spec.reader);
}

std::shared_ptr<DataSource> file_source(const std::string& path, BadRows bad) { return std::make_shared<Files>(path, bad); }

}  // namespace edgefl
