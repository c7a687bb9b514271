// The rows that a bundle uses are those of held_out.json, which other agents are held against, too.
#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <unistd.h>

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
  int reads = 0;  // of rows

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
    auto* columns = static_cast<Columns*>(context);
    ++columns->reads;
    std::memcpy(into, columns->all[array].bytes.data() + row * bytes, bytes);
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

TEST_CASE("the rows are divided once, and anew when the app's rows change") {
  const json each = json::parse(golden("held_out.json"))[0];
  Columns columns(each["arrays"]);
  const auto source = columns.source();
  const auto reads_of = [&](bool held_out) {
    columns.reads = 0;
    fit_rows(*source, manifest_of(each, held_out), {});
    return columns.reads;
  };
  const int first = reads_of(true), second = reads_of(false);
  CHECK(second < first);
  CHECK(reads_of(true) == second);

  Column& x = columns.all[columns.all[0].name == "x" ? 0 : 1];
  const size_t width = x.bytes.size() / columns.rows, half = columns.rows / 2 * width;
  x.bytes = x.bytes.substr(half) + x.bytes.substr(0, half);
  for (const bool held_out : {true, false}) {
    const Indices fresh = rows_of(*fit_rows(*columns.source(), manifest_of(each, held_out), {}));
    CHECK(rows_of(*fit_rows(*source, manifest_of(each, held_out), {})) == fresh);
  }
  CHECK(rows_of(*fit_rows(*source, manifest_of(each, true), {})) != each["held_out"].get<Indices>());
}

TEST_CASE("a file that was replaced is divided anew") {
  namespace fs = std::filesystem;
  const fs::path folder = fs::temp_directory_path() / ("edgefl-split-" + std::to_string(getpid()));
  const auto write = [&](int file, float value) {
    std::string head = "{'descr': '<f4', 'fortran_order': False, 'shape': (1,), }";
    head.resize(117, ' ');
    const fs::path path = folder / "0" / ("a" + std::to_string(100 + file) + ".npy");
    fs::create_directories(path.parent_path());
    fs::remove(path);
    std::ofstream out(path, std::ios::binary);
    out << std::string("\x93NUMPY\x01\x00\x76\x00", 10) << head << '\n' << std::string(reinterpret_cast<const char*>(&value), sizeof value);
  };
  for (int file = 0; file < 40; ++file) write(file, static_cast<float>(file));
  Manifest manifest = manifest_of({{"data", {{"shape", {1}}, {"dtype", "float32"}, {"classes", 1}}}, {"share", 0.5}, {"seed", "7"}}, true);
  const auto values_of = [&](const DataSource& source) {
    const auto data = fit_rows(source, manifest, {});
    Indices every(static_cast<size_t>(data->size()));
    std::iota(every.begin(), every.end(), 0);
    const Tensor rows = data->rows(every);
    return std::vector<float>(rows.as<float>(), rows.as<float>() + rows.count());
  };
  const auto source = open_source(folder.string(), BadRows::refuse);
  const auto before = values_of(*source);
  CHECK(before == values_of(*source));
  for (int file = 0; file < 40; ++file) write(file, static_cast<float>(file + 1000));
  const auto after = values_of(*source);
  CHECK(after == values_of(*open_source(folder.string(), BadRows::refuse)));
  CHECK(after.size() != 40);
  for (const float value : after) CHECK(value >= 1000.0F);
  fs::remove_all(folder);
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
