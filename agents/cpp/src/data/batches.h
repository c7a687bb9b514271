// Which rows a step reads, and its noise: pure functions of (seed, stream, step), so that a round can be taken up anywhere.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "data/source.h"
#include "wire/tensor.h"

namespace edgefl {

// Mini-batches of a round, `batch` rows each; drawn with replacement where there are fewer samples.
class Batches {
 public:
  // `draws`: "walk", "draw" or "length". `buckets`, of "length": which of the lengths that there are graphs for each
  // sample needs; empty: they are all alike.
  Batches(uint64_t seed, int64_t samples, int64_t batch, std::string draws, const std::vector<int64_t>& buckets = {})
      : seed_(seed), samples_(samples), batch_(batch), draws_(std::move(draws)), buckets_(&buckets) {}

  Indices rows(int64_t stream, int64_t step);

 private:
  const Indices& order(int64_t stream);
  bool by_length() const { return draws_ == "length" && !buckets_->empty(); }

  uint64_t seed_;
  int64_t samples_, batch_;
  std::string draws_;
  const std::vector<int64_t>* buckets_;  // somebody else's, that outlives this
  std::map<int64_t, Indices> orders_;    // what is shuffled once is kept
};

// One pass over the data in their order; the last batch is filled from the first rows.
Indices pass_rows(int64_t samples, int64_t batch, int64_t step);
Tensor pass_mask(int64_t samples, int64_t batch, int64_t step);  // float32 (batch): 0 where a row only fills the batch

// Uniform [0, 1) for noise port number `port` of a step.
Tensor noise(uint64_t seed, int64_t step, int64_t port, const Shape& shape, DType dtype);

}  // namespace edgefl
