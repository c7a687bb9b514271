#include "offline.h"

#include <cstdio>
#include <fstream>

#include <nlohmann/json.hpp>

#include "wire/digest.h"
#include "wire/bytes/safetensors.h"
#include "wire/bytes/zstd.h"

namespace edgefl {
namespace {

using nlohmann::json;

constexpr uint64_t kMostManifest = 64 << 20;
constexpr int64_t kMostBlob = int64_t{1} << 30;

Bytes entry(const Zip& zip, const std::string& name, uint64_t most) {
  const auto found = zip.entries().find(name);
  if (found == zip.entries().end()) throw BundleError("the bundle has no " + name + ": export or fetch it again");
  return zip.read(found->second, most);
}

bool starts_with(const std::string& text, const std::string& with) { return text.compare(0, with.size(), with) == 0; }

}  // namespace

BundleFile::BundleFile(const std::string& path)
    : file_(path), zip_(file_.text(), path), manifest_(decode_manifest(entry(zip_, "manifest.msgpack", kMostManifest))) {}

Bytes BundleFile::artifact(const BlobRef& ref) const {
  Bytes data = entry(zip_, "blobs/" + ref.sha256, static_cast<uint64_t>(ref.size));
  if (sha256_hex(data) != ref.sha256) throw BundleError("blob " + ref.sha256 + " is damaged: its digest differs; fetch it again");
  return unpacked(ref, std::move(data), kMostBlob);
}

WeightsFile::WeightsFile(const std::string& path, const Manifest& manifest) : file_(path) {
  std::vector<std::string> units = manifest.suffix;
  for (const Chunk& chunk : manifest.prefix) units.insert(units.end(), chunk.units.begin(), chunk.units.end());
  for (const auto& [name, tensor] : load_tensors(file_.text())) {
    for (const std::string& unit : units) {
      if (starts_with(name, unit + ".")) return;
    }
  }
  whole_unit_ = manifest.suffix.front();
}

Tensors WeightsFile::of(const std::vector<std::string>& units) const {
  Tensors found;
  for (auto& [name, tensor] : load_tensors(file_.text())) {
    for (const std::string& unit : units) {
      if (unit == whole_unit_ || starts_with(name, unit + ".")) found[name] = std::move(tensor);
    }
  }
  file_.released();
  return found;
}

std::optional<KeptCheckpoint> CheckpointFolder::kept() const {
  std::ifstream head(folder_ + "/checkpoint.json");
  if (!head) return std::nullopt;
  const json facts = json::parse(head);
  KeptCheckpoint kept{facts["step"], facts["sums"], facts["basis"], facts["names"], nullptr};
  const std::string path = folder_ + "/" + facts["file"].get<std::string>();
  kept.tensor = [path](const std::string& name) {
    const MappedFile file(path);
    return load_tensors(file.text()).at(name);
  };
  return kept;
}

void CheckpointFolder::save(int64_t step, const std::map<std::string, double>& sums, const std::string& basis,
                            const std::vector<std::string>& names,
                            const std::function<Tensor(const std::string&)>& tensor) const {
  Tensors tensors;
  for (const std::string& name : names) tensors[name] = tensor(name);
  const std::string file = "checkpoint-" + std::to_string(step) + ".safetensors", head = folder_ + "/checkpoint.json";
  write_file(folder_ + "/" + file, dump_tensors(tensors));
  write_file(head + ".new", json{{"step", step}, {"sums", sums}, {"basis", basis}, {"names", names}, {"file", file}}.dump());
  if (std::rename((head + ".new").c_str(), head.c_str()) != 0) throw StoreError("the checkpoint in " + folder_ + " cannot be written");
}

void write_file(const std::string& path, const Bytes& data) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(data.data(), static_cast<std::streamsize>(data.size()));
  file.close();
  if (!file) throw StoreError(path + " cannot be written: name a file in a folder that can be");
}

}  // namespace edgefl
