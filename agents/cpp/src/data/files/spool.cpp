#include "data/files/spool.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <system_error>
#include <unistd.h>
#include <utility>

#include "data/convert.h"
#include "data/files/mapped_file.h"
#include "wire/errors.h"

namespace edgefl {
namespace {

constexpr size_t kInMemory = size_t{16} << 20;  // bytes

// A file without a name: in the user's folder for caches, which is on a disk where the system's folder for temporary files
// may be memory; or in the latter, if the first cannot be written.
int nameless_file() {
  namespace fs = std::filesystem;
  const char* cache = std::getenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  const char* temporary = std::getenv("TMPDIR");
  std::vector<fs::path> folders;
  if (cache != nullptr && *cache != '\0') {
    folders.push_back(fs::path(cache) / "edgefl");
  } else if (home != nullptr && *home != '\0') {
    folders.push_back(fs::path(home) / ".cache" / "edgefl");
  }
  std::error_code ignored;
  if (!folders.empty()) fs::create_directories(folders.front(), ignored);
  folders.push_back(temporary != nullptr && *temporary != '\0' ? temporary : "/tmp");
  int refused = 0;
  for (const fs::path& folder : folders) {
    std::string name = (folder / "edgefl-XXXXXX").string();
    const int file = mkostemp(name.data(), O_CLOEXEC);
    if (file >= 0) {
      unlink(name.c_str());
      return file;
    }
    refused = refused == 0 ? errno : refused;
  }
  throw DataError(std::string("the local data are larger than what is kept in memory, and no file can be made for them (") +
                  std::strerror(refused) + "): let XDG_CACHE_HOME or TMPDIR name a folder that can be written");
}

}  // namespace

Spool::Spool(DType dtype, Shape shape) : dtype_(dtype), shape_(std::move(shape)) {}

Spool::~Spool() {
  if (file_ >= 0) close(file_);
}

void Spool::flush() {
  Tensor values(DType::f64, {static_cast<int64_t>(waiting_.size())});
  if (!waiting_.empty()) std::memcpy(values.data.data(), waiting_.data(), values.nbytes());
  entries_ += static_cast<int64_t>(waiting_.size());
  waiting_.clear();
  const Tensor made = converted(std::move(values), dtype_);
  if (file_ < 0 && data_.size() + made.nbytes() > kInMemory) to_file();
  write(made.data.data(), made.nbytes());
}

void Spool::to_file() {
  file_ = nameless_file();
  write(data_.data(), data_.size());
  data_ = {};
}

void Spool::write(const std::byte* data, size_t size) {
  if (file_ < 0) data_.insert(data_.end(), data, data + size);
  while (file_ >= 0 && size > 0) {
    const ssize_t written = ::write(file_, data, size);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      throw DataError("the local data take " + std::to_string(static_cast<size_t>(entries_) * dtype_bytes(dtype_)) +
                      " bytes on the disk and more, which is full: free some, or let XDG_CACHE_HOME name a folder with room");
    }
    data += written;
    size -= static_cast<size_t>(written);
  }
}

RowsPtr Spool::rows() {
  flush();
  Shape all{entries_ / std::max<int64_t>(1, elements(shape_))};
  all.insert(all.end(), shape_.begin(), shape_.end());
  if (file_ < 0) {
    Tensor values(dtype_, all);
    if (!data_.empty()) std::memcpy(values.data.data(), data_.data(), data_.size());
    data_ = {};
    return rows_of(std::move(values));
  }
  const auto mapped = std::make_shared<MappedFile>(file_, "the file of the local data");
  return mapped_rows(mapped, mapped->data(), dtype_, all, [mapped] { mapped->released(); });
}

}  // namespace edgefl
