// What a killed agent finds again.
#include <cmath>
#include <cstring>
#include <doctest/doctest.h>
#include <filesystem>
#include <memory>
#include <sqlite3.h>
#include <unistd.h>

#include "store/store.h"
#include "wire/digest.h"
#include "wire/errors.h"

using namespace edgefl;

namespace {

struct Folder {
  std::string path = (std::filesystem::temp_directory_path() / ("edgefl-store-" + std::to_string(getpid()))).string();
  Folder() { std::filesystem::remove_all(path); }
  ~Folder() { std::filesystem::remove_all(path); }
};

std::unique_ptr<Store> opened(const Folder& folder, int64_t limit = 1 << 20) {
  return std::make_unique<Store>(folder.path, limit, 3, "demo", "phone-7");
}

BlobRef ref_of(const std::string& data) { return {sha256_hex(data), static_cast<int64_t>(data.size()), 1 << 17, "", "", 0}; }

PastRound past_of(const std::string& nonce, const std::string& outcome) {
  PastRound past;
  past.run = "run";
  past.round = 2;
  past.nonce = nonce;
  past.outcome = outcome;
  past.loss = std::nan("");
  return past;
}

}  // namespace

TEST_CASE("blobs stay, and the least recently used one leaves first") {
  const Folder folder;
  const std::string one(600, '1'), two(600, '2');
  auto store = opened(folder, 1000);
  CHECK(store->missing_chunks(ref_of(one)) == std::vector<int64_t>{0});
  store->put_chunk(ref_of(one), 0, one);
  store.reset();
  store = opened(folder, 1000);
  CHECK(store->blob(ref_of(one)) == one);
  store->make_room({ref_of(two)});
  CHECK(store->missing_chunks(ref_of(one)).size() == 1);
  CHECK_THROWS_AS(store->make_room({ref_of(one), ref_of(two)}), StoreError);
  CHECK(store->missing_chunks(ref_of("")).empty());
}

TEST_CASE("a checkpoint comes back bit by bit, and ends with its job") {
  const Folder folder;
  auto store = opened(folder);
  Tensor weights(DType::f32, {2, 3}), scalar(DType::i64, {});
  weights.as<float>()[4] = -0.0f;
  scalar.as<int64_t>()[0] = 42;
  store->open_job("job");
  store->save_checkpoint("nonce", 5, {{"loss", 1.25}}, "8 rows", {"state.w", "state.n"}, [&](const std::string& name) { return name == "state.w" ? weights : scalar; });
  store.reset();
  store = opened(folder);
  CHECK_FALSE(store->checkpoint("other").has_value());
  const auto kept = store->checkpoint("nonce");
  REQUIRE(kept.has_value());
  CHECK(kept->step == 5);
  CHECK(kept->sums.at("loss") == 1.25);
  CHECK(kept->basis == "8 rows");
  CHECK(kept->tensor("state.w") == weights);
  CHECK(kept->tensor("state.n") == scalar);
  CHECK(store->job() == Bytes("job"));
  store->open_job("job again", true);
  CHECK_FALSE(store->checkpoint("nonce").has_value());
}

TEST_CASE("a checkpoint that fails halfway leaves the one before") {
  const Folder folder;
  auto store = opened(folder);
  const Tensor one(DType::f32, {1});
  store->save_checkpoint("nonce", 5, {}, "b", {"a"}, [&](const std::string&) { return one; });
  CHECK_THROWS_AS(store->save_checkpoint("nonce", 10, {}, "b", {"a", "b"},
                                         [&](const std::string& name) -> Tensor {
                                           if (name == "b") throw EngineError("gone");
                                           return one;
                                         }),
                  EngineError);
  CHECK(store->checkpoint("nonce")->step == 5);
}

TEST_CASE("an update waits until the server has spoken, and takes its carry along if it is refused") {
  const Folder folder;
  auto store = opened(folder);
  store->open_job("job");
  store->finish_job({"run", 2, "first", "update", true, 3}, Bytes("kept"), "run/sgd/weak");
  store.reset();
  store = opened(folder);
  CHECK_FALSE(store->job().has_value());
  CHECK(store->waits("first"));
  const auto outgoing = store->outgoing();
  REQUIRE(outgoing.has_value());
  CHECK(outgoing->data == "update");
  CHECK(outgoing->ask);
  CHECK(outgoing->shard == 3);
  REQUIRE(store->carries().size() == 1);
  CHECK(store->carries()[0].waits);
  store->settle(past_of("first", "rejected"));
  CHECK(store->carries().empty());
  CHECK_FALSE(store->outgoing().has_value());
  CHECK(store->is_past("first"));
}

TEST_CASE("history is bounded, and what was declined is found by its round") {
  const Folder folder;
  auto store = opened(folder);
  for (const char* nonce : {"a", "b", "c", "d"}) store->decline(past_of(nonce, kDeclined));
  CHECK(store->history().size() == 3);
  CHECK_FALSE(store->is_past("a"));
  CHECK(store->declined("run", 2).size() == 3);
  CHECK(store->declined("run", 3).empty());
}

TEST_CASE("what came last stays, though the clock was a day ahead before") {
  const Folder folder;
  {
    auto store = opened(folder);
    for (const char* nonce : {"a", "b", "c"}) store->decline(past_of(nonce, kDeclined));
  }
  sqlite3* db = nullptr;
  REQUIRE(sqlite3_open((folder.path + "/store.sqlite3").c_str(), &db) == SQLITE_OK);
  CHECK(sqlite3_exec(db, "UPDATE history SET finished_at = finished_at + 86400", nullptr, nullptr, nullptr) == SQLITE_OK);
  sqlite3_close(db);
  auto store = opened(folder);
  store->decline(past_of("d", kDeclined));
  CHECK(store->is_past("d"));
  CHECK_FALSE(store->is_past("a"));
  CHECK(store->history().back().nonce == "d");
}

TEST_CASE("a store is one device's") {
  const Folder folder;
  { auto store = opened(folder); }
  CHECK_THROWS_WITH_AS(Store(folder.path, 1, 1, "demo", "phone-8"), doctest::Contains("belongs to device phone-7"), StoreError);
}

TEST_CASE("a folder that cannot be one is named") {
  CHECK_THROWS_AS(Store("/proc/nowhere", 1, 1, "demo", "phone-7"), StoreError);
}
