// The frozen vectors of the protocol.
#pragma once

#include <doctest/doctest.h>
#include <fstream>
#include <iterator>
#include <string>

inline std::string golden(const std::string& name) {
  std::ifstream file(std::string(EDGEFL_GOLDEN) + "/" + name, std::ios::binary);
  REQUIRE_MESSAGE(file.good(), name);
  return {std::istreambuf_iterator<char>(file), {}};
}
