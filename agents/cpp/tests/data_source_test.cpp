// Local data as a phone app gives it, and files that are damaged.
#include <cstring>
#include <doctest/doctest.h>
#include <filesystem>
#include <fstream>
#include <unistd.h>

#include "data/convert.h"
#include "data/files/images.h"
#include "data/files/npy.h"
#include "data/source.h"

using namespace edgefl;

namespace {

// Four rows of two numbers and a class, as an app keeps them.
struct App {
  std::vector<uint8_t> x = {0, 255, 1, 2, 3, 4, 5, 6};
  std::vector<int64_t> y = {0, 1, 1, 0};
  int64_t fails_at = -1;
  int released = 0;
};

int read_row(void* context, size_t array, uint64_t row, void* into, size_t bytes) {
  auto* app = static_cast<App*>(context);
  if (static_cast<int64_t>(row) == app->fails_at) return 1;
  if (array == 0) std::memcpy(into, app->x.data() + row * bytes, bytes);
  if (array == 1) std::memcpy(into, app->y.data() + row, bytes);
  return 0;
}

std::shared_ptr<DataSource> source_of(App& app, const char* dtype = "uint8") {
  static const int64_t shape[] = {2};
  const edgefl_array arrays[] = {{"x", dtype, shape, 1}, {"y", "int64", nullptr, 0}};
  return callback_source({"photos", app.y.size(), arrays, 2, read_row, [](void* context) { ++static_cast<App*>(context)->released; }, &app});
}

Manifest manifest_of(int64_t classes) {
  Manifest manifest;
  manifest.data.shape = {2};
  manifest.data.dtype = DType::f32;
  manifest.data.classes = classes;
  manifest.data.scale = 0.5;
  manifest.data.shift = 1.0;
  Graph graph;
  graph.name = "evaluate";
  graph.inputs = {{"batch.0.y", "batch", DType::i64, {8}, 0, std::nullopt}};
  manifest.graphs = {graph};
  manifest.evaluate = "evaluate";
  return manifest;
}

template <typename T>
std::vector<T> values(const Tensor& tensor) {
  return {tensor.as<T>(), tensor.as<T>() + tensor.count()};
}

std::string refused(const std::function<void()>& work) {
  try {
    work();
  } catch (const DataError& error) {
    return error.what();
  }
  return "";
}

std::string npy(const std::string& header, const std::string& numbers) {
  return std::string("\x93NUMPY\x01\0", 8) + std::string{static_cast<char>(header.size()), '\0'} + header + numbers;
}

struct Folder {
  std::string path = (std::filesystem::temp_directory_path() / ("edgefl-data-" + std::to_string(getpid()))).string();
  Folder() { std::filesystem::remove_all(path); }
  ~Folder() { std::filesystem::remove_all(path); }
  void has(const std::string& name, const std::string& bytes) const {
    const std::filesystem::path file = std::filesystem::path(path) / name;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file, std::ios::binary) << bytes;
  }
};

bool has(const std::string& text, const std::string& words) { return text.find(words) != std::string::npos; }

}  // namespace

TEST_CASE("an app's rows become samples: whole numbers are scaled, classes are counted") {
  App app;
  {
    const auto source = source_of(app);
    CHECK(source->size() == 4);
    const auto data = source->fitted(manifest_of(2), {});
    CHECK(values<float>(data->rows({1, 0})) == std::vector<float>{1.5F, 2.0F, 1.0F, 128.5F});
    CHECK(values<int64_t>(data->labels({3, 1})) == std::vector<int64_t>{0, 1});
    CHECK(values<int64_t>(data->facts().at("class_counts")) == std::vector<int64_t>{2, 2});
    CHECK(values<int64_t>(data->first(3)->facts().at("class_counts")) == std::vector<int64_t>{1, 2});
    CHECK(app.released == 0);
  }
  CHECK(app.released == 1);
}

TEST_CASE("an app's rows that do not fit, or cannot be read, are refused in words") {
  App app;
  CHECK(has(refused([&] { source_of(app)->fitted(manifest_of(1), {}); }), "photos: labels are int64 from 0 to 1, the model takes integers from 0 to 0"));
  Manifest wide = manifest_of(2);
  wide.data.shape = {3};
  CHECK(has(refused([&] { source_of(app)->fitted(wide, {}); }), "samples have shape (2,), the model takes (3,)"));
  app.fails_at = 2;
  CHECK(has(refused([&] { source_of(app)->fitted(manifest_of(2), {}); }), "photos: row 2 of y cannot be read"));
  CHECK(has(refused([&] { source_of(app, "complex64"); }), "has the type 'complex64'"));
  CHECK(app.released == 4);
}

TEST_CASE("classes are counted in no more memory than there is, whatever a manifest says of them") {
  App app;
  const auto data = source_of(app)->fitted(manifest_of((int64_t{1} << 61) + 1), {});
  CHECK_THROWS_WITH_AS(data->facts(), doctest::Contains("larger than any memory"), Error);
}

TEST_CASE("a callback without its arrays or their shapes is refused") {
  const edgefl_array shapeless[] = {{"x", "uint8", nullptr, 1}};
  CHECK(has(refused([] { callback_source({"photos", 1, nullptr, 1, read_row, nullptr, nullptr}); }), "`arrays` is NULL"));
  CHECK(has(refused([&] { callback_source({"photos", 1, shapeless, 1, read_row, nullptr, nullptr}); }), "`shape` of array number 0 is NULL"));
}

TEST_CASE("a folder's samples are those of the bundle that asks") {
  const Folder folder;
  folder.has("0/a.npy", npy("{'descr': '|u1', 'fortran_order': False, 'shape': (2,), }", std::string("\0\1", 2)));
  const auto source = open_source(folder.path, BadRows::refuse);
  Manifest manifest = manifest_of(2);
  for (const double scale : {1e-7, 2e-7}) {  // the same in six places
    manifest.data.scale = scale;
    manifest.data.shift = 0.0;
    CHECK(values<float>(source->fitted(manifest, {})->rows({0})) == std::vector<float>{0.0F, static_cast<float>(scale)});
  }
  manifest.data.scale = 3.0;
  DataParts over;
  over.between = [] { throw RoundAborted("over"); };
  CHECK_THROWS_AS(source->fitted(manifest, over), RoundAborted);
  folder.has("grandmother/b.npy", "no array");
  try {
    open_source(folder.path, BadRows::refuse)->fitted(manifest, {});
    FAIL("a folder that is no class was taken");
  } catch (const DataError& error) {
    CHECK(has(error.what(), "grandmother"));
  }
  manifest.data.shape = {3, 0, 0};
  folder.has("1/c.jpg", "\xFF\xD8");
  std::filesystem::remove_all(folder.path + "/0");
  std::filesystem::remove_all(folder.path + "/grandmother");
  CHECK(has(refused([&] { open_source(folder.path, BadRows::refuse)->fitted(manifest, {}); }), reads_images() ? "images become samples of shape" : "this agent reads .npy"));
}

TEST_CASE("what is no array, or is cut short, is refused") {
  const Tensor whole = npy_tensor(npy("{'descr': '>i2', 'fortran_order': False, 'shape': (2, 1), }", std::string("\0\1\1\0", 4)), "a");
  CHECK(values<int16_t>(whole) == std::vector<int16_t>{1, 256});
  CHECK(whole.shape == Shape{2, 1});
  CHECK(npy_tensor(npy("{'descr': '|u1', 'fortran_order': False, 'shape': (), }", "\5"), "a").scalar() == 5);
  CHECK(has(refused([&] { npy_tensor(npy("{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }", "1234"), "a"); }), "announces shape (2,)"));
  CHECK(has(refused([&] { npy_tensor(npy("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }", "12345678"), "a"); }), "no plain numbers"));
  CHECK(has(refused([&] { npy_tensor("no array at all", "a"); }), "does not begin as one"));
  CHECK(has(refused([] { open_source("/nowhere/data.npz", BadRows::refuse); }), "there is no file /nowhere/data.npz"));
}

TEST_CASE("halves are rounded as numpy rounds them") {
  for (uint32_t bits = 0; bits < 0x7C00; ++bits) CHECK(halved(widened(Half{static_cast<uint16_t>(bits)})).bits == bits);
  CHECK(halved(2049.0F).bits == 0x6800);   // a tie, to even: 2048
  CHECK(halved(65519.0F).bits == 0x7BFF);  // the largest
  CHECK(halved(65520.0F).bits == 0x7C00);  // infinity
  CHECK(halved(-2.98023224e-08F).bits == 0x8000);
}
