#include "offline.h"

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <set>

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

void write_head(const std::string& path, const json& facts) {
  write_file(path + ".new", facts.dump());
  if (std::rename((path + ".new").c_str(), path.c_str()) != 0) throw StoreError(path + " cannot be written: name another --folder");
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

std::string BundleFile::digest() const { return sha256_hex(file_.text()); }

std::string BundleFile::name() const { return manifest_.model + ", " + manifest_.program + ", tier " + manifest_.tier; }

WeightsFile::WeightsFile(const std::string& path, const Manifest& manifest) : file_(path) {
  std::vector<std::string> units = manifest.suffix;
  for (const FrozenChunk& chunk : manifest.prefix) units.insert(units.end(), chunk.units.begin(), chunk.units.end());
  for (const auto& [name, tensor] : load_tensors(file_.text())) {
    for (const std::string& unit : units) {
      if (starts_with(name, unit + ".")) return;
    }
  }
  if (!manifest.suffix.empty()) whole_unit_ = manifest.suffix.front();
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

std::string digest_of(const std::vector<std::string>& texts, const std::vector<std::string>& paths) {
  namespace fs = std::filesystem;
  std::string facts;
  const auto add = [&facts](const std::string& text) { facts += std::to_string(text.size()) + " " + text; };
  const auto add_file = [&](const fs::path& path) {
    add(path.string());
    add(std::to_string(fs::file_size(path)) + " " + std::to_string(fs::last_write_time(path).time_since_epoch().count()));
  };
  for (const std::string& text : texts) add(text);
  for (const std::string& path : paths) {
    if (fs::is_regular_file(path)) add_file(path);
    if (!fs::is_directory(path)) continue;
    std::set<fs::path> files;
    for (const auto& each : fs::recursive_directory_iterator(path)) {
      if (each.is_regular_file()) files.insert(each.path());
    }
    for (const fs::path& each : files) add_file(each);
  }
  return sha256_hex(facts);
}

CheckpointFolder::CheckpointFolder(std::string folder, RoundIdentity round) : folder_(std::move(folder)), round_(std::move(round)) {
  std::ifstream head(file());
  if (!head) return;
  const std::string remedy = ": name another --folder, or remove it to begin anew";
  try {
    const json facts = json::parse(head);
    const std::string bundle = facts.at("bundle"), name = facts.at("bundle_name"), inputs = facts.at("inputs");
    const int64_t step = facts.at("step");
    if (bundle != round_.bundle) {
      throw ConfigError(file() + " is of another bundle (" + name + "), expected one of this bundle (" + round_.bundle_name + ")" + remedy);
    }
    usable_ = inputs == round_.inputs;
    const std::string done = facts.value("done", false) ? "this round is done already; " : "";
    about_ = usable_ ? done + "it resumes after step " + std::to_string(step) + ", from " + file()
                     : file() + " is of a round with other weights, data or options: it begins anew";
  } catch (const json::exception&) {
    throw StoreError(file() + " is no checkpoint that can be read" + remedy);
  }
}

std::string CheckpointFolder::about_kept() const { return about_; }

std::optional<KeptCheckpoint> CheckpointFolder::kept() const {
  if (!usable_) return std::nullopt;
  std::ifstream head(file());
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
  const std::string state = "checkpoint-" + std::to_string(step) + ".safetensors";
  write_file(folder_ + "/" + state, dump_tensors(tensors));
  write_head(file(), {{"step", step}, {"sums", sums}, {"basis", basis}, {"names", names}, {"file", state},
                  {"bundle", round_.bundle}, {"bundle_name", round_.bundle_name}, {"inputs", round_.inputs}});
}

void CheckpointFolder::set_done() const {
  std::ifstream head(file());
  if (!head) return;
  json facts = json::parse(head);
  if (facts["inputs"] != round_.inputs) return;
  facts["done"] = true;
  write_head(file(), facts);
}

void write_file(const std::string& path, const Bytes& data) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file.write(data.data(), static_cast<std::streamsize>(data.size()));
  file.close();
  if (!file) throw StoreError(path + " cannot be written: name a file in a folder that can be");
}

}  // namespace edgefl
