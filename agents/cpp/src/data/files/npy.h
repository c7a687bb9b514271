// Arrays in numpy's npy and in the idx format of the MNIST family.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "data/files/mapped_file.h"
#include "data/rows.h"

namespace edgefl {

// The array whose npy bytes are `bytes`, which lie in `file`: not copied where its numbers lie as this machine has them.
// `name` says in errors what it is. DataError for what is none, or holds what is no number.
RowsPtr read_npy(std::string_view bytes, std::shared_ptr<const MappedFile> file, const std::string& name);
RowsPtr read_npy(std::string bytes, const std::string& name);  // of bytes in memory
Tensor npy_tensor(std::string_view bytes, const std::string& name);

// An idx file, gzipped if its name ends in .gz.
RowsPtr read_idx(const std::string& path);

}  // namespace edgefl
