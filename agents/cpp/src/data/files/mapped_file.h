// A file in memory as far as it is read.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

namespace edgefl {

class MappedFile {
 public:
  explicit MappedFile(const std::string& path);  // DataError if it cannot be read
  MappedFile(int file, const std::string& name);  // an open file, which may be closed afterwards
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  const std::byte* data() const { return data_; }
  size_t size() const { return size_; }
  std::string_view text() const { return {reinterpret_cast<const char*>(data_), size_}; }
  void released() const;  // what was read may leave memory; it comes back when it is read again

 private:
  void map(int file, const std::string& name);

  std::byte* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace edgefl
