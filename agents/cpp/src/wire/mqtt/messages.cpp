#include "wire/mqtt/messages.h"

#include "wire/errors.h"
#include "wire/packing.h"
#include "wire/printable.h"
#include "wire/mqtt/versions.h"

namespace edgefl {
namespace {

MapOut message() {
  MapOut out;
  out.integer("v", 1);
  return out;
}

Bytes encode(const Conditions& conditions) {
  MapOut out;
  if (!conditions.power.empty()) out.text("power", conditions.power);
  if (!conditions.link.empty()) out.text("link", conditions.link);
  if (!conditions.thermal.empty()) out.text("thermal", conditions.thermal);
  if (conditions.available) out.flag("available", *conditions.available);
  return out.done();
}

Bytes encode(const ResourceUsage& profile) {
  MapOut out;
  out.number("step_ms", profile.step_ms).number("forward_ms", profile.forward_ms).number("load_ms", profile.load_ms);
  out.integer("idle_bytes", profile.idle_bytes).integer("peak_bytes", profile.peak_bytes);
  out.integer("down_bytes", profile.down_bytes).integer("down_wire_bytes", profile.down_wire_bytes);
  if (profile.mirror_bytes != 0) out.integer("mirror_bytes", profile.mirror_bytes);
  return out.done();
}

ResourceUsage read_profile(const Packable& value) {
  Fields fields(value, "ResourceUsage");
  return {fields.number("step_ms"),      fields.number("forward_ms"),   fields.number("load_ms"),          fields.integer("idle_bytes"),
          fields.integer("peak_bytes"), fields.integer("down_bytes"), fields.integer("down_wire_bytes"), fields.integer("mirror_bytes", 0)};
}

struct Stored {
  static constexpr const char* kName = "Update";
  Update update;
};

}  // namespace

int64_t version_of(std::string_view payload, const char* name) {
  try {
    const Packed packed(payload);
    return Fields(packed.root(), name).integer("v", 1);
  } catch (const ProtocolError& error) {
    throw ProtocolError(std::string(name) + " message is malformed: " + error.what());
  }
}

template <>
Task decode<Task>(std::string_view payload) {
  return read_message<Task>(payload, {1}, [](const Fields& fields) {
    Task task;
    task.run = fields.text("run");
    task.round = fields.integer("round");
    task.tier = fields.text("tier");
    task.seed = fields.integer("seed");
    task.nonce = fields.text("nonce");
    task.samples = fields.integer("samples", 0);
    task.ask = fields.flag("ask", false);
    task.progress_s = fields.number("progress_s", 0.0);
    const int64_t shard = fields.integer("shard", kNoShard);
    task.shard = shard >= 0 ? shard : kNoShard;
    return task;
  });
}

template <>
Ack decode<Ack>(std::string_view payload) {
  return read_message<Ack>(payload, {1}, [](const Fields& fields) {
    Ack ack;
    ack.round = fields.integer("round");
    ack.nonce = fields.text("nonce");
    ack.status = fields.text("status");
    if (ack.status != "accepted" && ack.status != "missing" && ack.status != "rejected")
      throw ProtocolError("Ack.status is " + in_quotes(ack.status) + ", not accepted, missing or rejected");
    ack.missing = fields.integers("missing", false);
    ack.reason = fields.text("reason", "");
    ack.text = fields.text("text", "");
    ack.sha256 = fields.text("sha256", "");
    if (fields.has("later_s")) ack.later_s = fields.number("later_s");
    return ack;
  });
}

Update decode_update(std::string_view data) {
  return read_message<Stored>(data, {1}, [](const Fields& fields) {
    Stored stored;
    Update& update = stored.update;
    update.run = fields.text("run");
    update.round = fields.integer("round");
    update.device = fields.text("device");
    update.nonce = fields.text("nonce");
    update.tier = fields.text("tier");
    update.model_version = fields.text("model_version");
    update.samples = fields.integer("samples");
    update.metrics = fields.scalars("metrics");
    update.profile = read_profile(fields.at("profile"));
    update.codec = fields.text("codec");
    update.codec_version = fields.integer("codec_version");
    update.tensors = fields.bytes("tensors");
    return stored;
  }).update;
}

Bytes encode(const Status& status) { return message().flag("online", status.online).done(); }

Bytes encode(const Hello& hello) {
  MapOut out = message();
  out.text("agent", hello.agent).integer("memory_bytes", hello.memory_bytes).integer("cores", hello.cores).integer("samples", hello.samples);
  out.raw("engines", packed_texts(hello.engines)).text("tier", hello.tier).text("token", hello.token).bytes("proof", hello.proof);
  if (hello.conditions.known()) out.raw("conditions", encode(hello.conditions));
  if (hello.again) out.flag("again", true);
  return out.done();
}

Bytes encode(const Progress& progress) {
  return message()
      .integer("round", progress.round)
      .text("tier", progress.tier)
      .text("stage", progress.stage)
      .integer("step", progress.step)
      .integer("steps", progress.steps)
      .number("loss", progress.loss)
      .number("step_ms", progress.step_ms)
      .integer("peak_bytes", progress.peak_bytes)
      .integer("down_bytes", progress.down_bytes)
      .integer("up_bytes", progress.up_bytes)
      .done();
}

Bytes encode(const Update& update) {
  return message()
      .text("run", update.run)
      .integer("round", update.round)
      .text("device", update.device)
      .text("nonce", update.nonce)
      .text("tier", update.tier)
      .text("model_version", update.model_version)
      .integer("samples", update.samples)
      .raw("metrics", packed_scalars(update.metrics))
      .raw("profile", encode(update.profile))
      .text("codec", update.codec)
      .integer("codec_version", update.codec_version)
      .bytes("tensors", update.tensors)
      .done();
}

Bytes encode(const UpdateChunk& chunk) {
  return message()
      .text("nonce", chunk.nonce)
      .text("sha256", chunk.sha256)
      .integer("index", chunk.index)
      .integer("count", chunk.count)
      .integer("size", chunk.size)
      .bytes("data", chunk.data)
      .done();
}

Bytes encode(const Decline& decline) {
  return message().integer("round", decline.round).text("nonce", decline.nonce).text("reason", decline.reason).text("text", decline.text).done();
}

}  // namespace edgefl
