#include "data/source.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "data/arrays.h"
#include "data/files/npy.h"
#include "data/files/zip.h"
#include "data/readers/files.h"
#include "data/readers/find_files.h"

namespace edgefl {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMostArray = uint64_t{1} << 34;
constexpr int64_t kMostRow = int64_t{1} << 40;

std::shared_ptr<DataSource> from_archive(const std::string& path, BadRows bad) {
  if (!fs::is_regular_file(path)) throw DataError("there is no file " + path + ": name the .npz with this device's samples");
  auto file = std::make_shared<MappedFile>(path);
  const Zip zip(file->text(), path);
  NamedRows arrays;
  for (const auto& [key, entry] : zip.entries()) {
    if (key.size() <= 4 || key.compare(key.size() - 4, 4, ".npy") != 0) continue;
    const std::string name = key.substr(0, key.size() - 4), about = path + ": " + name;
    arrays[name] = entry.method == 0 ? read_npy(zip.stored(entry), file, about) : read_npy(zip.read(entry, kMostArray), about);
  }
  return array_source(std::move(arrays), path, bad, true);
}

std::shared_ptr<DataSource> from_arrays(const fs::path& folder, BadRows bad) {
  if (!fs::is_regular_file(folder / "y.npy")) {
    throw DataError(folder.string() + " has x.npy and no y.npy: save the labels of the samples there");
  }
  NamedRows arrays;
  for (const auto& child : fs::directory_iterator(folder)) {
    if (child.path().extension() != ".npy" || !child.is_regular_file()) continue;
    auto file = std::make_shared<MappedFile>(child.path().string());
    arrays[child.path().stem().string()] = read_npy(file->text(), file, child.path().string());
  }
  return array_source(std::move(arrays), folder.string(), bad, true);
}

// The training file of that kind, else the first there is; "" for none.
std::string idx_file(const fs::path& folder, const std::string& ending) {
  std::vector<std::string> names;
  for (const auto& child : fs::directory_iterator(folder)) {
    const std::string name = child.path().filename().string();
    if (name.find(ending) != std::string::npos) names.push_back(name);
  }
  std::sort(names.begin(), names.end());
  const auto train = std::find_if(names.begin(), names.end(), [](const auto& name) { return name.rfind("train", 0) == 0; });
  if (names.empty()) return "";
  return (folder / (train == names.end() ? names.front() : *train)).string();
}

// Rows of somebody's callback; one `release` for all of them.
struct Caller {
  edgefl_data_source source;
  explicit Caller(const edgefl_data_source& given) : source(given) {}
  Caller(const Caller&) = delete;
  Caller& operator=(const Caller&) = delete;
  ~Caller() {
    if (source.release != nullptr) source.release(source.context);
  }
};

}  // namespace

std::shared_ptr<DataSource> open_source(const std::string& path, BadRows bad) {
  const fs::path place(path);
  try {
    if (ending(place) == ".npz") return from_archive(path, bad);
    if (fs::is_regular_file(place / "x.npy")) return from_arrays(place, bad);
    if (fs::is_directory(place)) {
      const std::string images = idx_file(place, "images-idx3-ubyte"), labels = idx_file(place, "labels-idx1-ubyte");
      if (!images.empty() && labels.empty()) throw DataError(path + " has " + images + " but no labels-idx1-ubyte file beside it");
      if (!images.empty()) return array_source({{"x", read_idx(images)}, {"y", read_idx(labels)}}, path, bad, true);
    }
    return file_source(path, bad);
  } catch (const fs::filesystem_error& error) {
    throw DataError(path + " cannot be read as training data: " + error.code().message());
  }
}

std::shared_ptr<DataSource> callback_source(const edgefl_data_source& source) {
  auto caller = std::make_shared<Caller>(source);
  const std::string name = source.name == nullptr || *source.name == '\0' ? "the local data" : source.name;
  if (source.read == nullptr || source.rows > static_cast<uint64_t>(INT64_MAX)) {
    throw DataError(name + " cannot be read: give a `read` and a number of rows that an int64 holds");
  }
  NamedRows arrays;
  if (source.arrays == nullptr && source.array_count > 0) throw DataError(name + " cannot be read: `arrays` is NULL");
  for (size_t at = 0; at < source.array_count; ++at) {
    const edgefl_array& array = source.arrays[at];
    if (array.shape == nullptr && array.dims > 0) throw DataError(name + ": the `shape` of array number " + std::to_string(at) + " is NULL");
    const std::string about = array.name == nullptr ? "" : array.name;
    const std::string kind = array.dtype == nullptr ? "" : array.dtype;
    DType dtype;
    try {
      dtype = dtype_of(kind);
    } catch (const ProtocolError&) {
      throw DataError(name + ": array '" + about + "' has the type '" + kind + "': name one of numpy's, such as float32");
    }
    Shape shape(array.shape, array.shape + array.dims);
    const bool sizes = std::all_of(shape.begin(), shape.end(), [](int64_t size) { return size >= 0; });
    if (!sizes || elements(shape) > kMostRow) {
      throw DataError(name + ": array '" + about + "' has rows of shape " + shown(shape) + ": no size is below 0, and no row has more than " +
                      std::to_string(kMostRow) + " entries");
    }
    const size_t bytes = static_cast<size_t>(elements(shape)) * dtype_bytes(dtype);
    arrays[about] = made_rows(dtype, std::move(shape), static_cast<int64_t>(source.rows),
                              [caller, at, bytes, about, name](int64_t row, std::byte* into) {
                                const auto number = static_cast<uint64_t>(row);
                                if (caller->source.read(caller->source.context, at, number, into, bytes) != 0) {
                                  throw DataError(name + ": row " + std::to_string(row) + " of " + about +
                                                  " cannot be read: its callback says so");
                                }
                              });
  }
  return array_source(std::move(arrays), name, BadRows::refuse, false);
}

}  // namespace edgefl
