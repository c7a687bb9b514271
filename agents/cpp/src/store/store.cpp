#include "store/store.h"

#include <chrono>
#include <cstring>
#include <filesystem>
#include <sqlite3.h>

#include "store/rows.h"
#include "wire/errors.h"
#include "wire/packing.h"

namespace edgefl {
namespace {

constexpr const char* kSchema = R"(
CREATE TABLE IF NOT EXISTS blobs(sha256 TEXT PRIMARY KEY, size INTEGER NOT NULL, used_at REAL NOT NULL);
CREATE TABLE IF NOT EXISTS chunks(
  sha256 TEXT NOT NULL REFERENCES blobs ON DELETE CASCADE, idx INTEGER NOT NULL, data BLOB NOT NULL, PRIMARY KEY(sha256, idx));
CREATE TABLE IF NOT EXISTS job(one INTEGER PRIMARY KEY CHECK(one = 1), data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS outbox(nonce TEXT PRIMARY KEY, round INTEGER NOT NULL, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS traffic(day TEXT PRIMARY KEY, bytes INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS facts(name TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS history(nonce TEXT PRIMARY KEY, finished_at REAL NOT NULL, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS checkpoint(nonce TEXT PRIMARY KEY, step INTEGER NOT NULL, sums BLOB NOT NULL, basis TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS checkpoint_tensors(
  id INTEGER PRIMARY KEY AUTOINCREMENT, nonce TEXT NOT NULL REFERENCES checkpoint ON DELETE CASCADE,
  name TEXT NOT NULL, dtype TEXT NOT NULL, shape BLOB NOT NULL, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS carries(
  id INTEGER PRIMARY KEY, name TEXT NOT NULL, nonce TEXT NOT NULL, round INTEGER NOT NULL, data BLOB NOT NULL);
)";

double now_s() { return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count(); }

std::optional<Bytes> first_of(Statement& rows) {
  return rows.next() ? std::optional<Bytes>(rows.string(0)) : std::nullopt;
}

void end_job(sqlite3* db) {
  Statement(db, "DELETE FROM job").run();
  Statement(db, "DELETE FROM checkpoint").run();
}

void insert_tensor(sqlite3* db, const std::string& nonce, const std::string& name, const Tensor& tensor) {
  const std::string shape = packed_shape(tensor.shape);
  Statement made(db, "INSERT INTO checkpoint_tensors(nonce, name, dtype, shape, data) VALUES(?, ?, ?, ?, zeroblob(?))");
  made.text(nonce).text(name).text(numpy_code(tensor.dtype)).bytes(shape).with(static_cast<int64_t>(tensor.data.size())).run();
  write_data(db, "checkpoint_tensors", made.row(), {{reinterpret_cast<const char*>(tensor.data.data()), tensor.data.size()}});
}

}  // namespace

Store::Store(const std::string& folder, int64_t limit_bytes, int64_t history_rounds, const std::string& federation, const std::string& device)
    : StoreFile(folder, kSchema, federation, device), limit_(limit_bytes), history_rounds_(history_rounds) {}

std::vector<int64_t> Store::missing_chunks(const BlobRef& ref) const {
  std::vector<int64_t> missing;
  if (ref.size == 0) return missing;
  std::vector<bool> here(static_cast<size_t>(ref.count()), false);
  reading([&](sqlite3* db) {
    Statement rows(db, "SELECT idx FROM chunks WHERE sha256 = ?");
    for (rows.text(ref.sha256); rows.next();)
      if (rows.integer(0) >= 0 && rows.integer(0) < ref.count()) here[static_cast<size_t>(rows.integer(0))] = true;
  });
  for (int64_t index = 0; index < ref.count(); ++index)
    if (!here[static_cast<size_t>(index)]) missing.push_back(index);
  return missing;
}

void Store::put_chunk(const BlobRef& ref, int64_t index, std::string_view data) {
  transaction([&](sqlite3* db) {
    Statement(db, "INSERT OR IGNORE INTO blobs VALUES(?, ?, ?)").text(ref.sha256).with(ref.size).with(now_s()).run();
    Statement(db, "INSERT OR REPLACE INTO chunks VALUES(?, ?, ?)").text(ref.sha256).with(index).bytes(data).run();
  });
}

void Store::make_room(const std::vector<BlobRef>& needed) {
  std::map<std::string, int64_t> keep;
  int64_t total = 0;
  for (const BlobRef& ref : needed) keep[ref.sha256] = ref.size;
  for (const auto& [name, size] : keep) total += size;
  if (total > limit_)
    throw StoreError("this round needs " + std::to_string(total) + " bytes of blobs, the store may hold " + std::to_string(limit_) +
                     ": raise limits.store_bytes or ask for a smaller tier");
  transaction([&](sqlite3* db) {
    drop_oldest(db, total + beside_bytes(), keep);
    for (const auto& [name, size] : keep) Statement(db, "UPDATE blobs SET used_at = ? WHERE sha256 = ?").with(now_s()).text(name).run();
  });
}

void Store::make_room_beside(int64_t nbytes) {
  const int64_t beside = beside_bytes();
  if (nbytes > limit_ - beside)
    throw StoreError("this round keeps " + std::to_string(beside) + " + " + std::to_string(nbytes) + " bytes on the disk, the store may hold " +
                     std::to_string(limit_) + ": raise limits.store_bytes or ask for a smaller tier");
  transaction([&](sqlite3* db) { drop_oldest(db, beside + nbytes, {}); });
}

void Store::drop_oldest(sqlite3* db, int64_t nbytes, const std::map<std::string, int64_t>& keep) const {
  std::vector<std::pair<std::string, int64_t>> others;
  int64_t used = nbytes;
  Statement rows(db, "SELECT sha256, size FROM blobs ORDER BY used_at");
  while (rows.next()) {
    if (keep.count(rows.string(0)) != 0) continue;
    others.emplace_back(rows.string(0), rows.integer(1));
    used += rows.integer(1);
  }
  for (const auto& [name, size] : others) {
    if (used <= limit_) return;
    Statement(db, "DELETE FROM blobs WHERE sha256 = ?").text(name).run();
    used -= size;
  }
}

int64_t Store::beside_bytes() const {
  int64_t sizes = 0;
  std::error_code gone;
  for (const auto& file : std::filesystem::directory_iterator(folder_, gone)) {
    const bool record = file.path().filename().string().rfind("record-", 0) == 0;
    const auto size = record ? std::filesystem::file_size(file.path(), gone) : 0;
    if (!gone) sizes += static_cast<int64_t>(size);
  }
  return sizes;
}

Bytes Store::blob(const BlobRef& ref) const {
  transaction([&](sqlite3* db) { Statement(db, "UPDATE blobs SET used_at = ? WHERE sha256 = ?").with(now_s()).text(ref.sha256).run(); });
  Bytes whole;
  whole.reserve(static_cast<size_t>(ref.size));
  reading([&](sqlite3* db) {
    Statement rows(db, "SELECT data FROM chunks WHERE sha256 = ? ORDER BY idx");
    for (rows.text(ref.sha256); rows.next();) whole += rows.string(0);
  });
  return whole;
}

void Store::drop_blob(const BlobRef& ref) {
  transaction([&](sqlite3* db) { Statement(db, "DELETE FROM blobs WHERE sha256 = ?").text(ref.sha256).run(); });
}

void Store::open_job(const Bytes& data, bool fresh) {
  transaction([&](sqlite3* db) {
    if (fresh) Statement(db, "DELETE FROM checkpoint").run();
    Statement(db, "INSERT OR REPLACE INTO job VALUES(1, ?)").bytes(data).run();
  });
}

std::optional<Bytes> Store::job() const {
  std::optional<Bytes> found;
  reading([&](sqlite3* db) {
    Statement rows(db, "SELECT data FROM job");
    found = first_of(rows);
  });
  return found;
}

void Store::close_job() { transaction(end_job); }

void Store::save_checkpoint(const std::string& nonce, int64_t step, const std::map<std::string, double>& sums, const std::string& basis,
                            const std::vector<std::string>& names, const std::function<Tensor(const std::string&)>& tensor) {
  const Bytes packed = packed_scalars(sums);
  transaction([&](sqlite3* db) {
    Statement(db, "DELETE FROM checkpoint").run();
    Statement(db, "INSERT INTO checkpoint VALUES(?, ?, ?, ?)").text(nonce).with(step).bytes(packed).text(basis).run();
    for (const std::string& name : names) insert_tensor(db, nonce, name, tensor(name));
  });
}

std::optional<KeptCheckpoint> Store::checkpoint(const std::string& nonce) const {
  KeptCheckpoint kept;
  std::map<std::string, int64_t> ids;
  bool found = false;
  reading([&](sqlite3* db) {
    Statement head(db, "SELECT step, sums, basis FROM checkpoint WHERE nonce = ?");
    found = head.text(nonce).next();
    if (!found) return;
    kept.step = head.integer(0);
    kept.sums = read_scalars(head.string(1));
    kept.basis = head.string(2);
    Statement rows(db, "SELECT id, name FROM checkpoint_tensors WHERE nonce = ? ORDER BY id");
    for (rows.text(nonce); rows.next();) {
      ids[rows.string(1)] = rows.integer(0);
      kept.names.push_back(rows.string(1));
    }
  });
  if (!found) return std::nullopt;
  kept.tensor = [this, ids](const std::string& name) { return tensor_of(ids.at(name)); };
  return kept;
}

Tensor Store::tensor_of(int64_t id) const {
  Tensor tensor;
  bool found = false;
  reading([&](sqlite3* db) {
    Statement rows(db, "SELECT dtype, shape, data FROM checkpoint_tensors WHERE id = ?");
    found = rows.with(id).next();
    if (!found) return;
    tensor = Tensor(dtype_of_code(rows.string(0)), read_shape(rows.string(1)));
    const std::string data = rows.string(2);
    found = data.size() == tensor.data.size();
    if (found && !data.empty()) std::memcpy(tensor.data.data(), data.data(), data.size());
  });
  if (!found) throw StoreError("a checkpoint in " + folder_ + " was replaced while it was read, or is damaged");
  return tensor;
}

void Store::finish_job(Outgoing outgoing, const std::optional<Bytes>& carry, const std::string& carry_name) {
  const Bytes packed = packed_outgoing(outgoing);
  outgoing.data = Bytes();  // it is in what is packed
  transaction(
      [&](sqlite3* db) {
        Statement made(db, "INSERT OR REPLACE INTO outbox VALUES(?, ?, zeroblob(?))");
        made.text(outgoing.nonce).with(outgoing.round).with(static_cast<int64_t>(packed.size())).run();
        write_data(db, "outbox", made.row(), {packed});
        if (carry) {
          Statement kept(db, "INSERT INTO carries(name, nonce, round, data) VALUES(?, ?, ?, zeroblob(?))");
          kept.text(carry_name).text(outgoing.nonce).with(outgoing.round).with(static_cast<int64_t>(carry->size())).run();
          write_data(db, "carries", kept.row(), {*carry});
        }
        end_job(db);
      },
      true);
}

std::optional<Outgoing> Store::outgoing() const {
  std::optional<Bytes> data;
  int64_t row = 0;
  reading([&](sqlite3* db) {
    Statement rows(db, "SELECT data, rowid FROM outbox ORDER BY rowid LIMIT 1");
    data = first_of(rows);
    if (data) row = rows.integer(1);
  });
  if (!data) return std::nullopt;
  try {
    return read_outgoing(*data);
  } catch (const ProtocolError& error) {
    transaction([&](sqlite3* db) { Statement(db, "DELETE FROM outbox WHERE rowid = ?").with(row).run(); });
    throw StoreError("an update that waited in the store in " + folder_ + " cannot be read (" + error.what() +
                     ") and is dropped: the disk may be damaged, or another release wrote it");
  }
}

bool Store::has_outgoing() const {
  bool found = false;
  reading([&](sqlite3* db) { found = Statement(db, "SELECT 1 FROM outbox LIMIT 1").next(); });
  return found;
}

bool Store::waits(const std::string& nonce) const {
  bool found = false;
  reading([&](sqlite3* db) { found = Statement(db, "SELECT 1 FROM outbox WHERE nonce = ?").text(nonce).next(); });
  return found;
}

void Store::settle(const PastRound& past) {
  transaction([&](sqlite3* db) {
    if (past.outcome != "accepted") Statement(db, "DELETE FROM carries WHERE nonce = ?").text(past.nonce).run();
    Statement(db, "DELETE FROM outbox WHERE nonce = ?").text(past.nonce).run();
    remember(db, past);
  });
}

void Store::decline(const PastRound& past) {
  transaction(
      [&](sqlite3* db) {
        remember(db, past);
        end_job(db);
      },
      true);
}

void Store::remember(sqlite3* db, const PastRound& past) {
  const Bytes packed = packed_past(past);
  Statement(db, "INSERT OR REPLACE INTO history VALUES(?, ?, ?)").text(past.nonce).with(now_s()).bytes(packed).run();
  // By the order in which they came: a clock may have been a day ahead.
  Statement(db, "DELETE FROM history WHERE rowid NOT IN (SELECT rowid FROM history ORDER BY rowid DESC LIMIT ?)").with(history_rounds_).run();
}

}  // namespace edgefl
