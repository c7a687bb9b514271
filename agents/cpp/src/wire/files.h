// Files and folders, with errors that name them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace edgefl {

bool file_exists(const std::string& path);
// Its bytes, `most` at most; ConfigError if it cannot be read.
std::string read_file(const std::string& path, size_t most);
// For its owner alone, whole or not at all, and on the disk when this returns; StoreError if it cannot be written.
void write_secret(const std::string& path, std::string_view text);
// 0 if the file is gone from the disk when this returns, else the errno of the failure.
int remove_secret(const std::string& path);
// With those above it; StoreError if it cannot be made.
void make_folder(const std::string& path);

}  // namespace edgefl
