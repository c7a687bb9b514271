// A bundle and weights from files as a round's blobs, and a checkpoint in a folder.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "data/files/mapped_file.h"
#include "data/files/zip.h"
#include "round/trainer.h"
#include "wire/manifest.h"

namespace edgefl {

class BundleFile {
 public:
  explicit BundleFile(const std::string& path);  // BundleError or DataError for what is no whole bundle
  const Manifest& manifest() const { return manifest_; }
  Bytes artifact(const BlobRef& ref) const;      // checked and unfolded
  std::string digest() const;                    // of the whole file
  std::string name() const;                      // model, program and tier, for people

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

// What a round computes depends on: a checkpoint of another one is of no use to it.
struct RoundIdentity {
  std::string bundle, bundle_name;  // digest of its file, and what people call it
  std::string inputs;               // digest of weights, carry, data and options
};

// Digest of `texts`, and of the names, sizes and times of all files at each of `paths`.
std::string digest_of(const std::vector<std::string>& texts, const std::vector<std::string>& paths);

// One checkpoint, kept whole or not at all.
class CheckpointFolder {
 public:
  // ConfigError if there is a checkpoint of another bundle in `folder`, StoreError if it cannot be read. One of another
  // round of the bundle is passed over.
  CheckpointFolder(std::string folder, RoundIdentity round);
  std::optional<KeptCheckpoint> kept() const;
  void save(int64_t step, const std::map<std::string, double>& sums, const std::string& basis,
            const std::vector<std::string>& names, const std::function<Tensor(const std::string&)>& tensor) const;
  void set_done() const;             // the round has ended with its result
  std::string about_kept() const;    // what people are told of the checkpoint found, "" if there was none

 private:
  std::string file() const { return folder_ + "/checkpoint.json"; }

  std::string folder_;
  RoundIdentity round_;
  bool usable_ = false;  // the checkpoint found is of this round
  std::string about_;
};

void write_file(const std::string& path, const Bytes& data);

}  // namespace edgefl
