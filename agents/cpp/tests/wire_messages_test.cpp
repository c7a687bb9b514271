// Messages in both directions, byte by byte.
#include <cmath>
#include <doctest/doctest.h>
#include <fstream>
#include <unistd.h>

#include "golden.h"
#include "wire/digest.h"
#include "wire/mqtt/envelope.h"
#include "wire/errors.h"
#include "wire/mqtt/keys.h"
#include "wire/mqtt/messages.h"
#include "wire/releases.h"

using namespace edgefl;

namespace {

const std::string kVersion(64, 'x');

std::string repeated(const std::string& text, int count) {
  std::string whole;
  for (int i = 0; i < count; ++i) whole += text;
  return whole;
}

Bytes counted(int from, int to) {
  Bytes bytes;
  for (int i = from; i < to; ++i) bytes += static_cast<char>(i);
  return bytes;
}

struct KeyFile {
  std::string path = "/tmp/edgefl-test-key-" + std::to_string(getpid());
  KeyFile() { std::ofstream(path) << hex(counted(0, 32)) << "\n"; }
  ~KeyFile() { std::remove(path.c_str()); }
};

UpdateChunk example_chunk() {
  static const std::string data("\x00\x01\xfe\xff", 4);
  return {"0011aabb", repeated("ab", 32), 1, 3, 2500, data};
}

Hello example_hello() {
  Hello hello;
  hello.agent = "edgefl/0.1.0";
  hello.memory_bytes = 4294967296;
  hello.cores = 4;
  hello.samples = 600;
  hello.engines = {{"onnxruntime", "1.22.0"}};
  hello.tier = "weak";
  hello.token = "0123456789abcdef";
  const Token token{hello.token, counted(32, 64), ""};
  hello.proof = token.proof(Topics("demo", "phone-7").hello(), counted(0, 32));
  return hello;
}

}  // namespace

TEST_CASE("what a device says is written as the vectors have it") {
  CHECK(encode(Status{true}) == golden("status_online.bin"));
  CHECK(encode(Status{false}) == golden("status_offline.bin"));
  CHECK(encode(example_hello()) == golden("hello.bin"));
  CHECK(encode(Progress{3, "weak", "train", 4, 10, 1.25, 17.5, 73400320, 65536, 0}) == golden("progress.bin"));
  CHECK(encode(example_chunk()) == golden("update_chunk.bin"));
  CHECK(encode(Decline{3, "0011aabb", "no-carry", "it kept nothing of round 1"}) == golden("decline.bin"));
  CHECK(hex(encode(decode_update(golden("update.bin")))) == hex(golden("update.bin")));
}

TEST_CASE("a task, also with fields that were added later") {
  for (const char* name : {"task.bin", "task_with_unknown_field.bin"}) {
    const Task task = decode<Task>(golden(name));
    CHECK(task.run == "run-7");
    CHECK(task.round == 3);
    CHECK(task.seed == (int64_t{1} << 62) + 1);
    CHECK(task.nonce == "0011aabb");
    CHECK(task.samples == 128);
    CHECK(task.shard == kNoShard);
  }
  CHECK_THROWS_WITH_AS(decode<Task>(golden("task_of_version_2.bin")),
                       "Task has protocol version 2, this side speaks 1: install the edgefl release that the other side runs", ProtocolError);
}

TEST_CASE("a field of another type is refused by name") {
  std::string data = golden("task.bin");
  data[data.find("\xa5round\x03") + 6] = static_cast<char>(0xc0);
  CHECK_THROWS_WITH_AS(decode<Task>(data), "Task message is malformed: Task.round should be int, found nil", ProtocolError);
}

TEST_CASE("acknowledgements") {
  CHECK(decode<Ack>(golden("ack_missing.bin")).missing == std::vector<int64_t>{0, 2, 300});
  CHECK(decode<Ack>(golden("ack_accepted.bin")).status == "accepted");
  CHECK(decode<Ack>(golden("ack_rejected.bin")).reason == "closed-round");
}

TEST_CASE("announcements, whole and in pages") {
  const Round open = decode<Round>(golden("round_open.bin"));
  CHECK(open.is_open());
  CHECK(open.offers.at("onnx").signatures.at("weak") == counted(0, 64));
  CHECK(open.formats_of("weak") == std::vector<std::string>{"executorch", "onnx"});
  CHECK(open.units.at("tail").size() == 2);
  CHECK(open.units.at("tail")[1].codec == "zstd");
  CHECK(decode<Round>(golden("round_with_mirrors.bin")).mirrors.size() == 2);

  const Round live = decode<Round>(golden("round_live.bin"));
  CHECK(live.takes() == std::vector<int64_t>{3, 5});
  CHECK(live.live.at(3).hyper.at("lr") == 0.1);

  const Round paged = decode<Round>(golden("round_paged.bin"));
  const std::string page = golden("round_page.bin");
  REQUIRE(paged.pages.has_value());
  CHECK(paged.pages->accepts(0, page));
  const Round whole = paged.whole(page);
  CHECK(whole.units.count("stem") == 1);
  CHECK(whole.offers.at("onnx").bundles.count("weak") == 1);
}

TEST_CASE("signed messages, byte by byte") {
  const KeyFile file;
  MessageSigner speaker(file.path, 0, [](int64_t) {}, 0);
  const Topics topics("demo", "phone-7");
  const int64_t at = int64_t{1} << 40;
  CHECK(hex(speaker.public_key()) == "03a107bff3ce10be1d70dd18e74bc09967e4d6309ba50d5f1ddc8664125531b8");
  CHECK(speaker.seal(topics.hello(), example_hello(), at) == golden("signed_hello.bin"));
  CHECK(speaker.seal(topics.update(3, 1, kNoShard), example_chunk(), at) == golden("signed_update_chunk.bin"));
  CHECK(client_id(speaker.client_secret(), "device", "demo", "phone-7", false) == "EXpwWIbPnCIdJvXTsMebJKC");

  const auto envelope = unwrap(golden("signed_task.bin"), Task::kName);
  REQUIRE(envelope.has_value());
  CHECK(envelope->at == at);
  CHECK_NOTHROW(check_signature(*envelope, Task::kContext, Task::kName, topics.tasks()));
  CHECK(decode<Task>(envelope->body).nonce == "0011aabb");
  CHECK_THROWS_AS(check_signature(*envelope, Task::kContext, Task::kName, Topics("demo", "phone-8").tasks()), IdentityError);
  CHECK_THROWS_AS(check_signature(*envelope, Ack::kContext, Task::kName, topics.tasks()), IdentityError);
  CHECK_FALSE(unwrap(golden("task.bin"), Task::kName).has_value());
}

TEST_CASE("topics") {
  const Topics topics("demo", "phone-7");
  const std::string all = golden("topics.bin");
  const std::string digest = all.substr(all.find("/blobs/") + 7, 64);
  for (const std::string& topic : {topics.current_round(), topics.blob_chunk(digest, 12), topics.status(), topics.hello(), topics.progress(),
                                   topics.tasks(), topics.acks(), topics.declines(), topics.update(3, 0, kNoShard)})
    CHECK_MESSAGE(("\n" + all).find("\n" + topic + "\n") != std::string::npos, topic);
  CHECK(topics.update(3, 1, 2) == "edgefl/v1/demo/devices/phone-7/shards/2/3/1");
  CHECK_THROWS_AS(Topics("demo", "a/b"), ConfigError);
  CHECK(client_id("", "device", "demo", "phone-7", true) == "edgefl:device:demo:phone-7");
  CHECK(publish_bytes("a/b", 100, 1) == 1 + 1 + 2 + 3 + 2 + 100);
  CHECK(publish_bytes("a/b", 1000, 0) == 1 + 2 + 2 + 3 + 1000);
}

TEST_CASE("one key follows another, once") {
  const KeyFile file;
  const KeyPair old(file.path);
  const Bytes fresh(32, 'n'), other(32, 'o');
  const auto statement = [&](const Bytes& key, int64_t until) {
    const std::string text = "edgefl/succession/1\n" + hex(old.public_key()) + "\n" + hex(key) + "\n" + std::to_string(until) + "\n";
    return Succession{old.public_key(), key, until, old.sign(text)};
  };
  const auto known = known_after({{old.public_key(), kForever}}, {statement(fresh, 99), statement(other, 99)});
  CHECK(known.at(old.public_key()) == 99);
  CHECK(known.at(fresh) == kForever);
  CHECK(known.count(other) == 0);
  Succession forged = statement(fresh, 99);
  forged.until = 100;
  CHECK(known_after({{old.public_key(), kForever}}, {forged}).size() == 1);
}

TEST_CASE("numbers grow, though the clock went back a day, or a store was set back") {
  const int64_t now = int64_t{1'800'000'000} * 1'000'000, day = int64_t{86'400} * 1'000'000;
  int64_t kept = 0, saves = 0;
  const auto save = [&](int64_t number) {
    kept = number;
    ++saves;
  };
  MessageCounter before(0, save, now);
  const int64_t last = before.next(2) + 1;
  CHECK(before.next() == last + 1);
  CHECK(saves == 1);
  MessageCounter after(kept, save, now - day);
  CHECK(after.next() > last + 1);
  MessageCounter forgot(0, save, now + day);
  CHECK(forgot.next() > last + 1);
}

TEST_CASE("numbers of a release are compared one by one") {
  CHECK(is_older("1.9.2", "1.15"));
  CHECK(is_older("1.4.0a0+1234", "1.5"));
  CHECK(is_older("1.22.0-dev.2025", "1.23"));
  for (const auto& [version, least] : {std::pair("1.15", "1.9.2"), {"1.15", "1.15.0"}, {"1.5.1+cpu", "1.5"}, {"2", "1.99.99.99"}, {"unknown", "1.15"}, {"", "1.15"}})
    CHECK_FALSE(is_older(version, least));
  CHECK(is_release("1.15"));
  for (const char* text : {"new", "1.", "1.2.3.4.5", "1.5rc1", "-1", "1111111111"}) CHECK_FALSE(is_release(text));
}
