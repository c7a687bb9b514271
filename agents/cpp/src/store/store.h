// The device's store: blobs, the open job, its checkpoint, the outbox, what is carried, and history. Everything that a killed
// agent needs to go on is here; each method is one transaction. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "round/trainer.h"
#include "store/sqlite.h"
#include "wire/blob_ref.h"
#include "wire/tensor.h"
#include "wire/mqtt/topics.h"

namespace edgefl {

// An update that waits for the server's word.
struct Outgoing {
  std::string run;
  int64_t round = 0;
  std::string nonce;
  Bytes data;        // an encoded Update
  bool ask = false;  // it is offered before it goes
  int64_t shard = kNoShard;
};

// One line of the device's history.
struct PastRound {
  std::string run;
  int64_t round = 0;
  std::string tier, nonce, outcome, reason;
  double loss = 0.0, step_ms = 0.0;
  int64_t peak_bytes = 0, down_bytes = 0, up_bytes = 0;
  std::string text;
};

// What a round left for later ones. `name` is "<run>/<program>/<tier>"; `waits`: the server has not spoken on its update.
struct StoredCarry {
  int64_t id = 0;
  std::string name, nonce;
  int64_t round = 0;
  bool waits = false;
};

constexpr const char* kDeclined = "declined";

class Store : public StoreFile {
 public:
  Store(const std::string& folder, int64_t limit_bytes, int64_t history_rounds, const std::string& federation, const std::string& device);
  const std::string& folder() const { return folder_; }

  // Blobs.
  std::vector<int64_t> missing_chunks(const BlobRef& ref) const;
  void put_chunk(const BlobRef& ref, int64_t index, std::string_view data);
  void make_room(const std::vector<BlobRef>& needed);  // drops the least recently used; StoreError if they never fit
  void make_room_beside(int64_t nbytes);               // for a file in the folder
  Bytes blob(const BlobRef& ref) const;                // unchecked; shorter if chunks are missing
  void drop_blob(const BlobRef& ref);

  // The open round.
  void open_job(const Bytes& data, bool fresh = false);  // `fresh` drops what was computed for it
  std::optional<Bytes> job() const;
  void close_job();
  void save_checkpoint(const std::string& nonce, int64_t step, const std::map<std::string, double>& sums, const std::string& basis,
                       const std::vector<std::string>& names, const std::function<Tensor(const std::string&)>& tensor);
  std::optional<KeptCheckpoint> checkpoint(const std::string& nonce) const;

  // The outbox.
  void finish_job(Outgoing outgoing, const std::optional<Bytes>& carry, const std::string& carry_name);
  std::optional<Outgoing> outgoing() const;  // the oldest; StoreError for one that cannot be read, which is dropped
  bool has_outgoing() const;                 // without reading it, which may be large
  bool waits(const std::string& nonce) const;
  void settle(const PastRound& past);
  void decline(const PastRound& past);

  // Facts, and what is carried.
  std::optional<Bytes> fact(const std::string& name) const;
  void keep_fact(const std::string& name, const Bytes& value, bool durable = true);
  std::vector<StoredCarry> carries() const;  // oldest first
  std::optional<Bytes> carry(const StoredCarry& carry) const;
  void drop_carries(const std::vector<StoredCarry>& carries);

  // History, oldest first.
  std::vector<PastRound> history() const;
  bool is_past(const std::string& nonce) const;
  std::vector<PastRound> declined(const std::string& run, int64_t round) const;

 private:
  Tensor tensor_of(int64_t id) const;
  void remember(sqlite3* db, const PastRound& past);
  int64_t beside_bytes() const;
  void drop_oldest(sqlite3* db, int64_t nbytes, const std::map<std::string, int64_t>& keep) const;
  int64_t limit_, history_rounds_;
};

}  // namespace edgefl
