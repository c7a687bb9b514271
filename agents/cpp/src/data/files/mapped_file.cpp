#include "data/files/mapped_file.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "wire/errors.h"

namespace edgefl {
namespace {

[[noreturn]] void refuse(const std::string& path) {
  throw DataError(path + " cannot be read: " + std::strerror(errno) + "; name a file that this user may read");
}

}  // namespace

MappedFile::MappedFile(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) refuse(path);
  try {
    map(file, path);
  } catch (...) {
    close(file);
    throw;
  }
  close(file);
}

MappedFile::MappedFile(int file, const std::string& name) { map(file, name); }

void MappedFile::map(int file, const std::string& name) {
  struct stat facts {};
  if (fstat(file, &facts) != 0) refuse(name);
  size_ = static_cast<size_t>(facts.st_size);
  void* mapped = size_ == 0 ? nullptr : mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file, 0);
  if (mapped == MAP_FAILED) refuse(name);
  data_ = static_cast<std::byte*>(mapped);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) munmap(data_, size_);
}

void MappedFile::released() const {
  if (data_ != nullptr) (void)madvise(data_, size_, MADV_DONTNEED);
}

}  // namespace edgefl
