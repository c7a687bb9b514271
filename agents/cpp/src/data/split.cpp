#include "data/split.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "wire/digest.h"

namespace edgefl {
namespace {

constexpr int64_t kBlock = 256;  // rows that are hashed together

void add_row(Sha256& hash, const Tensor& rows, int64_t row) {
  const size_t bytes = rows.nbytes() / static_cast<size_t>(rows.shape.front());
  hash.add({reinterpret_cast<const char*>(rows.data.data()) + static_cast<size_t>(row) * bytes, bytes});
}

// Numbers of the rows in the split's part.
Indices rows_of_part(const FittedData& data, const DataSpec& spec, const Split& split) {
  const auto most = static_cast<uint64_t>(std::ldexp(split.share, 64));
  Indices chosen;
  for (int64_t first = 0; first < data.size(); first += kBlock) {
    Indices block(static_cast<size_t>(std::min(kBlock, data.size() - first)));
    std::iota(block.begin(), block.end(), first);
    std::vector<Tensor> parts;
    parts.push_back(data.rows(block));
    for (const Input& input : spec.others) parts.push_back(data.other(input.name, block));
    for (size_t place = 0; place < block.size(); ++place) {
      Sha256 hash;
      hash.add({reinterpret_cast<const char*>(&split.seed), sizeof split.seed});
      for (const Tensor& part : parts) add_row(hash, part, static_cast<int64_t>(place));
      const Bytes digest = hash.done();
      uint64_t drawn = 0;
      std::memcpy(&drawn, digest.data(), sizeof drawn);
      if ((drawn < most) == split.held_out) chosen.push_back(block[place]);
    }
  }
  return chosen;
}

}  // namespace

std::shared_ptr<FittedData> fit_rows(const DataSource& source, const Manifest& manifest, const DataParts& parts) {
  const std::shared_ptr<FittedData> data = source.fitted(manifest, parts);
  if (!manifest.split) return data;
  const Indices at = rows_of_part(*data, manifest.data, *manifest.split);
  if (at.empty())
    throw DataError(source.name() + ": none of its " + std::to_string(data->size()) + " rows is in the " +
                    (manifest.split->held_out ? "held-out" : "train") + " part: it needs more rows");
  return data->chosen(at);
}

}  // namespace edgefl
