#include "agent/rounds/job.h"

#include <algorithm>

#include "wire/digest.h"
#include "wire/errors.h"
#include "wire/packing.h"

namespace edgefl {
namespace {

Bytes packed_units(const Units& units) {
  MapOut out;
  for (const auto& [name, line] : units) {
    std::vector<Bytes> refs;
    for (const BlobRef& ref : line) refs.push_back(packed_ref(ref));
    out.raw(name, packed_list(refs));
  }
  return out.done();
}

}  // namespace

std::optional<Job> Job::of(const Task& task, const Round& announced, const std::string& format) {
  const std::vector<std::string> offered = announced.formats_of(task.tier);
  if (task.run != announced.run || !announced.takes(task.round) || offered.empty()) return std::nullopt;
  Job job;
  job.run = task.run;
  job.round = task.round;
  job.tier = task.tier;
  job.seed = task.seed;
  job.nonce = task.nonce;
  job.samples = task.samples;
  if (task.round == announced.round) {
    job.model_version = announced.model_version;
    job.units = announced.units;
    job.hyper = announced.hyper;
  } else {
    const LiveRound& live = announced.live.at(task.round);
    job.model_version = live.model_version;
    job.units = live.units;
    job.hyper = live.hyper;
  }
  job.format = std::find(offered.begin(), offered.end(), format) != offered.end() ? format : offered[0];
  const Offer& offer = announced.offers.at(job.format);
  job.bundle = offer.bundles.at(task.tier);
  if (const auto signature = offer.signatures.find(task.tier); signature != offer.signatures.end()) job.signature = signature->second;
  job.base = announced.base;
  job.ask = task.ask;
  job.progress_s = task.progress_s;
  job.shard = task.shard;
  return job;
}

std::optional<Job> Job::following(const Round& announced, const std::string& format) const {
  auto job = Job::of({run, round, tier, seed, nonce, samples, ask, progress_s, shard}, announced, format);
  if (job) job->tries = tries;
  return job;
}

bool Job::same_content(const Job& other) const { return bundle.sha256 == other.bundle.sha256 && weights() == other.weights(); }

std::string Job::weights() const {
  Sha256 whole;
  for (const auto& [name, refs] : units) {
    std::string text = name + "=";
    for (size_t i = 0; i < refs.size(); ++i) text += (i > 0 ? "," : "") + refs[i].sha256;
    whole.add(text + "\n");
  }
  return hex(whole.done());
}

std::string Job::record_tag() const {
  return "run " + run + ", model " + model_version + " as " + weights() + ", bundle " + bundle.sha256 + ", samples " + std::to_string(samples);
}

const std::vector<BlobRef>& Job::line(const std::string& unit) const {
  static const std::vector<BlobRef> none;
  const auto found = units.find(unit);
  return found == units.end() ? none : found->second;
}

bool Job::is_replaced(const std::optional<Task>& task) const {
  return task && !task->nonce.empty() && task->run == run && task->round >= round && task->nonce != nonce;
}

Bytes encode(const Job& job) {
  return MapOut()
      .text("run", job.run)
      .integer("round", job.round)
      .text("tier", job.tier)
      .integer("seed", job.seed)
      .text("nonce", job.nonce)
      .integer("samples", job.samples)
      .text("model_version", job.model_version)
      .raw("bundle", packed_ref(job.bundle))
      .raw("units", packed_units(job.units))
      .raw("hyper", packed_scalars(job.hyper))
      .bytes("signature", job.signature)
      .integer("base", job.base)
      .text("format", job.format)
      .integer("tries", job.tries)
      .flag("ask", job.ask)
      .number("progress_s", job.progress_s)
      .integer("shard", job.shard)
      .done();
}

std::optional<Job> decode_job(std::string_view data) {
  try {
    const Packed packed(data);
    const Fields f(packed.root(), "Job");
    Job job;
    job.run = f.text("run");
    job.round = f.integer("round");
    job.tier = f.text("tier");
    job.seed = f.integer("seed");
    job.nonce = f.text("nonce");
    job.samples = f.integer("samples");
    job.model_version = f.text("model_version");
    job.bundle = read_ref(f.at("bundle"), "Job.bundle");
    f.entries("units", [&](const std::string& name, const Packable& refs) {
      for (const Packable* each : to_list(refs, "Job.units")) job.units[name].push_back(read_ref(*each, "Job.units"));
    });
    job.hyper = f.scalars("hyper");
    job.signature = f.bytes("signature", "");
    job.base = f.integer("base", 0);
    job.format = f.text("format", "onnx");
    job.tries = f.integer("tries", 0);
    job.ask = f.flag("ask", false);
    job.progress_s = f.number("progress_s", 0.0);
    job.shard = f.integer("shard", kNoShard);
    return job;
  } catch (const ProtocolError&) {
    return std::nullopt;
  }
}

}  // namespace edgefl
