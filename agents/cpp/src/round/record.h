// Recorded boundary activations: a file with one row per local sample, tagged with what it belongs to. Read and written, not
// mapped: only rows that are asked for are ever in memory.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "data/source.h"
#include "wire/tensor.h"

namespace edgefl {

class ActivationRecord {
 public:
  // An empty record of `shape`, whose first axis are its rows; it counts as written only after seal(). StoreError if the
  // disk has no room for it.
  static std::unique_ptr<ActivationRecord> create(const std::string& path, const Shape& shape, DType dtype, const std::string& tag);
  // The sealed record at `path`; null if there is none that belongs to `tag` and is whole.
  static std::unique_ptr<ActivationRecord> reopen(const std::string& path, const std::string& tag);
  ~ActivationRecord();
  ActivationRecord(const ActivationRecord&) = delete;
  ActivationRecord& operator=(const ActivationRecord&) = delete;

  int64_t count() const { return shape_.front(); }
  // The first `count` of them, from row `start` on; BundleError if there are fewer.
  void write(int64_t start, const Tensor& rows, int64_t count);
  void seal();                                                   // the rows, then the tag that makes them valid
  Tensor rows(const Indices& indices) const;
  void remove();                                                 // its files

 private:
  ActivationRecord(std::string path, Shape shape, DType dtype, std::string tag, int file);
  size_t row_bytes() const;
  std::string facts() const;

  std::string path_;
  Shape shape_;
  DType dtype_;
  std::string tag_;
  int file_;
};

}  // namespace edgefl
