#include "data/fitted.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "data/convert.h"

namespace edgefl {
namespace {

constexpr int64_t kBlock = 1024;  // rows that are looked at together

class Fitted : public FittedData {
 public:
  Fitted(std::shared_ptr<const FittedRows> rows, int64_t count) : rows_(std::move(rows)), count_(count) {}

  int64_t size() const override { return count_; }

  std::shared_ptr<FittedData> first(int64_t rows) const override {
    return std::make_shared<Fitted>(rows_, rows == 0 ? count_ : std::min(rows, count_));
  }

  std::shared_ptr<FittedData> chosen(const Indices& at) const override {
    FittedRows own = *rows_;
    own.x = picked_rows(own.x, at);
    own.y = picked_rows(own.y, at);
    for (auto& [name, rows] : own.others) rows = picked_rows(rows, at);
    return fitted_data(std::move(own));
  }

  Tensor rows(const Indices& indices) const override { return as_read(rows_->x->picked(indices), rows_->spec); }

  Tensor labels(const Indices& indices) const override {
    return converted(rows_->y->picked(indices), rows_->label.dtype);
  }

  bool has_other(const std::string& name) const override { return rows_->others.count(name) != 0; }

  Tensor other(const std::string& name, const Indices& indices) const override {
    const auto& wanted = rows_->spec.others;
    const auto input = std::find_if(wanted.begin(), wanted.end(), [&](const Input& each) { return each.name == name; });
    return converted(rows_->others.at(name)->picked(indices), input->dtype);
  }

  Tensors facts() const override {
    if (rows_->label.floats() || !dtype_integers(rows_->y->dtype)) return {};
    Tensor counts(DType::i64, {rows_->spec.classes});
    in_blocks(*rows_->y, [&](int64_t, const Tensor& rows) {
      for (const int64_t *at = rows.as<int64_t>(), *end = at + rows.count(); at < end; ++at) {
        if (rows_->label.ignored == *at) continue;
        if (*at < 0 || *at >= rows_->spec.classes) throw DataError("the labels of the local data have changed while they were read: they have " + std::to_string(*at));
        ++counts.as<int64_t>()[*at];
      }
    });
    return {{"class_counts", std::move(counts)}};
  }

  std::vector<int64_t> lengths() const override {
    const DataSpec& spec = rows_->spec;
    const int64_t whole = spec.shape.empty() ? 1 : spec.shape.front();
    std::vector<int64_t> found(static_cast<size_t>(count_), whole);
    if (spec.below == 0 || spec.shape.size() != 1) return found;
    in_blocks(*rows_->x, [&](int64_t first, const Tensor& rows) {
      for (int64_t row = 0; row < rows.shape.front(); ++row) {
        const int64_t* tokens = rows.as<int64_t>() + row * whole;
        int64_t& length = found[static_cast<size_t>(first + row)];
        while (length > 1 && tokens[length - 1] == 0) --length;
      }
    });
    return found;
  }

  std::string skipped() const override { return rows_->skipped; }

 private:
  // Calls `use(number of the first, rows as int64)` for all rows, some at a time.
  template <typename Use>
  void in_blocks(const Rows& rows, Use use) const {
    for (int64_t first = 0; first < count_; first += kBlock) {
      Indices block(static_cast<size_t>(std::min(kBlock, count_ - first)));
      std::iota(block.begin(), block.end(), first);
      use(first, converted(rows.picked(block), DType::i64));
    }
  }

  std::shared_ptr<const FittedRows> rows_;
  int64_t count_;
};

}  // namespace

LabelSpec LabelSpec::of(const Manifest& manifest) {
  std::vector<std::string> names;
  for (const Phase& phase : manifest.phases) names.push_back(phase.graph);
  names.push_back(manifest.evaluate);
  for (const std::string& name : names) {
    for (const Port& port : manifest.graph(name).inputs_of("batch")) {
      const std::string label = port.label();
      if (label.size() < 2 || label.compare(label.size() - 2, 2, ".y") != 0) continue;
      return {Shape(port.shape.begin() + (port.shape.empty() ? 0 : 1), port.shape.end()), port.dtype, port.ignored};
    }
  }
  return {};
}

RowsPtr LabelSpec::shaped(RowsPtr y, const std::string& source) const {
  if (shape == Shape{1} && y->shape.empty()) y = reshaped(std::move(y), {1});
  if (y->shape != shape) {
    const std::string wanted = shape.empty() ? "one number" : std::string(dtype_name(dtype)) + " " + shown(shape);
    throw DataError(source + ": labels have shape " + shown(y->all()) + ", the model takes " + wanted + " per sample");
  }
  return y;
}

RowsPtr LabelSpec::fitted(RowsPtr y, int64_t classes, const std::string& source) const {
  y = shaped(std::move(y), source);
  if (floats()) {
    if (!all_finite(*y, dtype)) {
      throw DataError(source + ": labels are not finite, the model takes finite numbers");
    }
    return y;
  }
  const bool whole = dtype_integers(y->dtype);
  const Range found = whole ? range_of(*y, ignored) : Range{};
  if (!whole || (!found.none() && (found.least < 0 || found.most >= classes || found.beyond))) {
    const Range all = whole ? range_of(*y) : Range{};
    const std::string ends =
        whole ? " from " + std::to_string(all.least) + " to " + std::to_string(all.most) : std::string();
    const std::string beside = ignored ? ", or " + std::to_string(*ignored) + " for none" : std::string();
    throw DataError(source + ": labels are " + std::string(dtype_name(y->dtype)) + ends + ", the model takes " +
                    "integers from 0 to " + std::to_string(classes - 1) + beside);
  }
  return y;
}

std::shared_ptr<FittedData> fitted_data(FittedRows rows) {
  const int64_t count = rows.y->count;
  return std::make_shared<Fitted>(std::make_shared<FittedRows>(std::move(rows)), count);
}

}  // namespace edgefl
