// Removal of a secret, and the failures of it.
#include <doctest/doctest.h>
#include <filesystem>
#include <unistd.h>

#include "wire/files.h"

TEST_CASE("a secret that cannot be removed is reported") {
  const std::filesystem::path folder = std::filesystem::temp_directory_path() / ("edgefl-files-" + std::to_string(getpid()));
  const std::string path = (folder / "token").string();
  edgefl::write_secret(path, "efl1");

  CHECK(edgefl::remove_secret(path) == 0);
  CHECK_FALSE(edgefl::file_exists(path));
  CHECK(edgefl::remove_secret(path) == 0);
  CHECK(edgefl::remove_secret(folder.string()) != 0);
  std::filesystem::remove_all(folder);
}
