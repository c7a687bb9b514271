// edgefl-round: one round of a bundle in this process, without a broker; its update is written to a file, its figures are
// printed as JSON.
#include <unistd.h>

#include <filesystem>
#include <iostream>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "data/split.h"
#include "data/source.h"
#include "engine/memory.h"
#include "offline.h"
#include "wire/bytes/safetensors.h"

namespace {

using nlohmann::json;

struct Options {
  std::string bundle, weights, data, out, carry, carry_out, folder = ".";
  uint64_t seed = 0;
  int64_t samples = 0, checkpoint_steps = 5, stop_at = 0;
  int threads = 1;
  bool skip = false;
  std::vector<std::string> hyper;
};

Options options_of(int argc, char** argv, CLI::App& app) {
  Options options;
  app.add_option("--bundle", options.bundle, "The bundle's file")->required();
  app.add_option("--weights", options.weights, "Weights, as safetensors")->required();
  app.add_option("--data", options.data, "The local samples")->required();
  app.add_option("--out", options.out, "Where the update is written")->required();
  app.add_option("--carry", options.carry, "What an earlier round left");
  app.add_option("--carry-out", options.carry_out, "Where what this one leaves is written");
  app.add_option("--folder", options.folder, "For records and checkpoints");
  app.add_option("--seed", options.seed, "Of batches and noise");
  app.add_option("--samples", options.samples, "The first so many rows; 0: all");
  app.add_option("--threads", options.threads, "Of the engine");
  app.add_option("--checkpoint-steps", options.checkpoint_steps, "Steps between two checkpoints");
  app.add_option("--stop-at", options.stop_at, "End the process after so many steps, as a cut of the power would");
  app.add_option("--hyper", options.hyper, "NAME=VALUE: a scalar of the round");
  app.add_flag("--skip-bad-rows", options.skip, "Leave out rows that do not fit");
  app.parse(argc, argv);
  return options;
}

edgefl::RoundIdentity identity_of(const Options& options, const edgefl::BundleFile& bundle) {
  std::vector<std::string> texts = options.hyper;
  texts.push_back(std::to_string(options.seed) + " " + std::to_string(options.samples) + (options.skip ? " skip" : ""));
  return {bundle.digest(), bundle.name(), edgefl::digest_of(texts, {options.weights, options.carry, options.data})};
}

void run(const Options& options) {
  using namespace edgefl;
  return_memory_early();
  const BundleFile bundle(options.bundle);
  const Manifest& manifest = bundle.manifest();
  const RoundIdentity identity = identity_of(options, bundle);
  const CheckpointFolder checkpoints(options.folder, identity);
  if (const std::string about = checkpoints.about_kept(); !about.empty()) std::cerr << "edgefl-round: " << about << std::endl;
  const WeightsFile weights(options.weights, manifest);
  const auto source = open_source(options.data, options.skip ? BadRows::skip : BadRows::refuse);
  const auto engine = make_engine(manifest.format(), {options.threads, options.folder});
  engine->rest();
  const int64_t idle = resident_bytes();
  const DataParts parts{[&](const BlobRef& ref) { return bundle.artifact(ref); },
                        [&](const std::string& name) {
                          const Graph& graph = manifest.graph(name);
                          return load_row_graph(*engine, graph, bundle.artifact(graph.blob));
                        }};
  const auto data = fit_rows(*source, manifest, parts);
  reset_peak();
  RoundHost host;
  host.artifact = [&](const BlobRef& ref) { return bundle.artifact(ref); };
  host.weights = [&](const std::vector<std::string>& units) { return weights.of(units); };
  int64_t made = 0;
  host.watch = [&](const StepReport& report) {
    made += report.stage == "train" ? 1 : 0;
    if (report.stage == "train" && report.step == options.stop_at + 1 && options.stop_at > 0) _exit(9);
  };
  host.kept = [&] { return checkpoints.kept(); };
  host.save = [&](int64_t step, const auto& sums, const auto& basis, const auto& names, const auto& tensor) {
    if (step % options.checkpoint_steps == 0) checkpoints.save(step, sums, basis, names, tensor);
  };
  RoundRequest request;
  request.manifest = &manifest;
  request.seed = options.seed;
  request.samples = options.samples;
  for (const std::string& each : options.hyper) {
    const size_t equals = each.find('=');
    if (equals == std::string::npos) throw ConfigError("--hyper " + each + " is no NAME=VALUE");
    request.hyper[each.substr(0, equals)] = std::stod(each.substr(equals + 1));
  }
  if (!options.carry.empty()) request.carry = load_tensors(MappedFile(options.carry).text());
  request.record_tag = identity.bundle + " " + identity.inputs;
  request.folder = options.folder;
  request.checkpoint_steps = options.checkpoint_steps;
  const RoundResult result = run_round(*engine, request, *data, host);
  write_file(options.out, dump_tensors(result.update, result.masks));
  if (!options.carry_out.empty()) write_file(options.carry_out, dump_tensors(result.carry));
  checkpoints.set_done();
  engine->rest();
  std::cout << json{{"metrics", result.metrics},      {"samples", result.samples},     {"steps", result.steps},          {"made", made},
                    {"step_ms", result.step_ms},      {"forward_ms", result.forward_ms}, {"load_ms", result.load_ms},
                    {"idle_bytes", idle},             {"peak_bytes", peak_bytes()},     {"rest_bytes", resident_bytes()},
                    {"engine", engine->name()},       {"version", engine->version()},   {"skipped", data->skipped()}}
            << std::endl;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("One round of a bundle, without a broker");
  try {
    run(options_of(argc, argv, app));
  } catch (const CLI::ParseError& error) {
    return app.exit(error);
  } catch (const std::exception& error) {
    std::cerr << "edgefl-round: " << error.what() << std::endl;
    return 1;
  }
  return 0;
}
