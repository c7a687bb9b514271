#include "data/batches.h"

#include <algorithm>

#include "data/convert.h"
#include "data/random.h"

namespace edgefl {
namespace {

constexpr uint64_t kOrderOfBatches = uint64_t{1} << 21, kNoise = uint64_t{1} << 20;

}  // namespace

Indices Batches::rows(int64_t stream, int64_t step) {
  const uint64_t of_stream = static_cast<uint64_t>(stream), of_step = static_cast<uint64_t>(step);
  if (samples_ < batch_) return Random({seed_, of_stream, of_step}).integers(samples_, batch_);
  if (draws_ == "draw") return Random({seed_, of_stream, of_step}).without_replacement(samples_, batch_);
  int64_t place = step;
  if (by_length()) {
    const int64_t count = (samples_ + batch_ - 1) / batch_;
    place = Random({seed_, of_stream, kOrderOfBatches}).permutation(count)[static_cast<size_t>(step % count)];
  }
  const Indices& walk = order(stream);
  Indices found(static_cast<size_t>(batch_));
  for (int64_t at = 0; at < batch_; ++at) {
    found[static_cast<size_t>(at)] = walk[static_cast<size_t>((place * batch_ + at) % samples_)];
  }
  return found;
}

const Indices& Batches::order(int64_t stream) {
  auto [entry, is_new] = orders_.try_emplace(stream);
  if (is_new) {
    entry->second = Random({seed_, static_cast<uint64_t>(stream)}).permutation(samples_);
    if (by_length()) {
      std::stable_sort(entry->second.begin(), entry->second.end(), [this](int64_t one, int64_t other) {
        return (*buckets_)[static_cast<size_t>(one)] < (*buckets_)[static_cast<size_t>(other)];
      });
    }
  }
  return entry->second;
}

Indices pass_rows(int64_t samples, int64_t batch, int64_t step) {
  Indices found(static_cast<size_t>(batch));
  for (int64_t at = 0; at < batch; ++at) found[static_cast<size_t>(at)] = (step * batch + at) % samples;
  return found;
}

Tensor pass_mask(int64_t samples, int64_t batch, int64_t step) {
  Tensor mask(DType::f32, {batch});
  for (int64_t at = 0; at < batch; ++at) mask.as<float>()[at] = step * batch + at < samples ? 1.0F : 0.0F;
  return mask;
}

Tensor noise(uint64_t seed, int64_t step, int64_t port, const Shape& shape, DType dtype) {
  Random random({seed, kNoise, static_cast<uint64_t>(step), static_cast<uint64_t>(port)});
  Tensor drawn(DType::f32, shape);
  float* values = drawn.as<float>();
  for (int64_t at = 0, count = drawn.count(); at < count; ++at) values[at] = random.uniform();
  return converted(std::move(drawn), dtype);
}

}  // namespace edgefl
