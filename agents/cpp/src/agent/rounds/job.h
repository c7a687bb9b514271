// The round a device works on, as it is kept in the store: a task with what the announcement says about its tier.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "wire/mqtt/messages.h"

namespace edgefl {

struct Job {
  std::string run;
  int64_t round = 0;
  std::string tier;
  int64_t seed = 0;
  std::string nonce;
  int64_t samples = 0;
  std::string model_version;
  BlobRef bundle;
  Units units;
  Scalars hyper;
  Bytes signature;
  int64_t base = 0;
  std::string format = "onnx";  // of the graphs in `bundle`
  int64_t tries = 0;            // processes that began to work on it
  bool ask = false;
  double progress_s = 0.0;
  int64_t shard = kNoShard;

  // The job of a task for an engine that runs `format`; nothing while the announcement is of other rounds or does not offer
  // the tier. One that is offered in other formats only is a job in one of these, to be declined.
  static std::optional<Job> of(const Task& task, const Round& announced, const std::string& format);
  // This job as its round is announced now.
  std::optional<Job> following(const Round& announced, const std::string& format) const;
  // Whether work that was begun on `other` can go on: the same bundle and weights.
  bool same_content(const Job& other) const;
  std::string weights() const;  // names the weights that the round gives to devices
  std::string record_tag() const;
  const std::vector<BlobRef>& line(const std::string& unit) const;  // the whole blob and its patches; empty if not announced
  bool is_open(const Round& announced) const { return run == announced.run && announced.takes(round); }
  bool is_replaced(const std::optional<Task>& task) const;
};

Bytes encode(const Job& job);
std::optional<Job> decode_job(std::string_view data);  // nothing if another release wrote it

}  // namespace edgefl
