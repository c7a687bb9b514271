#include "store/sqlite.h"

#include <chrono>
#include <cstring>
#include <fcntl.h>
#include <sqlite3.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <thread>
#include <unistd.h>

#include "wire/errors.h"
#include "wire/files.h"

namespace edgefl {
namespace {

constexpr int kLayout = 3;  // of the tables; the other agent's has the same

// SQLite's own words, before they are told.
struct Trouble {
  std::string text;
  bool full;
};

[[noreturn]] void fail(sqlite3* db) {
  throw Trouble{sqlite3_errmsg(db), (sqlite3_errcode(db) & 255) == SQLITE_FULL};
}

void execute(sqlite3* db, const char* sql) {
  if (sqlite3_exec(db, sql, nullptr, nullptr, nullptr) != SQLITE_OK) fail(db);
}

// What to do: a full disk damages no store, and one that is damaged is not mended by room.
std::string remedy(const Trouble& trouble) {
  return trouble.full ? "free some space there, or give the device a folder on another disk by `--store`"
                      : "move it away to start afresh if it is damaged";
}

// The lock that the kernel lets go when the process dies. Waits a little: an agent that is being stopped may still be there.
int locked(const std::string& folder) {
  const std::string path = folder + "/lock";
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (file < 0) throw StoreError("the folder " + folder + " is unusable (" + std::strerror(errno) + "): name another one");
  for (int tries = 0; flock(file, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK; ++tries) {
    if (tries == 50) {
      char pid[21] = {};
      const ssize_t size = pread(file, pid, 20, 0);
      close(file);
      const std::string who = size > 1 ? "process " + std::string(pid).substr(0, std::string(pid).find('\n')) : "another process";
      throw StoreError("a device already runs on this store (" + folder + ", " + who +
                       "): stop it, or give this one another folder by `--store`, or a name of its own");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  const std::string pid = std::to_string(getpid()) + "\n";
  if (ftruncate(file, 0) == 0) (void)!pwrite(file, pid.data(), pid.size(), 0);
  return file;
}

}  // namespace

Statement::Statement(sqlite3* db, const char* sql) : db_(db) {
  if (sqlite3_prepare_v2(db, sql, -1, &statement_, nullptr) != SQLITE_OK) fail(db);
}
Statement::~Statement() { sqlite3_finalize(statement_); }

Statement& Statement::with(int64_t value) {
  sqlite3_bind_int64(statement_, ++bound_, value);
  return *this;
}
Statement& Statement::with(double value) {
  sqlite3_bind_double(statement_, ++bound_, value);
  return *this;
}
Statement& Statement::text(std::string_view value) {
  sqlite3_bind_text64(statement_, ++bound_, value.data(), value.size(), SQLITE_TRANSIENT, SQLITE_UTF8);
  return *this;
}
Statement& Statement::bytes(std::string_view value) {
  if (sqlite3_bind_blob64(statement_, ++bound_, value.empty() ? "" : value.data(), value.size(), SQLITE_STATIC) != SQLITE_OK) fail(db_);
  return *this;
}

int64_t Statement::row() const { return sqlite3_last_insert_rowid(db_); }

void write_data(sqlite3* db, const char* table, int64_t row, const std::vector<std::string_view>& pieces) {
  sqlite3_blob* blob = nullptr;
  int code = sqlite3_blob_open(db, "main", table, "data", row, 1, &blob);
  int at = 0;
  for (const std::string_view piece : pieces) {
    if (code != SQLITE_OK) break;
    code = sqlite3_blob_write(blob, piece.data(), static_cast<int>(piece.size()), at);
    at += static_cast<int>(piece.size());
  }
  const int closed = sqlite3_blob_close(blob);
  if (code != SQLITE_OK || closed != SQLITE_OK) fail(db);
}

bool Statement::next() {
  const int code = sqlite3_step(statement_);
  if (code != SQLITE_ROW && code != SQLITE_DONE) fail(db_);
  return code == SQLITE_ROW;
}

void Statement::run() {
  while (next()) {
  }
}

int64_t Statement::integer(int column) const { return sqlite3_column_int64(statement_, column); }

std::string Statement::string(int column) const {
  const void* data = sqlite3_column_blob(statement_, column);
  const int size = sqlite3_column_bytes(statement_, column);
  return data == nullptr ? "" : std::string(static_cast<const char*>(data), static_cast<size_t>(size));
}

StoreFile::StoreFile(const std::string& folder, const char* schema, const std::string& federation, const std::string& device) : folder_(folder) {
  make_folder(folder);
  chmod(folder.c_str(), 0700);  // fails for a folder of somebody else's, which then stays as its owner wants it
  lock_file_ = locked(folder);
  try {
    open(schema);
    own(federation, device);
  } catch (...) {
    sqlite3_close_v2(db_);
    close(lock_file_);
    throw;
  }
}

StoreFile::~StoreFile() {
  sqlite3_close_v2(db_);
  close(lock_file_);
}

void StoreFile::open(const char* schema) {
  const std::string path = folder_ + "/store.sqlite3";
  int64_t layout = 0;
  bool fresh = true;
  try {
    // SQLite gives its other files the mode of this one.
    if (const int made = ::open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600); made >= 0) close(made);
    if (sqlite3_open_v2(path.c_str(), &db_, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE | SQLITE_OPEN_FULLMUTEX, nullptr) != SQLITE_OK) fail(db_);
    sqlite3_busy_timeout(db_, 30000);
    // A small cache: 256 KiB are as fast as more, and stay in memory for good.
    execute(db_, "PRAGMA journal_mode=WAL; PRAGMA synchronous=NORMAL; PRAGMA foreign_keys=ON; PRAGMA cache_size=-256;");
    Statement version(db_, "PRAGMA user_version");
    if (version.next()) layout = version.integer(0);
    fresh = !Statement(db_, "SELECT 1 FROM sqlite_master").next();
    if (layout == kLayout || (fresh && layout == 0)) {
      execute(db_, "PRAGMA user_version=3; CREATE TABLE IF NOT EXISTS owner(name TEXT PRIMARY KEY, value TEXT NOT NULL);");
      execute(db_, schema);
      return;
    }
  } catch (const Trouble& trouble) {
    throw StoreError(path + " cannot be opened: " + trouble.text + "; " + remedy(trouble));
  }
  throw StoreError(path + " has layout " + std::to_string(layout) +
                   ", this runtime reads 3: install the edgefl that wrote it, or move the file away to start afresh");
}

void StoreFile::own(const std::string& federation, const std::string& device) {
  std::string owners[2];
  reading([&](sqlite3* db) {
    Statement rows(db, "SELECT name, value FROM owner");
    while (rows.next()) owners[rows.string(0) == "device"] = rows.string(1);
  });
  if ((!owners[0].empty() && owners[0] != federation) || (!owners[1].empty() && owners[1] != device))
    throw StoreError("the store in " + folder_ + " belongs to device " + owners[1] + " of federation " + owners[0] + ", not to " + device + " of " +
                     federation + ": use another folder");
  transaction([&](sqlite3* db) {
    for (const auto& [name, value] : {std::pair("federation", federation), std::pair("device", device)})
      Statement(db, "INSERT OR IGNORE INTO owner VALUES(?, ?)").text(name).text(value).run();
  });
}

void StoreFile::transaction(const RoundExecutor& work, bool durable) const {
  const std::lock_guard<std::recursive_mutex> guard(lock_);
  const auto back = [&](const char* sql) { sqlite3_exec(db_, sql, nullptr, nullptr, nullptr); };
  try {
    if (durable) execute(db_, "PRAGMA synchronous=FULL");
    execute(db_, "BEGIN IMMEDIATE");
    work(db_);
    execute(db_, "COMMIT");
  } catch (const Trouble& trouble) {
    back("ROLLBACK");
    back("PRAGMA synchronous=NORMAL");
    throw StoreError("the store in " + folder_ + " cannot be written: " + trouble.text + "; " + remedy(trouble));
  } catch (...) {
    back("ROLLBACK");
    back("PRAGMA synchronous=NORMAL");
    throw;
  }
  if (durable) back("PRAGMA synchronous=NORMAL");
}

void StoreFile::reading(const RoundExecutor& work) const {
  const std::lock_guard<std::recursive_mutex> guard(lock_);
  try {
    work(db_);
  } catch (const Trouble& trouble) {
    throw StoreError("the store in " + folder_ + " cannot be read: " + trouble.text + "; move it away to start afresh");
  }
}

}  // namespace edgefl
