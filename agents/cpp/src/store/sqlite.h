// SQLite, as much of it as the store needs; every failure is a StoreError that says what to do.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "wire/blob_ref.h"

struct sqlite3;
struct sqlite3_stmt;

namespace edgefl {

// One statement with values bound to it, in order.
class Statement {
 public:
  Statement(sqlite3* db, const char* sql);
  ~Statement();
  Statement(const Statement&) = delete;
  Statement& operator=(const Statement&) = delete;

  Statement& with(int64_t value);
  Statement& with(double value);
  Statement& text(std::string_view value);
  Statement& bytes(std::string_view value);  // `value` stays where it is until the statement has run
  bool next();  // whether there is a row
  void run();

  int64_t integer(int column) const;
  std::string string(int column) const;  // text or bytes
  int64_t row() const;                   // the one that was inserted last
 private:
  sqlite3* db_;
  sqlite3_stmt* statement_ = nullptr;
  int bound_ = 0;
};

// Writes over the zeros of the column `data` in a row: a value that is bound to a statement is copied whole. `data` is the
// table's last column, or SQLite makes its zeros in memory.
void write_data(sqlite3* db, const char* table, int64_t row, const std::vector<std::string_view>& pieces);

// The database of one folder, which one process at a time may have. Thread-safe.
class StoreFile {
 public:
  StoreFile(const std::string& folder, const char* schema, const std::string& federation, const std::string& device);
  ~StoreFile();

 protected:
  using RoundExecutor = std::function<void(sqlite3*)>;
  // All of it or nothing; `durable`: on the disk when it returns.
  void transaction(const RoundExecutor& work, bool durable = false) const;
  void reading(const RoundExecutor& work) const;
  std::string folder_;

 private:
  void open(const char* schema);
  void own(const std::string& federation, const std::string& device);
  mutable std::recursive_mutex lock_;
  sqlite3* db_ = nullptr;
  int lock_file_ = -1;
};

}  // namespace edgefl
