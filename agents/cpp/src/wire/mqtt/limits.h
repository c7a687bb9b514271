// Every timeout, size and limit of a device (docs/protocol.md, Limits). Sizes in bytes, times in seconds.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>

namespace edgefl {

struct Limits {
  int64_t chunk_bytes = 128 << 10;
  int64_t fetch_window = 8;
  double fetch_timeout_s = 10.0;
  int64_t fetch_retries = 5;
  int64_t max_blob_bytes = int64_t{1} << 30;
  int64_t store_bytes = int64_t{2} << 30;
  int64_t upload_window = 16;
  int64_t mirror_bytes_s = 64 << 10;
  double mirror_pause_s = 10.0;
  double ack_timeout_s = 20.0;
  int64_t checkpoint_steps = 5;
  int64_t keepalive_s = 20;
  double reconnect_min_s = 0.2;
  double reconnect_max_s = 10.0;
  int64_t max_inflight = 64;
  int64_t inbox_messages = 20000;
  int64_t inbox_bytes = 128 << 20;
  int64_t max_message_bytes = 4 << 20;
  double conditions_s = 60.0;
  double retry_pause_s = 1.0;
  double notice_s = 5.0;
  int64_t history_rounds = 1000;
  int64_t max_manifest_bytes = 16 << 20;
  int64_t max_steps = 1000000;
  double max_step_s = 600.0;
  double max_round_s = 86400.0;
  int64_t attempts = 10;

  // Size of the largest message that the agent reads.
  int64_t readable_bytes() const { return std::max(max_message_bytes, chunk_bytes); }

  // "fetch_window=4"; ConfigError names an entry that is none, or beyond its range. Those of a server are passed over.
  void set(const std::string& entry);
};

}  // namespace edgefl
