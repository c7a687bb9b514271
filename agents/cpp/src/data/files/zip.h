// Entries of a zip file, stored or deflated, as numpy and edgefl write them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>

namespace edgefl {

class Zip {
 public:
  struct Entry {
    int method = 0;        // 0: stored, 8: deflated
    uint64_t packed = 0;   // bytes in the file
    uint64_t size = 0;     // bytes unfolded
    uint32_t crc = 0;
    uint64_t at = 0;       // of its local header
  };

  // `file` outlives this. DataError if it is no whole zip file; `name` says which it is.
  Zip(std::string_view file, std::string name);

  const std::map<std::string, Entry>& entries() const { return entries_; }
  std::string_view stored(const Entry& entry) const;             // its bytes as they lie in the file, checked
  std::string read(const Entry& entry, uint64_t most) const;     // unfolded and checked, if it has no more than `most`

 private:
  std::string_view packed(const Entry& entry) const;
  void check(std::string_view data, const Entry& entry) const;
  [[noreturn]] void damaged(const std::string& why) const;
  uint64_t number(uint64_t at, int bytes) const;

  std::string_view file_;
  std::string name_;
  std::map<std::string, Entry> entries_;
};

// What a raw deflate stream, or with `gzip` a gzip file, unfolds to; DataError if it is damaged or has more than `most`.
std::string inflated(std::string_view packed, bool gzip, uint64_t most, const std::string& name);

}  // namespace edgefl
