// Topic names and client ids (docs/protocol.md, Topics).
#pragma once

#include <cstdint>
#include <string>

#include "wire/blob_ref.h"

namespace edgefl {

constexpr int64_t kNoShard = -1;

// `name` if it may be part of a topic, else ConfigError.
std::string checked_name(const std::string& kind, const std::string& name);

struct Topics {
  std::string root, below;  // "edgefl/v1/demo", "edgefl/v1/demo/devices/phone-7"
  Topics(const std::string& federation, const std::string& device);

  std::string current_round() const { return root + "/rounds/current"; }
  std::string blobs() const { return root + "/blobs/"; }
  std::string blob_chunk(const std::string& sha256, int64_t index) const { return blobs() + sha256 + "/" + std::to_string(index); }
  std::string status() const { return below + "/status"; }
  std::string hello() const { return below + "/hello"; }
  std::string progress() const { return below + "/progress"; }
  std::string tasks() const { return below + "/tasks"; }
  std::string acks() const { return below + "/acks"; }
  std::string declines() const { return below + "/declines"; }
  std::string update(int64_t round, int64_t index, int64_t shard) const;
};

// 23 letters that only the holder of `secret` can compute; with `readable`, for a broker that binds ids to users,
// `edgefl:ROLE:FEDERATION:NAME`, or a digest of it if that is too long.
std::string client_id(const Bytes& secret, const std::string& role, const std::string& federation, const std::string& name, bool readable);

// Bytes of an MQTT 3.1.1 PUBLISH packet.
int64_t publish_bytes(const std::string& topic, size_t payload, int qos);

}  // namespace edgefl
