// The messages of a device's side (docs/protocol.md, Messages): what it reads of the server, and what it says.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "wire/blob_ref.h"
#include "wire/mqtt/topics.h"

namespace edgefl {

using Units = std::map<std::string, std::vector<BlobRef>>;
using Scalars = std::map<std::string, double>;

struct Offer {
  std::map<std::string, BlobRef> bundles;   // by tier
  std::map<std::string, Bytes> signatures;  // by tier
};

struct LiveRound {
  std::string model_version;
  Units units;
  Scalars hyper;
};

struct Round {
  static constexpr const char* kName = "Round";
  static constexpr const char* kContext = "announcement";
  int64_t v = 1;
  std::string run;
  int64_t round = 0;
  std::string state;  // "open", "closed", "done"
  std::string model_version;
  std::map<std::string, Offer> offers;  // by format
  Units units;
  Scalars hyper;
  int64_t base = 0;
  double deadline = 0.0;
  std::vector<std::string> mirrors;
  bool mirrors_only = false;
  std::optional<BlobRef> pages;
  std::map<int64_t, LiveRound> live;

  bool is_open() const { return state == "open"; }
  // The rounds that take updates.
  std::vector<int64_t> takes() const;
  bool takes(int64_t number) const;
  // The formats in which a tier is offered, by name.
  std::vector<std::string> formats_of(const std::string& tier) const;
  // With what the blob `pages` holds; ProtocolError if that cannot be read.
  Round whole(std::string_view page) const;
};

struct Task {
  static constexpr const char* kName = "Task";
  static constexpr const char* kContext = "task";
  std::string run;
  int64_t round = 0;
  std::string tier;
  int64_t seed = 0;
  std::string nonce;
  int64_t samples = 0;
  bool ask = false;
  double progress_s = 0.0;
  int64_t shard = kNoShard;
};

struct Ack {
  static constexpr const char* kName = "Ack";
  static constexpr const char* kContext = "ack";
  int64_t round = 0;
  std::string nonce, status;  // "accepted", "missing", "rejected"
  std::vector<int64_t> missing;
  std::string reason, text, sha256;
  std::optional<double> later_s;
};

struct Conditions {
  std::string power, link, thermal;
  std::optional<bool> available;
  bool known() const { return !power.empty() || !link.empty() || !thermal.empty() || available.has_value(); }
  bool operator==(const Conditions& o) const { return power == o.power && link == o.link && thermal == o.thermal && available == o.available; }
};

struct Status {
  static constexpr const char* kContext = "status";
  bool online = false;
};

struct Hello {
  static constexpr const char* kContext = "hello";
  std::string agent;
  int64_t memory_bytes = 0, cores = 1, samples = 0;
  std::map<std::string, std::string> engines;
  std::string tier, token;
  Bytes proof;
  Conditions conditions;
  bool again = false;
};

struct Progress {
  static constexpr const char* kContext = "progress";
  int64_t round = 0;
  std::string tier, stage;
  int64_t step = 0, steps = 0;
  double loss = 0.0, step_ms = 0.0;
  int64_t peak_bytes = 0, down_bytes = 0, up_bytes = 0;
};

struct ResourceUsage {
  double step_ms = 0, forward_ms = 0, load_ms = 0;
  int64_t idle_bytes = 0, peak_bytes = 0, down_bytes = 0, down_wire_bytes = 0, mirror_bytes = 0;
};

struct Update {
  std::string run;
  int64_t round = 0;
  std::string device, nonce, tier, model_version;
  int64_t samples = 0;
  Scalars metrics;
  ResourceUsage profile;
  std::string codec;
  int64_t codec_version = 0;
  Bytes tensors;
};

struct UpdateChunk {
  static constexpr const char* kContext = "update";
  std::string nonce, sha256;
  int64_t index = 0, count = 0, size = 0;
  std::string_view data;
};

struct Decline {
  static constexpr const char* kContext = "decline";
  int64_t round = 0;
  std::string nonce, reason, text;
};

// ProtocolError if it is malformed, or of another version: the text names both.
template <typename Message>
Message decode(std::string_view payload);
template <>
Round decode<Round>(std::string_view payload);
template <>
Task decode<Task>(std::string_view payload);
template <>
Ack decode<Ack>(std::string_view payload);
Update decode_update(std::string_view data);

Bytes encode(const Status& message);
Bytes encode(const Hello& message);
Bytes encode(const Progress& message);
Bytes encode(const Update& message);
Bytes encode(const UpdateChunk& message);
Bytes encode(const Decline& message);

// `v` of whatever message it is.
int64_t version_of(std::string_view payload, const char* name);

}  // namespace edgefl
