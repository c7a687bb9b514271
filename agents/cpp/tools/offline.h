// A bundle and weights from files as a round's blobs, and a checkpoint in a folder.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>

#include "data/files/mapped_file.h"
#include "data/files/zip.h"
#include "round/runner.h"
#include "wire/manifest.h"

namespace edgefl {

class BundleFile {
 public:
  explicit BundleFile(const std::string& path);  // BundleError or DataError for what is no whole bundle
  const Manifest& manifest() const { return manifest_; }
  Bytes artifact(const BlobRef& ref) const;      // checked and unfolded

 private:
  MappedFile file_;
  Zip zip_;
  Manifest manifest_;
};

// Weights of a model, by global names, or those that a server cuts out for a tier, which are all in its first unit.
class WeightsFile {
 public:
  WeightsFile(const std::string& path, const Manifest& manifest);
  Tensors of(const std::vector<std::string>& units) const;

 private:
  MappedFile file_;
  std::string whole_unit_;  // the one that holds all of them; "" where they are named after their units
};

// One checkpoint, kept whole or not at all.
class CheckpointFolder {
 public:
  explicit CheckpointFolder(std::string folder) : folder_(std::move(folder)) {}
  std::optional<KeptCheckpoint> kept() const;
  void save(int64_t step, const std::map<std::string, double>& sums, const std::string& basis,
            const std::vector<std::string>& names, const std::function<Tensor(const std::string&)>& tensor) const;

 private:
  std::string folder_;
};

void write_file(const std::string& path, const Bytes& data);

}  // namespace edgefl
