// The carry that a device which changed its tier goes on from.
#include <doctest/doctest.h>
#include <filesystem>
#include <unistd.h>

#include "agent/rounds/carries.h"
#include "wire/bytes/safetensors.h"

using namespace edgefl;

namespace {

// A device of the tier `weak`, with what rounds left in its store.
struct Home {
  std::string path = (std::filesystem::temp_directory_path() / ("edgefl-carries-" + std::to_string(getpid()))).string();
  std::unique_ptr<Store> store;
  Manifest manifest;
  std::vector<std::string> told;

  Home() {
    std::filesystem::remove_all(path);
    store = std::make_unique<Store>(path, 1 << 20, 3, "demo", "phone-7");
    Graph start;
    start.name = "start";
    start.inputs = {{"carry.v", "carry", DType::f32, {3}, 0, std::nullopt}};
    manifest.graphs = {start};
    manifest.program = "sgd";
    manifest.start = manifest.finish = "start";
    manifest.carry_any_tier = true;
  }
  ~Home() {
    store.reset();
    std::filesystem::remove_all(path);
  }

  // A round's carry, accepted: its number, `size` times.
  void leave(int64_t round, const std::string& name, int64_t size = 3, const std::string& label = "v", DType dtype = DType::f32) {
    Tensor value(dtype, {size});
    if (dtype == DType::f32) std::fill_n(value.as<float>(), size, static_cast<float>(round));
    const std::string nonce = name + std::to_string(round);
    store->finish_job({"run", round, nonce, "update", false, 0}, dump_tensors({{label, value}}), name);
    PastRound past;
    past.run = "run";
    past.round = round;
    past.nonce = nonce;
    past.outcome = "accepted";
    store->settle(past);
  }

  // The round that the next one goes on from; 0: from zeros.
  int begin(int64_t base) {
    Job job;
    job.run = "run";
    job.round = base + 1;
    job.base = base;
    job.tier = "weak";
    const RestoredCarry taken = take_up(*store, job, manifest, [this](const std::string& text, const StoredCarry&) { told.push_back(text); });
    return taken.arrays.empty() ? 0 : static_cast<int>(taken.arrays.at("v").as<float>()[0]);
  }

  std::vector<int64_t> rounds() const {
    std::vector<int64_t> found;
    for (const StoredCarry& each : store->carries()) found.push_back(each.round);
    return found;
  }
};

const std::string kWeak = "run/sgd/weak", kStrong = "run/sgd/strong", kHuge = "run/sgd/huge";

}  // namespace

TEST_CASE("a carry of another tier is used only if the manifest permits it, and stays") {
  Home home;
  home.leave(1, kStrong);
  home.manifest.carry_any_tier = false;
  CHECK(home.begin(1) == 0);
  home.manifest.carry_any_tier = true;
  CHECK(home.begin(1) == 1);
  CHECK(home.rounds() == std::vector<int64_t>{1});
  CHECK(home.told.empty());
}

TEST_CASE("the newest carry of all tiers that fits in label, type and shape is used") {
  Home home;
  home.leave(1, kWeak);
  home.leave(2, kStrong);
  home.leave(3, kHuge, 5);
  home.leave(4, kHuge, 3, "w");
  home.leave(5, kHuge, 3, "v", DType::f64);
  CHECK(home.begin(5) == 2);
  CHECK(home.rounds() == std::vector<int64_t>{1, 2, 3, 4, 5});
  CHECK(home.told.empty());
  home.leave(6, kWeak);
  CHECK(home.begin(6) == 6);
}

TEST_CASE("a carry of its own tier that does not fit is dropped, and one of another tier is used") {
  Home home;
  home.leave(1, kStrong);
  home.leave(2, kWeak, 5);
  CHECK(home.begin(2) == 1);
  CHECK(home.rounds() == std::vector<int64_t>{1});
  REQUIRE(home.told.size() == 1);
  CHECK(home.told[0].find("goes on from what was kept of round 1") != std::string::npos);
}

TEST_CASE("abandoned and expired carries of another tier are not used") {
  Home home;
  home.leave(1, kStrong);
  home.leave(2, kStrong);
  CHECK(home.begin(1) == 1);
  home.manifest.carry_exchanges = 1;
  CHECK(home.begin(2) == 2);
  CHECK(home.begin(3) == 0);
}

TEST_CASE("carries of other runs and programs are not used") {
  for (const char* name : {"run/other/strong", "former/sgd/strong", "run/sgd/a/strong"}) {
    Home home;
    home.leave(1, name);
    CHECK(home.begin(1) == 0);
  }
}

TEST_CASE("an algorithm that needs a carry takes one of another tier, and declines without") {
  Home home;
  home.manifest.carry_needed = true;
  CHECK_THROWS_AS(home.begin(0), RoundDeclined);
  home.leave(1, kStrong);
  CHECK(home.begin(1) == 1);
}
