// The local samples of a device, as they lie there, and as a bundle wants them.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "edgefl_data.h"
#include "wire/errors.h"
#include "wire/manifest.h"
#include "wire/tensor.h"

namespace edgefl {

using Indices = std::vector<int64_t>;

// Samples as the manifest wants them, read row by row; DataError where a row cannot be read.
class FittedData {
 public:
  virtual ~FittedData() = default;
  virtual int64_t size() const = 0;                                              // rows
  virtual std::shared_ptr<FittedData> first(int64_t rows) const = 0;             // the first so many; 0: all
  virtual std::shared_ptr<FittedData> chosen(const Indices& at) const = 0;       // the rows with these numbers
  virtual Tensor rows(const Indices& indices) const = 0;                         // x: (n, *shape), in DataSpec::dtype
  virtual Tensor labels(const Indices& indices) const = 0;                       // (n, *label), int64 or float32
  virtual bool has_other(const std::string& name) const = 0;
  virtual Tensor other(const std::string& name, const Indices& indices) const = 0;
  virtual Tensors facts() const = 0;                                             // "class_counts", where labels are classes
  virtual std::vector<int64_t> lengths() const = 0;                              // tokens of each row, at least 1
  virtual std::string skipped() const = 0;                                       // which rows were left out, for people
};

// What of a bundle files are read by.
struct DataParts {
  std::function<Bytes(const BlobRef&)> blob;                                     // a tokenizer
  std::function<std::function<Tensor(const Tensor&)>(const std::string&)> graph; // one that makes samples, such as features
  std::function<void()> between = nullptr;                                       // before each file: throws if the round is over
};

// Flags of the held-out rows of a source, and all that they depend on.
struct HeldOutRows {
  std::string key;
  std::vector<bool> flags;
};

class DataSource {
 public:
  virtual ~DataSource() = default;
  virtual std::string name() const = 0;  // for people
  virtual int64_t size() const = 0;      // samples, as far as that is known before a bundle says how they are read
  // DataError says what differs.
  virtual std::shared_ptr<FittedData> fitted(const Manifest& manifest, const DataParts& parts) const = 0;
  // Changes when rows are added, removed or replaced; costs far less than to read all rows as the model does.
  virtual std::string state() const = 0;

  mutable HeldOutRows held_out;  // those that fit_rows computed last
};

enum class BadRows { refuse, skip };

// An npz, npy or idx; or files that become samples as a bundle says: a folder for each class, CSV, JSON lines.
// DataError if it is none or cannot be read.
std::shared_ptr<DataSource> open_source(const std::string& path, BadRows bad);

// The caller's own; takes over `release`.
std::shared_ptr<DataSource> callback_source(const edgefl_data_source& source);

}  // namespace edgefl
