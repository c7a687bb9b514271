// The rows that a bundle uses are those of held_out.json, which other agents are held against, too.
#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>

#include "data/split.h"
#include "golden.h"
#include "wire/digest.h"

using namespace edgefl;
using nlohmann::json;

namespace {

struct Column {
  std::string name, dtype;
  Shape shape;  // of one row
  Bytes bytes;
};

// Arrays of an app; labels are the rows' numbers.
struct Columns {
  std::vector<Column> all;
  uint64_t rows = 0;

  explicit Columns(const json& arrays) {
    for (const auto& [name, each] : arrays.items()) {
      const Shape shape = each["shape"];
      rows = static_cast<uint64_t>(shape.front());
      all.push_back({name, each["dtype"], Shape(shape.begin() + 1, shape.end()), from_hex(each["bytes"].get<std::string>())});
    }
    Bytes numbers(8 * rows, '\0');
    for (uint64_t row = 0; row < rows; ++row) std::memcpy(numbers.data() + 8 * row, &row, 8);
    all.push_back({"y", "int64", {}, numbers});
  }

  static int read(void* context, size_t array, uint64_t row, void* into, size_t bytes) {
    std::memcpy(into, static_cast<Columns*>(context)->all[array].bytes.data() + row * bytes, bytes);
    return 0;
  }

  std::shared_ptr<DataSource> source() {
    std::vector<edgefl_array> arrays;
    for (const Column& each : all) arrays.push_back({each.name.c_str(), each.dtype.c_str(), each.shape.data(), each.shape.size()});
    return callback_source({"rows", rows, arrays.data(), arrays.size(), read, nullptr, this});
  }
};

Manifest manifest_of(const json& each, bool held_out) {
  Manifest manifest;
  const json& data = each["data"];
  manifest.data.shape = data["shape"].get<Shape>();
  manifest.data.dtype = dtype_of(data["dtype"].get<std::string>());
  manifest.data.classes = data["classes"];
  manifest.data.scale = data.value("scale", 1.0);
  manifest.data.shift = data.value("shift", 0.0);
  manifest.data.below = data.value("below", int64_t{0});
  for (const json& other : data.value("others", json::array())) {
    Input input;
    input.name = other["name"];
    input.shape = other["shape"].get<Shape>();
    input.dtype = dtype_of(other["dtype"].get<std::string>());
    manifest.data.others.push_back(input);
  }
  Graph graph;
  graph.name = manifest.evaluate = "evaluate";
  graph.inputs = {{"batch.0.y", "batch", DType::i64, {8}, 0, std::nullopt}};
  manifest.graphs = {graph};
  manifest.split = Split{each["share"], std::stoull(each["seed"].get<std::string>()), held_out};
  return manifest;
}

Indices rows_of(const FittedData& data) {
  Indices every;
  for (int64_t row = 0; row < data.size(); ++row) every.push_back(row);
  const Tensor labels = data.labels(every);
  return {labels.as<int64_t>(), labels.as<int64_t>() + labels.count()};
}

}  // namespace

TEST_CASE("the held-out rows are those of the protocol, the others are for training") {
  for (const json& each : json::parse(golden("held_out.json"))) {
    CAPTURE(each["data"].dump());
    Columns columns(each["arrays"]);
    const Indices held_out = each["held_out"];
    Indices kept;
    for (int64_t row = 0; row < static_cast<int64_t>(columns.rows); ++row)
      if (std::find(held_out.begin(), held_out.end(), row) == held_out.end()) kept.push_back(row);
    CHECK(rows_of(*fit_rows(*columns.source(), manifest_of(each, true), {})) == held_out);
    CHECK(rows_of(*fit_rows(*columns.source(), manifest_of(each, false), {})) == kept);
  }
}

TEST_CASE("a device whose rows are all in the other part is refused") {
  const json each = json::parse(golden("held_out.json"))[1];
  json one = each["arrays"];
  one["x"]["shape"][0] = 1;
  Columns columns(one);
  const Indices held_out = each["held_out"];
  const bool first_is_held_out = held_out.front() == 0;
  CHECK_THROWS_AS(fit_rows(*columns.source(), manifest_of(each, !first_is_held_out), {}), DataError);
  CHECK(rows_of(*fit_rows(*columns.source(), manifest_of(each, first_is_held_out), {})) == Indices{0});
}
