// Facts, what is carried from round to round, and history.
#include <sqlite3.h>

#include "store/rows.h"
#include "store/store.h"
#include "wire/errors.h"

namespace edgefl {

std::optional<Bytes> Store::fact(const std::string& name) const {
  std::optional<Bytes> found;
  reading([&](sqlite3* db) {
    Statement rows(db, "SELECT value FROM facts WHERE name = ?");
    if (rows.text(name).next()) found = rows.string(0);
  });
  return found;
}

void Store::keep_fact(const std::string& name, const Bytes& value, bool durable) {
  transaction([&](sqlite3* db) { Statement(db, "INSERT OR REPLACE INTO facts VALUES(?, ?)").text(name).bytes(value).run(); }, durable);
}

std::vector<StoredCarry> Store::carries() const {
  std::vector<StoredCarry> found;
  reading([&](sqlite3* db) {
    Statement rows(db,
                   "SELECT id, name, nonce, round, EXISTS(SELECT 1 FROM outbox WHERE outbox.nonce = carries.nonce) FROM carries ORDER BY id");
    while (rows.next()) found.push_back({rows.integer(0), rows.string(1), rows.string(2), rows.integer(3), rows.integer(4) != 0});
  });
  return found;
}

std::optional<Bytes> Store::carry(const StoredCarry& carry) const {
  std::optional<Bytes> found;
  reading([&](sqlite3* db) {
    Statement rows(db, "SELECT data FROM carries WHERE id = ?");
    if (rows.with(carry.id).next()) found = rows.string(0);
  });
  return found;
}

void Store::drop_carries(const std::vector<StoredCarry>& carries) {
  transaction([&](sqlite3* db) {
    for (const StoredCarry& each : carries) Statement(db, "DELETE FROM carries WHERE id = ?").with(each.id).run();
  });
}

std::vector<PastRound> Store::history() const {
  std::vector<PastRound> found;
  reading([&](sqlite3* db) {
    Statement rows(db, "SELECT data FROM history ORDER BY rowid");
    while (rows.next()) {
      try {
        found.push_back(read_past(rows.string(0)));
      } catch (const ProtocolError&) {  // of another release
      }
    }
  });
  return found;
}

bool Store::is_past(const std::string& nonce) const {
  bool found = false;
  reading([&](sqlite3* db) { found = Statement(db, "SELECT 1 FROM history WHERE nonce = ?").text(nonce).next(); });
  return found;
}

std::vector<PastRound> Store::declined(const std::string& run, int64_t round) const {
  std::vector<PastRound> found;
  for (PastRound& past : history())
    if (past.outcome == kDeclined && past.run == run && past.round == round) found.push_back(std::move(past));
  return found;
}

}  // namespace edgefl
