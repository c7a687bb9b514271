#include "data/split.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <numeric>
#include <string>
#include <variant>
#include <vector>

#include "data/fitted.h"
#include "data/readers/files.h"
#include "wire/digest.h"

namespace edgefl {
namespace {

constexpr int64_t kBlock = 256;  // rows that are hashed together

void add_row(Sha256& hash, const Tensor& rows, int64_t row) {
  const size_t bytes = rows.nbytes() / static_cast<size_t>(rows.shape.front());
  hash.add({reinterpret_cast<const char*>(rows.data.data()) + static_cast<size_t>(row) * bytes, bytes});
}

std::vector<bool> held_out_rows(const FittedData& data, const DataSpec& spec, const Split& split) {
  const auto most = static_cast<uint64_t>(std::ldexp(split.share, 64));
  std::vector<bool> flags(static_cast<size_t>(data.size()));
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
      flags[static_cast<size_t>(block[place])] = drawn < most;
    }
  }
  return flags;
}

// What the division depends on: the data, how they become samples, and the split.
std::string division_key(const DataSource& source, const Manifest& manifest) {
  const Split& split = *manifest.split;
  std::array<char, sizeof split.share> share{};
  std::memcpy(share.data(), &split.share, share.size());
  const auto* sound = std::get_if<SoundSpec>(&manifest.data.reader);
  const bool features = sound != nullptr && !sound->features.empty();
  return source.state() + " " + key_of(manifest.data, LabelSpec::of(manifest)) + (features ? manifest.graph(sound->features).blob.sha256 : "") + " " +
         std::to_string(split.seed) + " " + std::string(share.data(), share.size());
}

}  // namespace

std::shared_ptr<FittedData> fit_rows(const DataSource& source, const Manifest& manifest, const DataParts& parts) {
  // The key before the rows are read, so that the next round notices a change in between.
  const std::string key = manifest.split ? division_key(source, manifest) : "";
  const std::shared_ptr<FittedData> data = source.fitted(manifest, parts);
  if (!manifest.split) return data;
  HeldOutRows& known = source.held_out;
  if (known.key != key || known.flags.size() != static_cast<size_t>(data->size())) {
    known.flags = held_out_rows(*data, manifest.data, *manifest.split);
    known.key = key;
  }
  Indices at;
  for (int64_t row = 0; row < data->size(); ++row)
    if (known.flags[static_cast<size_t>(row)] == manifest.split->held_out) at.push_back(row);
  if (at.empty())
    throw DataError(source.name() + ": none of its " + std::to_string(data->size()) + " rows is in the " +
                    (manifest.split->held_out ? "held-out" : "train") + " part: it needs more rows");
  return data->chosen(at);
}

}  // namespace edgefl
