// Blobs, tensors, masks, patches and manifests.
#include <cmath>
#include <doctest/doctest.h>

#include "golden.h"
#include "wire/errors.h"
#include "wire/manifest.h"
#include "wire/packing.h"
#include "wire/bytes/patches.h"
#include "wire/printable.h"
#include "wire/bytes/safetensors.h"
#include "wire/bytes/zstd.h"

using namespace edgefl;

namespace {

BlobRef ref(const std::string& name) {
  const std::string data = golden(name);
  return read_ref(Packed(data).root(), name);
}

}  // namespace

TEST_CASE("blob references in both directions") {
  for (const char* name : {"blobref_one_chunk.bin", "blobref_three_chunks.bin", "blobref_empty.bin", "blobref_zstd.bin"}) {
    CHECK_NOTHROW(ref(name).check(1 << 20));
    CHECK(packed_ref(ref(name)) == golden(name));
  }
  const BlobRef three = ref("blobref_three_chunks.bin");
  CHECK(three.count() == 3);
  CHECK(three.accepts(2, "\x08\x09"));
  CHECK_FALSE(three.accepts(1, "\x08\x09"));
  CHECK_FALSE(three.accepts(3, ""));
  CHECK(ref("blobref_one_chunk.bin").accepts(0, "edgefl"));
  CHECK_THROWS_AS(three.check(9), BundleError);
  BlobRef wrong = three;
  wrong.digests.pop_back();
  CHECK_THROWS_AS(wrong.check(1 << 20), BundleError);
  wrong = ref("blobref_one_chunk.bin");
  wrong.chunk = 1 << 30;
  CHECK_THROWS_AS(wrong.check(1 << 20), BundleError);
}

TEST_CASE("a zstd frame unfolds to what its reference says, and to nothing else") {
  std::string expected;
  for (int i = 0; i < 125; ++i) expected += "edgefl, ";
  const BlobRef zstd = ref("blobref_zstd.bin");
  CHECK(unpacked(zstd, golden("zstd_frame.bin"), 1 << 20) == expected);
  BlobRef wrong = zstd;
  wrong.raw = 999;
  CHECK_THROWS_AS(unpacked(wrong, golden("zstd_frame.bin"), 1 << 20), BundleError);
  CHECK_THROWS_AS(unpacked(zstd, golden("zstd_frame.bin") + "x", 1 << 20), BundleError);
  const std::string cut = golden("zstd_frame.bin");
  CHECK_THROWS_AS(unpacked(zstd, cut.substr(0, cut.size() - 3), 1 << 20), BundleError);
  CHECK_THROWS_AS(unpacked(zstd, golden("zstd_frame.bin"), 500), BundleError);
}

TEST_CASE("tensors in both directions, byte by byte") {
  const Tensors tensors = load_tensors(golden("tensors.bin"));
  CHECK(tensors.at("count").scalar() == 3.0);
  CHECK(tensors.at("count").shape.empty());
  CHECK(tensors.at("empty").shape == Shape{0, 2});
  CHECK(tensors.at("head.weight").as<float>()[5] == 1.25f);
  CHECK(dump_tensors(tensors) == golden("tensors.bin"));
}

TEST_CASE("a tensor of more bytes than there can be is refused, however its size would wrap") {
  for (const Shape& shape : {Shape{(int64_t{1} << 61) + 1}, Shape{int64_t{1} << 31, int64_t{1} << 31}, Shape{int64_t{1} << 40, int64_t{1} << 40}, Shape{-1}})
    CHECK_THROWS_WITH_AS(Tensor(DType::i64, shape), doctest::Contains("larger than any memory"), Error);
  CHECK(Tensor(DType::i64, {int64_t{1} << 61, 0}).nbytes() == 0);
}

TEST_CASE("types are written in the order of the library") {
  Tensors tensors;
  char name = 'a';
  for (const char* type : {"bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float16", "float32", "float64"})
    tensors[std::string(1, name++)] = Tensor(dtype_of(type), {2});
  const std::string header = dump_tensors(tensors).substr(8);
  std::string order;
  for (size_t at = header.find("\":{"); at != std::string::npos; at = header.find("\":{", at + 1)) order += header[at - 1];
  CHECK(order == "ielkhdjgcbfa");
}

TEST_CASE("masks travel in the smaller form") {
  const Tensors tensors = load_tensors(golden("tensors_masked.bin"));
  CHECK(tensors.at("sparse").shape == Shape{125});
  CHECK(tensors.at("none").shape == Shape{2});
  CHECK(dump_tensors(tensors, {{"sparse", 1000}, {"even", 20}, {"none", 12}}) == golden("tensors_masked.bin"));
  CHECK_THROWS_AS(load_tensors(golden("tensors_masked.bin"), 999), ProtocolError);
}

TEST_CASE("gaps of the protocol's example, and gaps that lead nowhere") {
  const std::string gaps("\x03\xf0\x03\xf2\x03", 5);
  const Tensor mask = mask_from_gaps(gaps, 1000);
  CHECK(mask_to_gaps(mask, 1000) == gaps);
  CHECK(std::to_integer<int>(mask.data[0]) == 8);
  CHECK_THROWS_AS(mask_from_gaps(gaps, 999), ProtocolError);
  CHECK_THROWS_AS(mask_from_gaps("\x80", 1000), ProtocolError);
  CHECK_THROWS_AS(mask_from_gaps(std::string(10, '\x80') + "\x01", 1000), ProtocolError);
  CHECK_THROWS_AS(mask_from_gaps("\xff\xff\xff\xff\xff\xff\xff\xff\x7f", 1000), ProtocolError);
}

TEST_CASE("bytes that are no tensors") {
  const std::string good = golden("tensors.bin");
  CHECK_THROWS_AS(load_tensors(""), ProtocolError);
  CHECK_THROWS_AS(load_tensors(good.substr(0, good.size() - 1)), ProtocolError);
  CHECK_THROWS_AS(load_tensors(good + "x"), ProtocolError);
  const auto with = [](const std::string& header) {
    std::string data(8, '\0');
    data[0] = static_cast<char>(header.size());
    return data + header + std::string(4, '\0');
  };
  const std::string one = R"("a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]})";
  CHECK(load_tensors(with("{" + one + "}")).size() == 1);
  CHECK_THROWS_AS(load_tensors(with("{" + one + "," + one + "}")), ProtocolError);
  CHECK_THROWS_AS(load_tensors(with(R"({"a~b":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}})")), ProtocolError);
  CHECK_THROWS_AS(load_tensors(with(R"({"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}})")), ProtocolError);
  CHECK_THROWS_AS(load_tensors(with(R"({"a":{"dtype":"F32","shape":[9223372036854775807,2],"data_offsets":[0,4]}})")), ProtocolError);
}

TEST_CASE("a patch leads to the same bits") {
  const Tensors after = patched(load_tensors(golden("patch_old.bin")), golden("patch.bin"));
  CHECK(after == load_tensors(golden("patch_new.bin")));
  Tensors other = load_tensors(golden("patch_old.bin"));
  other.erase("head.bias");
  CHECK_THROWS_AS(patched(other, golden("patch.bin")), BundleError);
}

TEST_CASE("manifests") {
  const Manifest small = decode_manifest(golden("manifest.bin"));
  CHECK(small.model == "tiny");
  CHECK(small.graph(small.start).name == small.start);
  CHECK(decode_manifest(golden("manifest_with_unknown_fields.bin")).graphs.size() == small.graphs.size());
  CHECK(decode_manifest(golden("manifest_of_exchanges.bin")).suffix.size() == 2);
  const Manifest phones = decode_manifest(golden("manifest_executorch.bin"));
  CHECK(phones.format() == "executorch");
  CHECK(phones.graphs[1].planned_bytes == int64_t{70} << 20);
  const Manifest texts = decode_manifest(golden("manifest_of_texts.bin"));
  CHECK(texts.data.names == std::vector<std::string>{"bad", "good"});
  CHECK(std::get<TextSpec>(texts.data.reader).tokenizer.has_value());
  const Manifest divided = decode_manifest(golden("manifest_held_out.bin"));
  REQUIRE(divided.split.has_value());
  CHECK(divided.split->share == 0.3);
  CHECK(divided.split->seed == (uint64_t{1} << 62) + 1);
  CHECK(divided.split->held_out);
  CHECK_FALSE(small.split.has_value());
  CHECK_THROWS_WITH_AS(decode_manifest(golden("manifest_of_version_2.bin")),
                       "the manifest has version 2, this runtime reads 1, 3, 4 and 5: install a matching edgefl", BundleError);
  CHECK_THROWS_AS(small.graph("nowhere"), BundleError);
}

TEST_CASE("what the other side says fits a line") {
  CHECK(printable("a\x1b[31mb\xe2\x80\xaa\xff") == "a [31mb  ");
  CHECK(printable("\xc3\xa4\xe2\x82\xac") == "\xc3\xa4\xe2\x82\xac");
  CHECK(parse_size("64MiB", "--memory") == 64 << 20);
  CHECK(parse_size("1.5 GB", "--memory") == 1500000000);
  CHECK(parse_size("64m", "--memory") == 64 << 20);
  CHECK_THROWS_AS(parse_size("64", "--memory"), ConfigError);
  CHECK_THROWS_AS(parse_size("64XB", "--memory"), ConfigError);
}
