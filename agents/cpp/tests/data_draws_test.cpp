// Batches and noise are those of the Python agent, bit by bit: draws.json is drawn by it.
#include <cstring>
#include <doctest/doctest.h>
#include <fstream>
#include <nlohmann/json.hpp>

#include "data/batches.h"

using namespace edgefl;
using nlohmann::json;

namespace {

json draws() {
  std::ifstream file(EDGEFL_TESTS "/draws.json");
  REQUIRE(file);
  return json::parse(file);
}

uint64_t seed_of(const json& each) { return std::stoull(each["seed"].get<std::string>()); }

}  // namespace

TEST_CASE("rows of a batch are those that the Python agent draws") {
  const json vectors = draws();
  for (const json& each : vectors["batches"]) {
    CAPTURE(each.dump());
    const std::string how = each["draws"];
    const std::vector<int64_t> buckets = how == "length" ? vectors["buckets"].get<std::vector<int64_t>>() : std::vector<int64_t>();
    Batches batches(seed_of(each), each["samples"], each["batch"], how, buckets);
    for (size_t at = 0; at < each["places"].size(); ++at) {
      Indices rows = batches.rows(each["places"][at][0], each["places"][at][1]);
      CHECK(static_cast<int64_t>(rows.size()) == each["batch"].get<int64_t>());
      rows.resize(each["rows"][at].size());
      CHECK(rows == each["rows"][at].get<Indices>());
    }
  }
}

TEST_CASE("noise is that of the Python agent") {
  const json vectors = draws();
  for (const json& each : vectors["noise"]) {
    CAPTURE(each.dump());
    const Tensor drawn = noise(seed_of(each), each["step"], each["port"], each["shape"].get<Shape>(), DType::f32);
    std::vector<uint32_t> bits(static_cast<size_t>(drawn.count()));
    std::memcpy(bits.data(), drawn.data.data(), drawn.nbytes());
    CHECK(bits == each["bits"].get<std::vector<uint32_t>>());
  }
}

TEST_CASE("a pass over the data fills its last batch from the first rows, and masks them") {
  CHECK(pass_rows(5, 4, 1) == Indices{4, 0, 1, 2});
  const Tensor mask = pass_mask(5, 4, 1);
  CHECK(std::vector<float>(mask.as<float>(), mask.as<float>() + 4) == std::vector<float>{1, 0, 0, 0});
}
