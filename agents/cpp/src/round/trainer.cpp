// prefix: per chunk fetch its units, run forward over the local data, write the record, drop the units
// weights of the suffix, carry -> start -> state
// per phase, per step (or batch of all rows): state, batch, data, noise, hyper -> state, metrics
// weights of the suffix, carry, state -> finish -> update, carry, metrics
#include "round/trainer.h"

#include <algorithm>
#include <limits>
#include <set>
#include <utility>

#include "engine/memory.h"
#include "round/inputs.h"
#include "round/forward.h"
#include "round/graph_loader.h"

namespace edgefl {
namespace {

using Sums = std::map<std::string, double>;

class Round {
 public:
  Round(Engine& engine, const RoundRequest& request, const FittedData& data, const RoundHost& host)
      : engine_(engine), request_(request), manifest_(*request.manifest), data_(data), host_(host),
        graphs_(engine, manifest_, host), steps_(manifest_.steps_with(data.size())),
        basis_(std::to_string(data.size()) + " rows, carry " + request.origin) {
    for (const int64_t count : steps_) total_ += count;
  }

  RoundResult run() {
    if (!manifest_.prefix.empty()) record_ = run_forward(graphs_, request_, data_, host_, forward_ms_);
    feeds_.emplace(manifest_, request_.seed, data_, hyper(), features());
    train();
    RoundResult result = finish();
    if (record_) record_->remove();
    result.samples = data_.size();
    result.steps = total_;
    result.step_ms = median_of(step_ms_);
    result.forward_ms = total_of(forward_ms_);
    result.load_ms = graphs_.load_ms;
    return result;
  }

 private:
  std::map<std::string, double> hyper() const {
    std::map<std::string, double> values = request_.hyper;
    values.insert(manifest_.hyper.begin(), manifest_.hyper.end());
    return values;
  }

  std::function<Tensor(const Indices&)> features() const {
    if (!record_) return nullptr;
    return [this](const Indices& rows) { return record_->rows(rows); };
  }

  // What a graph reads of the round's weights, and of what the previous round left (zeros if nothing did).
  Tensors kept_feeds(const Graph& graph) {
    Tensors feeds;
    const auto reads = [&graph](const char* role) {
      return std::any_of(graph.inputs.begin(), graph.inputs.end(), [role](const Port& port) { return port.role == role; });
    };
    if (reads("weights")) graphs_.give_weights(graph, manifest_.suffix, feeds);
    for (const Port& port : graph.inputs) {
      if (port.role != "carry") continue;
      const auto found = request_.carry.find(port.label());
      feeds[port.name] = found == request_.carry.end() ? Tensor(port.dtype, port.shape) : found->second;
      check_port(port, feeds[port.name]);
    }
    return feeds;
  }

  void train() {
    int64_t done = 0;
    std::optional<KeptCheckpoint> kept = host_.kept ? host_.kept() : std::nullopt;
    if (kept && kept->basis == basis_ && kept->step <= total_) {
      for (const std::string& name : kept->names) state_[name] = engine_.write(kept->tensor(name));
      done = kept->step;
      sums_ = kept->sums;
    } else {
      const Graph& start = graphs_.spec(manifest_.start);
      Tensors feeds = kept_feeds(start);
      feeds_->give(start, total_, feeds);
      check_complete(start, feeds, nullptr);
      state_ = graphs_.run_once(start, feeds, {}).state;
    }
    int64_t first = 0;
    for (size_t at = 0; at < manifest_.phases.size(); first += steps_[at++]) {
      if (first + steps_[at] > done) phase(manifest_.phases[at], first, std::max(first, done), first + steps_[at]);
    }
  }

  // Steps `from` to `to` of a phase whose first one is `first`, all counted over all phases.
  void phase(const Phase& phase, int64_t first, int64_t from, int64_t to) {
    std::map<std::string, std::unique_ptr<LoadedGraph>> loaded;  // those that were needed so far
    for (int64_t step = from; step < to; ++step) {
      if (host_.between) host_.between();
      const Graph& whole = graphs_.spec(phase.graph);
      const Graph& graph = phase.shorter.empty() ? whole : graphs_.spec(phase.graph_for(feeds_->longest(whole, step)));
      Tensors feeds;
      feeds_->give(graph, step, feeds);
      if (phase.over_data) {
        feeds_->give_pass(graph, step - first, feeds);
      } else {
        feeds_->give_batches(whole, graph, step, feeds);
      }
      check_complete(graph, feeds, [this](const std::string& name) { return state_.count(name) != 0; });
      auto& ready = loaded[graph.name];
      if (!ready) ready = graphs_.load(graph);
      Outputs outputs = graphs_.timed(*ready, feeds, state_, step_ms_);
      for (auto& [name, value] : outputs.state) state_[name] = std::move(value);
      for (const auto& [name, value] : labelled(outputs.arrays, "metric")) sums_[name] += value.scalar();
      tell(step + 1);
      keep(step + 1);
    }
    loaded.clear();
    trim_memory();
  }

  RoundResult finish() {
    const Graph& graph = graphs_.spec(manifest_.finish);
    Tensors feeds = kept_feeds(graph);
    feeds_->give(graph, total_ + 1, feeds);
    check_complete(graph, feeds, [this](const std::string& name) { return state_.count(name) != 0; });
    Outputs outputs = graphs_.run_once(graph, feeds, state_);
    RoundResult result;
    result.update = labelled(outputs.arrays, "update");
    result.carry = labelled(outputs.arrays, "carry");
    for (const Port& port : graph.outputs) {
      if (port.role == "update" && port.mask != 0) result.masks[port.label()] = port.mask;
    }
    result.metrics = means(steps_);
    for (const auto& [name, value] : labelled(outputs.arrays, "metric")) result.metrics[name] = value.scalar();
    return result;
  }

  // Of each metric, the mean over the steps that report it, where `steps` of each phase were made.
  Sums means(const std::vector<int64_t>& steps) const {
    Sums found;
    for (const auto& [name, sum] : sums_) {
      int64_t reporting = 0;
      for (size_t at = 0; at < steps.size(); ++at) {
        const Ports& outputs = graphs_.spec(manifest_.phases[at].graph).outputs;
        const std::string port = "metric." + name;
        if (std::any_of(outputs.begin(), outputs.end(), [&](const Port& each) { return each.name == port; })) {
          reporting += steps[at];
        }
      }
      found[name] = sum / static_cast<double>(std::max<int64_t>(1, reporting));
    }
    return found;
  }

  void tell(int64_t done) const {
    if (!host_.watch) return;
    std::vector<int64_t> made;
    int64_t left = done;
    for (const int64_t count : steps_) {
      made.push_back(std::min(count, left));
      left -= made.back();
    }
    const Sums now = means(made);
    const auto loss = now.find("loss");
    host_.watch({"train", done, total_, loss == now.end() ? std::numeric_limits<double>::quiet_NaN() : loss->second,
                 step_ms_.back()});
  }

  void keep(int64_t step) const {
    if (!host_.save || (step % request_.checkpoint_steps != 0 && step != total_)) return;
    std::vector<std::string> names;
    for (const auto& [name, value] : state_) names.push_back(name);
    host_.save(step, sums_, basis_, names, [this](const std::string& name) { return engine_.read(*state_.at(name)); });
  }

  Engine& engine_;
  const RoundRequest& request_;
  const Manifest& manifest_;
  const FittedData& data_;
  const RoundHost& host_;
  GraphLoader graphs_;
  std::vector<int64_t> steps_;  // of each phase
  int64_t total_ = 0;
  std::string basis_;           // what the state is made of beside the task
  std::unique_ptr<ActivationRecord> record_;
  std::optional<RoundInputs> feeds_;
  State state_;
  Sums sums_;
  std::vector<double> step_ms_, forward_ms_;
};

}  // namespace

RoundResult run_round(Engine& engine, const RoundRequest& request, const FittedData& data, const RoundHost& host) {
  const auto rows = data.first(request.samples);
  if (rows->size() == 0) throw DataError("there is no local sample to train on");
  return Round(engine, request, *rows, host).run();
}

std::function<Tensor(const Tensor&)> load_row_graph(Engine& engine, const Graph& graph, Bytes artifact) {
  if (graph.inputs.size() != 1 || graph.outputs.size() != 1) {
    throw BundleError("graph '" + graph.name +
                      "' makes samples of files, so that it reads one array and gives one; export the bundle again");
  }
  const std::shared_ptr<LoadedGraph> loaded = engine.load(graph, std::move(artifact));
  return [loaded, &graph](const Tensor& rows) {
    const Port& port = graph.inputs.front();
    check_port(port, rows);
    Outputs outputs = loaded->run({{port.name, rows}}, {});
    return std::move(outputs.arrays.at(graph.outputs.front().name));
  };
}

}  // namespace edgefl
