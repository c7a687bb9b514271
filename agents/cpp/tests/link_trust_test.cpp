// Whom a device hears.
#include <doctest/doctest.h>
#include <filesystem>
#include <memory>
#include <unistd.h>

#include "link/trust.h"
#include "wire/digest.h"
#include "wire/packing.h"

using namespace edgefl;

namespace {

struct Folder {
  std::string path = (std::filesystem::temp_directory_path() / ("edgefl-trust-" + std::to_string(getpid()))).string();
  Folder() {
    std::filesystem::remove_all(path);
    std::filesystem::create_directories(path);
  }
  ~Folder() { std::filesystem::remove_all(path); }
};

const std::string kRounds = "edgefl/v1/demo/rounds/current", kTasks = "edgefl/v1/demo/devices/phone-7/tasks";

// A server as it signs.
struct Server {
  KeyPair keys;
  explicit Server(const std::string& path) : keys(path) {}
  Bytes signed_as(const std::string& context, const std::string& topic, int64_t at, const Bytes& body) const {
    const std::string text = "edgefl/" + context + "/1\n" + topic + "\n" + std::to_string(at) + "\n" + sha256(body);
    return MapOut().integer("v", 2).bytes("key", keys.public_key()).integer("at", at).bytes("signature", keys.sign(text)).bytes("body", body).done();
  }
  Bytes round(int64_t number, int64_t at) const {
    const Bytes body = MapOut().integer("v", 1).text("run", "run").integer("round", number).text("state", "closed").text("model_version", "m")
                           .raw("offers", "\x80").raw("units", "\x80").raw("hyper", "\x80").integer("base", 0).number("deadline", 0).done();
    return signed_as("announcement", kRounds, at, body);
  }
  Bytes task(int64_t at) const { return signed_as("task", kTasks, at, bare_task()); }
  static Bytes bare_task() {
    return MapOut().integer("v", 1).text("run", "run").integer("round", 1).text("tier", "weak").integer("seed", 7).text("nonce", "0011aabb").done();
  }
};

struct Device {
  Store store;
  std::vector<std::string> said;
  std::unique_ptr<ServerTrust> trust;
  explicit Device(const std::string& folder, std::vector<Bytes> pinned = {}) : store(folder, 1 << 20, 10, "demo", "phone-7") {
    trust = std::make_unique<ServerTrust>(store, std::move(pinned), [this](const std::string& event, const std::string& text, const Details&) { said.push_back(event + ": " + text); });
  }
  std::string refused(const std::string& topic, const Bytes& payload) {
    try {
      topic == kRounds ? (void)trust->open<Round>(topic, payload) : (void)trust->open<Task>(topic, payload);
    } catch (const DuplicateMessageError&) {
      return "repeated";
    } catch (const IdentityError& error) {
      return error.reason;
    }
    return "";
  }
};

}  // namespace

TEST_CASE("the first key that announces a round is trusted, also after a restart; a stranger's is not") {
  const Folder folder;
  const Server server(folder.path + "/server.key"), stranger(folder.path + "/stranger.key");
  {
    Device device(folder.path + "/device");
    CHECK(device.refused(kTasks, stranger.task(1)) == "");  // as good as unsigned: nothing is learnt from it
    CHECK(device.trust->keys().empty());
    CHECK(device.refused(kRounds, server.round(1, 5)) == "");
    CHECK(device.said.back().find("trust on first use") != std::string::npos);
    CHECK(device.refused(kRounds, stranger.round(2, 9)) == "unknown-key");
    CHECK(device.refused(kTasks, Server::bare_task()) == "unsigned");
  }
  Device again(folder.path + "/device");
  CHECK(again.refused(kRounds, stranger.round(2, 9)) == "unknown-key");
  CHECK(again.refused(kRounds, server.round(0, 4)) == "replayed");
  CHECK(again.refused(kRounds, server.round(1, 5)) == "");  // retained: the first copy in a process counts
  CHECK(again.refused(kRounds, server.round(1, 5)) == "repeated");
  CHECK(again.refused(kTasks, server.task(7)) == "");
  CHECK(again.refused(kTasks, server.task(7)) == "repeated");
  CHECK(again.refused(kTasks, server.task(6)) == "replayed");
}

TEST_CASE("a key that was given counts before one that was learnt") {
  const Folder folder;
  const Server server(folder.path + "/server.key"), other(folder.path + "/other.key");
  { CHECK(Device(folder.path + "/device").refused(kRounds, server.round(1, 5)) == ""); }
  Device device(folder.path + "/device", {other.keys.public_key()});
  CHECK(device.refused(kRounds, server.round(2, 6)) == "unknown-key");
  CHECK(device.refused(kRounds, other.round(2, 1)) == "");
}

TEST_CASE("a changed body, and another topic, are found") {
  const Folder folder;
  const Server server(folder.path + "/server.key");
  Device device(folder.path + "/device", {server.keys.public_key()});
  Bytes payload = server.task(3);
  payload[payload.find("weak")] = 'W';
  CHECK(device.refused(kTasks, payload) == "wrong-signature");
  CHECK(device.refused("edgefl/v1/demo/devices/phone-8/tasks", server.task(3)) == "wrong-signature");
  CHECK_THROWS_AS(device.trust->check_bundle(std::string(64, 'a'), "", "onnx"), BundleError);
}
