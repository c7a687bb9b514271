// Files at a path that become samples: one file of records, or a folder with files or a sub-folder for each class.
#pragma once

#include <cstdint>
#include <filesystem>
#include <set>
#include <string>
#include <vector>

namespace edgefl {

using Endings = std::set<std::string>;
inline const Endings kArrays = {".npy"}, kSounds = {".wav"}, kRecords = {".csv", ".jsonl"};
inline const Endings kImages = {".png", ".jpg", ".jpeg"};
// Images that are refused, so that none is left out silently.
inline const Endings kOtherImages = {".gif", ".webp", ".bmp", ".tif", ".tiff", ".heic", ".heif", ".avif", ".jfif", ".ppm", ".svg"};

struct FoundFile {
  std::filesystem::path path;
  std::string folder;  // the class folder that it is in, "" outside of one
};

struct FoundFiles {
  std::vector<FoundFile> files;
  std::vector<std::filesystem::path> nested;  // folders with data inside of those of classes
};

std::string ending(const std::filesystem::path& path);  // ".csv", in small letters
// DataError if there is no file that any agent reads.
FoundFiles find_files(const std::filesystem::path& path);
int64_t data_files_in(const std::filesystem::path& folder);
// Samples as far as one can tell without a bundle: lines of records, one in other files.
int64_t rows_of(const FoundFile& file);

}  // namespace edgefl
