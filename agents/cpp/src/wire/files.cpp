#include "wire/files.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <unistd.h>

#include "wire/errors.h"

namespace edgefl {
namespace {

void sync_path(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) return;
  fsync(file);
  close(file);
}

[[noreturn]] void refuse(const std::string& path) {
  throw StoreError(path + " cannot be written (" + std::strerror(errno) + "): free some space, or name another folder");
}

}  // namespace

bool file_exists(const std::string& path) {
  std::error_code ignored;
  return std::filesystem::exists(path, ignored);
}

std::string read_file(const std::string& path, size_t most) {
  std::ifstream file(path, std::ios::binary);
  std::string text(most, '\0');
  if (!file) throw ConfigError(path + " cannot be read (" + std::strerror(errno) + ")");
  file.read(text.data(), static_cast<std::streamsize>(most));
  text.resize(static_cast<size_t>(file.gcount()));
  return text;
}

void write_secret(const std::string& path, std::string_view text) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  if (!folder.empty()) make_folder(folder.string());
  const std::string partial = path + "." + std::to_string(getpid()) + ".partial";
  unlink(partial.c_str());
  const int file = open(partial.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (file < 0) refuse(path);
  const bool written = write(file, text.data(), text.size()) == static_cast<ssize_t>(text.size()) && fsync(file) == 0;
  close(file);
  if (!written || rename(partial.c_str(), path.c_str()) != 0) refuse(path);
  sync_path(folder.empty() ? "." : folder.string());
}

int remove_secret(const std::string& path) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  if (unlink(path.c_str()) != 0) return errno == ENOENT ? 0 : errno;
  sync_path(folder.empty() ? "." : folder.string());
  return 0;
}

void make_folder(const std::string& path) {
  std::error_code error;
  std::filesystem::create_directories(path, error);
  if (error) throw StoreError("the folder " + path + " is unusable (" + error.message() + "): name another one");
}

}  // namespace edgefl
