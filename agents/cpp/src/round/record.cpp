#include "round/record.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>
#include <utility>

#include "engine/reserve.h"
#include "wire/errors.h"

namespace edgefl {
namespace {

constexpr const char* kMark = "edgefl-record 1";

std::string meta_path(const std::string& path) {
  const size_t dot = path.rfind('.');
  return path.substr(0, dot) + ".meta";
}

[[noreturn]] void not_written(const std::string& path, int error) {
  throw StoreError("the record " + path + " cannot be written (" + std::strerror(error) +
                   "): free some space, or put the store elsewhere");
}

void make_room(int file, int64_t nbytes, const std::string& path) {
  if (const int failed = reserve_room(file, nbytes); failed != 0) {
    close(file);
    unlink(path.c_str());
    throw StoreError("no room for a record of " + std::to_string(nbytes) + " bytes at " + path + " (" +
                     std::strerror(failed) + "): free some space, or put the store elsewhere");
  }
}

}  // namespace

std::unique_ptr<ActivationRecord> ActivationRecord::create(const std::string& path, const Shape& shape, DType dtype, const std::string& tag) {
  unlink(meta_path(path).c_str());
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (file < 0) not_written(path, errno);
  std::unique_ptr<ActivationRecord> made(new ActivationRecord(path, shape, dtype, tag, file));
  made->file_ = -1;
  make_room(file, static_cast<int64_t>(made->row_bytes()) * shape.front(), path);
  made->file_ = file;
  return made;
}

std::unique_ptr<ActivationRecord> ActivationRecord::reopen(const std::string& path, const std::string& tag) {
  std::ifstream meta(meta_path(path), std::ios::binary);
  std::stringstream text;
  text << meta.rdbuf();
  std::string mark, kind;
  size_t rank = 0;
  std::getline(text, mark);
  if (!meta || mark != kMark || !(text >> kind >> rank) || rank < 1 || rank > 64) return nullptr;
  Shape shape(rank);
  for (int64_t& size : shape) text >> size;
  if (!text) return nullptr;
  const int file = open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return nullptr;
  struct stat facts {};
  try {
    std::unique_ptr<ActivationRecord> made(new ActivationRecord(path, shape, dtype_of(kind), tag, file));
    const bool whole = fstat(file, &facts) == 0 && facts.st_size == static_cast<int64_t>(made->row_bytes()) * shape.front();
    return whole && made->facts() == text.str() ? std::move(made) : nullptr;
  } catch (const ProtocolError&) {
    close(file);
    return nullptr;
  }
}

ActivationRecord::ActivationRecord(std::string path, Shape shape, DType dtype, std::string tag, int file)
    : path_(std::move(path)), shape_(std::move(shape)), dtype_(dtype), tag_(std::move(tag)), file_(file) {}

ActivationRecord::~ActivationRecord() {
  if (file_ >= 0) close(file_);
}

size_t ActivationRecord::row_bytes() const {
  return static_cast<size_t>(elements(Shape(shape_.begin() + 1, shape_.end()))) * dtype_bytes(dtype_);
}

// All of what makes a record valid, as its second file has it.
std::string ActivationRecord::facts() const {
  std::string text = std::string(kMark) + "\n" + std::string(dtype_name(dtype_)) + " " + std::to_string(shape_.size());
  for (const int64_t size : shape_) text += " " + std::to_string(size);
  return text + "\n" + tag_ + "\n";
}

void ActivationRecord::write(int64_t start, const Tensor& rows, int64_t count) {
  size_t left = row_bytes() * static_cast<size_t>(count), done = 0;
  if (left > rows.nbytes()) throw BundleError("a frozen chunk gives " + shown(rows.shape) + " where " + std::to_string(count) + " rows are wanted: export the bundle again");
  auto at = static_cast<off_t>(row_bytes() * static_cast<size_t>(start));
  while (left > 0) {
    const ssize_t wrote = pwrite(file_, rows.data.data() + done, left, at);
    if (wrote < 0 && errno == EINTR) continue;
    if (wrote < 0) not_written(path_, errno);
    done += static_cast<size_t>(wrote);
    left -= static_cast<size_t>(wrote);
    at += wrote;
  }
}

void ActivationRecord::seal() {
  if (fsync(file_) != 0) not_written(path_, errno);
  std::ofstream meta(meta_path(path_), std::ios::binary | std::ios::trunc);
  meta << facts();
  meta.close();
  if (!meta) not_written(path_, errno);
}

Tensor ActivationRecord::rows(const Indices& indices) const {
  Shape shape = shape_;
  shape.front() = static_cast<int64_t>(indices.size());
  Tensor picked(dtype_, shape);
  std::byte* into = picked.data.data();
  for (const int64_t row : indices) {
    for (size_t done = 0; done < row_bytes();) {
      const auto at = static_cast<off_t>(row_bytes() * static_cast<size_t>(row) + done);
      const ssize_t got = pread(file_, into + done, row_bytes() - done, at);
      if (got < 0 && errno == EINTR) continue;
      if (got <= 0) throw StoreError("the record " + path_ + " was cut short by somebody; begin the round again");
      done += static_cast<size_t>(got);
    }
    into += row_bytes();
  }
  return picked;
}

void ActivationRecord::remove() {
  unlink(path_.c_str());
  unlink(meta_path(path_).c_str());
}

}  // namespace edgefl
