// Bytes of somebody else's: whatever they are, they are read or refused.
#include <doctest/doctest.h>
#include <random>

#include "golden.h"
#include "wire/bytes/patches.h"
#include "wire/bytes/safetensors.h"
#include "wire/bytes/zstd.h"
#include "wire/errors.h"
#include "wire/manifest.h"
#include "wire/mqtt/envelope.h"
#include "wire/packing.h"

using namespace edgefl;

namespace {

constexpr int kRounds = 3000;

std::string mutated(std::string data, const std::string& other, std::mt19937& random) {
  const auto place = [&](size_t size) { return std::uniform_int_distribution<size_t>(0, size)(random); };
  for (size_t count = place(3) + 1; count > 0 && !data.empty(); --count) {
    const size_t at = place(data.size() - 1);
    switch (place(4)) {
      case 0: data[at] = static_cast<char>(place(255)); break;
      case 1: data[at] = static_cast<char>(data[at] ^ (1 << place(7))); break;
      case 2: data.erase(at, place(8)); break;
      case 3: data.insert(at, other.substr(place(other.size()), place(16))); break;
      default: data.replace(at, std::min<size_t>(8, data.size() - at), std::string(std::min<size_t>(8, data.size() - at), place(1) ? '\xff' : '\0'));
    }
  }
  return data;
}

// How many were taken: all others are refused as what somebody else wrote wrongly, and as nothing else.
int taken(const std::vector<std::string>& names, const std::function<void(const std::string&)>& read) {
  std::mt19937 random(7);
  int count = 0;
  for (const std::string& name : names) {
    const std::string data = golden(name);
    CHECK_NOTHROW_MESSAGE(read(data), name);
    for (int i = 0; i < kRounds; ++i) {
      const std::string wrong = mutated(data, golden(names[static_cast<size_t>(i) % names.size()]), random);
      try {
        read(wrong);
        ++count;
      } catch (const ProtocolError&) {
      } catch (const Error& error) {
        CHECK_MESSAGE(std::string(error.what()).find("larger than any memory") != std::string::npos, error.what());
      }
    }
  }
  return count;
}

}  // namespace

TEST_CASE("messages") {
  CHECK(taken({"round_open.bin", "round_live.bin", "round_paged.bin", "round_with_mirrors.bin"}, [](const std::string& data) { decode<Round>(data); }) > 0);
  CHECK(taken({"task.bin", "task_with_unknown_field.bin"}, [](const std::string& data) { decode<Task>(data); }) > 0);
  CHECK(taken({"ack_missing.bin", "ack_rejected.bin"}, [](const std::string& data) { decode<Ack>(data); }) > 0);
  CHECK(taken({"signed_task.bin"}, [](const std::string& data) { unwrap(data, "Task"); }) > 0);
  const Round paged = decode<Round>(golden("round_paged.bin"));
  CHECK(taken({"round_page.bin"}, [&](const std::string& data) { (void)paged.whole(data); }) > 0);
}

TEST_CASE("manifests, and what a device asks of them") {
  CHECK(taken({"manifest.bin", "manifest_of_exchanges.bin", "manifest_executorch.bin", "manifest_of_texts.bin", "manifest_held_out.bin"}, [](const std::string& data) {
          const Manifest manifest = decode_manifest(data);
          (void)manifest.of_round();
          (void)manifest.steps_with(17);
          for (const BlobRef& ref : manifest.blobs()) {
            try {
              ref.check(1 << 30);
              (void)ref.accepts(0, "x");
            } catch (const BundleError&) {
            }
          }
        }) > 0);
}

TEST_CASE("tensors, masks, patches and frames") {
  CHECK(taken({"tensors.bin", "tensors_masked.bin", "patch_old.bin"}, [](const std::string& data) { load_tensors(data, 1 << 20); }) > 0);
  const Tensors weights = load_tensors(golden("patch_old.bin"));
  CHECK(taken({"patch.bin"}, [&](const std::string& data) { patched(weights, data); }) > 0);
  const std::string described = golden("blobref_zstd.bin");
  const BlobRef ref = read_ref(Packed(described).root(), "ref");
  CHECK(taken({"zstd_frame.bin"}, [&](const std::string& data) { unpacked(ref, data, 1 << 20); }) >= 0);
}
