// Rows that are appended as they are read: in memory while they are few, else in a file that is mapped.
#pragma once

#include <string>
#include <vector>

#include "data/rows.h"

namespace edgefl {

class Spool {
 public:
  Spool(DType dtype, Shape shape);
  ~Spool();
  Spool(const Spool&) = delete;
  Spool& operator=(const Spool&) = delete;

  void add(double value) { waiting_.push_back(value); }  // entry by entry; a row is `elements(shape)` of them
  void flush();                                          // the entries added become `dtype`; DataError if the disk is full
  RowsPtr rows();                                        // all of them; nothing is added afterwards

 private:
  void write(const std::byte* data, size_t size);
  void to_file();

  DType dtype_;
  Shape shape_;
  std::vector<double> waiting_;
  std::vector<std::byte> data_;
  int64_t entries_ = 0;
  int file_ = -1;  // without a name; -1 while the rows are in memory
};

}  // namespace edgefl
