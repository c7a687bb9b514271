#include "data/readers/find_files.h"

#include <algorithm>
#include <cctype>
#include <fstream>
#include <system_error>
#include <utility>

#include "wire/errors.h"

namespace edgefl {
namespace {

namespace fs = std::filesystem;

const Endings kLines = {".csv", ".jsonl", ".tsv", ".txt"};

// What to do with files of kinds that are not read, by their endings.
const std::vector<std::pair<Endings, std::string>> kConversions = {
    {{".gz", ".bz2", ".xz", ".zst", ".zip", ".7z", ".tar", ".tgz"}, "unpack it"},
    {{".json", ".ndjson"}, "write one object a line, as .jsonl"},
    {{".parquet", ".feather", ".arrow", ".orc", ".xlsx", ".xls", ".ods", ".db", ".sqlite"}, "write it as .csv"},
    {{".npy", ".pkl", ".pt", ".pth", ".h5", ".hdf5", ".mat", ".safetensors", ".tfrecord"},
     "write its arrays by numpy.savez(file, x=samples, y=labels)"},
    {{".mp3", ".flac", ".ogg", ".opus", ".m4a", ".aac", ".aif", ".aiff", ".wma"}, "write it as .wav"},
};

// A file of a kind that some agent reads, or a link to one that is gone.
bool is_data(const fs::path& path) {
  const std::string kind = ending(path);
  const bool known = kArrays.count(kind) + kSounds.count(kind) + kLines.count(kind) + kImages.count(kind) + kOtherImages.count(kind) != 0;
  std::error_code failed;
  return known && (fs::is_regular_file(path, failed) || fs::is_symlink(path, failed));
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

// The first of `paths` that holds no data, and what to do with it; "" if no kind is known.
std::string advice(const std::vector<fs::path>& paths) {
  for (const fs::path& path : paths) {
    for (const auto& [endings, text] : kConversions) {
      if (endings.count(ending(path)) != 0 && fs::is_regular_file(path)) return "; found " + path.filename().string() + ": " + text;
    }
    if (fs::is_directory(path)) {
      return "; found the folder " + path.filename().string() + " inside of " + path.parent_path().filename().string() +
             ": name the folder above those of the classes";
    }
  }
  return "";
}

void find_in_folder(const fs::path& root, FoundFiles& found, std::vector<fs::path>& others) {
  std::vector<fs::path> folders;
  for (const fs::path& child : visible(root)) {
    (fs::is_directory(child) ? folders : others).push_back(child);
    if (is_data(child)) found.files.push_back({child, ""});
  }
  for (const fs::path& folder : folders) {
    for (const fs::path& file : visible(folder)) {
      others.push_back(file);
      if (is_data(file)) found.files.push_back({file, folder.filename().string()});
      if (fs::is_directory(file) && data_files_in(file) > 0) found.nested.push_back(file);
    }
  }
}

}  // namespace

std::string ending(const fs::path& path) {
  std::string text = path.extension().string();
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char each) { return std::tolower(each); });
  return text;
}

int64_t data_files_in(const fs::path& folder) {
  std::error_code failed;
  int64_t count = 0;
  for (fs::directory_iterator at(folder, failed), end; !failed && at != end; at.increment(failed)) count += is_data(at->path()) ? 1 : 0;
  if (failed) throw DataError(folder.string() + " cannot be read: " + failed.message());
  return count;
}

FoundFiles find_files(const fs::path& path) {
  FoundFiles found;
  std::vector<fs::path> others{path};
  if (fs::is_regular_file(path) && kLines.count(ending(path)) != 0) {
    found.files = {{path, ""}};
  } else if (fs::is_directory(path)) {
    others.clear();
    find_in_folder(path, found, others);
  }
  if (found.files.empty()) {
    throw DataError((fs::exists(path) ? path.string() + " is no training data" : "there is no file or folder " + path.string()) +
                    ": give an .npz with arrays x and y, a folder with x.npy and y.npy, a folder with idx files, a folder with one "
                    "sub-folder of files per class (.npy, .png, .jpg, .wav), or .csv or .jsonl" + advice(others));
  }
  return found;
}

int64_t rows_of(const FoundFile& file) {
  const std::string kind = ending(file.path);
  if (kLines.count(kind) == 0 || (!file.folder.empty() && kRecords.count(kind) == 0)) return 1;
  std::ifstream text(file.path, std::ios::binary);
  constexpr std::string_view kBlanks = " \t\n\r\v\f";
  int64_t count = 0;
  bool blank = true;
  char piece[1 << 16];
  while (text) {
    text.read(piece, sizeof piece);
    for (const char letter : std::string_view(piece, static_cast<size_t>(text.gcount()))) {
      if (letter == '\n') {
        count += blank ? 0 : 1;
        blank = true;
      } else {
        blank = blank && kBlanks.find(letter) != std::string_view::npos;
      }
    }
  }
  count += blank ? 0 : 1;
  return std::max<int64_t>(0, count - (kind == ".csv" ? 1 : 0));
}

}  // namespace edgefl
