// What a manifest that nobody vouches for may ask of a round.
#include <cstring>
#include <doctest/doctest.h>
#include <filesystem>
#include <unistd.h>

#include "round/inputs.h"
#include "round/record.h"

using namespace edgefl;

namespace {

int zeros(void*, size_t, uint64_t, void* into, size_t bytes) {
  std::memset(into, 0, bytes);
  return 0;
}

std::shared_ptr<FittedData> local(const Manifest& manifest) {
  static const int64_t shape[] = {2};
  static const edgefl_array arrays[] = {{"x", "int64", shape, 1}, {"y", "int64", nullptr, 0}};
  return callback_source({"words", 4, arrays, 2, zeros, nullptr, nullptr})->fitted(manifest, {});
}

}  // namespace

TEST_CASE("a batch of no rows is refused, by whatever it is drawn") {
  Graph step;
  step.name = "step";
  step.inputs = {{"batch.0.x", "batch", DType::i64, {0, 2}, 0, std::nullopt}};
  Manifest manifest;
  manifest.data.shape = {2};
  manifest.data.dtype = DType::i64;
  manifest.data.classes = 2;
  manifest.data.below = 5;
  manifest.graphs = {step};
  manifest.evaluate = "step";
  manifest.draws = "length";
  Phase phase;
  phase.graph = "step";
  phase.shorter = {{1, "step"}};
  manifest.phases = {phase};
  const auto data = local(manifest);
  RoundInputs feeds(manifest, 7, *data, {}, nullptr);
  Tensors found;
  CHECK_THROWS_WITH_AS(feeds.give_batches(step, step, 0, found), doctest::Contains("'batch.0.x' reads a batch of no rows"), BundleError);
}

TEST_CASE("a record takes no more rows than it is given") {
  const std::string path = (std::filesystem::temp_directory_path() / ("edgefl-record-" + std::to_string(getpid()) + ".bin")).string();
  const auto record = ActivationRecord::create(path, {8, 3}, DType::f32, "tag");
  CHECK_NOTHROW(record->write(0, Tensor(DType::f32, {4, 3}), 4));
  CHECK_THROWS_WITH_AS(record->write(4, Tensor(DType::f32, {1, 3}), 4), doctest::Contains("gives (1, 3) where 4 rows are wanted"), BundleError);
  record->remove();
}
