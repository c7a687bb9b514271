#include "data/arrays.h"

#include <utility>

#include "data/fitted.h"

namespace edgefl {
namespace {

class Arrays : public DataSource {
 public:
  Arrays(NamedRows arrays, std::string name, BadRows bad) : others_(std::move(arrays)), name_(std::move(name)), bad_(bad) {
    x_ = taken("x");
    y_ = taken("y");
  }

  std::string name() const override { return name_; }
  int64_t size() const override { return y_->count; }
  std::string state() const override {
    std::string sums = std::to_string(checksum(*x_)) + " " + std::to_string(checksum(*y_));
    for (const auto& [name, rows] : others_) sums += " " + std::to_string(checksum(*rows));
    return sums;
  }

  void check() const {
    if (!x_->whole || !y_->whole) throw DataError(name_ + " should hold arrays of samples and labels, found single values");
    if (x_->count != y_->count || y_->count == 0) {
      throw DataError(name_ + " has " + std::to_string(x_->count) + " samples and " + std::to_string(y_->count) +
                      " labels: it needs as many, and at least one");
    }
    if (bad_ == BadRows::refuse) {
      check_finite("x", *x_, name_);
      check_finite("y", *y_, name_);
    }
  }

  std::shared_ptr<FittedData> fitted(const Manifest& manifest, const DataParts&) const override {
    const DataSpec& spec = manifest.data;
    const LabelSpec label = LabelSpec::of(manifest);
    RowsPtr x = shaped(spec);
    NamedRows others;
    for (const Input& each : spec.others) others[each.name] = other(each);
    if (bad_ == BadRows::skip) return without_bad_rows(x, others, spec, label);
    if (dtype_integers(spec.dtype)) check_below("samples", *x, spec.below, name_);
    for (const Input& each : spec.others) {
      if (dtype_floats(each.dtype)) {
        check_finite(each.name, *others[each.name], name_);
      } else {
        check_below(each.name, *others[each.name], each.below, name_);
      }
    }
    return fitted_data({x, label.fitted(y_, spec.classes, name_), others, spec, label, ""});
  }

 private:
  RowsPtr taken(const std::string& name) {
    const auto found = others_.find(name);
    if (found == others_.end()) {
      std::string there;
      for (const auto& [key, rows] : others_) there += (there.empty() ? "" : ", ") + key;
      throw DataError(name_ + " has no array " + name + (there.empty() ? "" : "; it has " + there) +
                      ": samples are called x, their labels y");
    }
    RowsPtr rows = found->second;
    others_.erase(found);
    return rows;
  }

  // x in the shape that the model takes, and of a type that it can read.
  RowsPtr shaped(const DataSpec& spec) const {
    RowsPtr x = x_;
    Shape grey{1};
    grey.insert(grey.end(), x->shape.begin(), x->shape.end());
    if (x->shape != spec.shape && grey == spec.shape) x = reshaped(x, grey);  // stored without its single channel
    if (x->shape != spec.shape) {
      throw DataError(name_ + ": samples have shape " + shown(x->shape) + ", the model takes " + shown(spec.shape) +
                      ": convert the data, or join a federation that trains on it");
    }
    if (x->dtype != spec.dtype && !dtype_integers(x->dtype)) {
      const std::string wanted(dtype_name(spec.dtype));
      throw DataError(name_ + ": samples are " + std::string(dtype_name(x->dtype)) + ", the model takes " + wanted +
                      " or integers to be scaled: convert them (astype('" + wanted + "'))");
    }
    if (dtype_integers(spec.dtype) && spec.below == 0) check_range("samples", *x, spec.dtype, name_);
    return x;
  }

  RowsPtr other(const Input& wanted) const {
    const auto found = others_.find(wanted.name);
    Shape all{y_->count};
    all.insert(all.end(), wanted.shape.begin(), wanted.shape.end());
    const std::string takes = std::string(dtype_name(wanted.dtype)) + " " + shown(all);
    if (found == others_.end()) {
      throw DataError(name_ + " has no array '" + wanted.name + "', which the model reads of each sample beside x: " + takes);
    }
    const RowsPtr& rows = found->second;
    if (rows->all() != all || (dtype_floats(rows->dtype) && !dtype_floats(wanted.dtype))) {
      throw DataError(name_ + ": " + wanted.name + " is " + std::string(dtype_name(rows->dtype)) + " " +
                      shown(rows->all()) + ", the model takes " + takes);
    }
    if (dtype_integers(wanted.dtype) && wanted.below == 0) check_range(wanted.name, *rows, wanted.dtype, name_);
    return rows;
  }

  std::shared_ptr<FittedData> without_bad_rows(const RowsPtr& x, const NamedRows& others, const DataSpec& spec,
                                               const LabelSpec& label) const {
    const RowsPtr y = label.shaped(y_, name_);
    const int64_t tokens = dtype_integers(spec.dtype) ? spec.below : 0;
    Problems problems(BadRows::skip);
    Indices kept;
    for (int64_t row = 0; row < y->count; ++row) {
      std::string wrong;
      for (const Input& each : spec.others) {
        if (wrong.empty()) wrong = bad_value(each.name, *others.at(each.name), row, each.below);
      }
      if (wrong.empty()) wrong = bad_value("x", *x, row, tokens);
      if (wrong.empty()) wrong = bad_value("y", *y, row, label.floats() ? 0 : spec.classes, label.ignored);
      if (wrong.empty()) {
        kept.push_back(row);
      } else {
        problems.add(name_ + ", row " + std::to_string(row), wrong);
      }
    }
    problems.check_some(static_cast<int64_t>(kept.size()), name_);
    NamedRows beside;
    for (const auto& [name, rows] : others) beside[name] = picked_rows(rows, kept);
    const RowsPtr labels = label.fitted(picked_rows(y, kept), spec.classes, name_);
    return fitted_data({picked_rows(x, kept), labels, beside, spec, label, problems.shown()});
  }

  NamedRows others_;
  std::string name_;
  BadRows bad_;
  RowsPtr x_, y_;
};

// Checked when a bundle first asks: its rows may be costly to read.
class Unchecked : public Arrays {
 public:
  using Arrays::Arrays;
  std::shared_ptr<FittedData> fitted(const Manifest& manifest, const DataParts& parts) const override {
    check();
    return Arrays::fitted(manifest, parts);
  }
};

}  // namespace

std::shared_ptr<DataSource> array_source(NamedRows arrays, std::string name, BadRows bad, bool checked) {
  if (!checked) return std::make_shared<Unchecked>(std::move(arrays), std::move(name), bad);
  auto made = std::make_shared<Arrays>(std::move(arrays), std::move(name), bad);
  made->check();
  return made;
}

}  // namespace edgefl
