#include "data/readers/class_files.h"

#include <utility>

#include "data/convert.h"
#include "data/files/images.h"
#include "data/files/mapped_file.h"
#include "data/files/npy.h"

namespace edgefl {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kMostBytes = int64_t{1} << 28;  // of one image as a sample: a manifest may say anything

// A sample as the model reads it: files may hold integers and floats, and only integers are scaled.
Tensor array_sample(const fs::path& path, const DataSpec& spec) {
  Tensor found;
  try {
    auto file = std::make_shared<MappedFile>(path.string());
    found = npy_tensor(file->text(), path.string());
  } catch (const DataError& error) {
    throw BadRow(std::string("cannot be read: ") + error.what());
  }
  Shape grey{1};
  grey.insert(grey.end(), found.shape.begin(), found.shape.end());
  if (found.shape != spec.shape && grey != spec.shape) {
    throw BadRow("the sample has shape " + shown(found.shape) + ", the model takes " + shown(spec.shape));
  }
  if (!dtype_integers(found.dtype) && found.dtype != spec.dtype) {
    throw BadRow("the sample is " + std::string(dtype_name(found.dtype)) + ", the model takes " +
                 std::string(dtype_name(spec.dtype)) + " or integers to be scaled");
  }
  found.shape = spec.shape;
  Tensor one = found;
  one.shape.insert(one.shape.begin(), 1);
  const RowsPtr row = rows_of(std::move(one));
  if (dtype_floats(found.dtype) && !all_finite(*row, found.dtype)) {
    throw BadRow("the sample has a value that is NaN or infinite");
  }
  if (dtype_integers(spec.dtype)) {
    const std::string wrong = bad_value("the sample", *row, 0, spec.below);
    if (!wrong.empty()) throw BadRow(wrong);
    if (spec.below == 0 && !holds(spec.dtype, range_of(*row))) {
      throw BadRow("the sample has values beyond what " + std::string(dtype_name(spec.dtype)) + " holds");
    }
  }
  return as_read(std::move(found), spec);
}

}  // namespace

Samples read_arrays(const Reading& reading, const std::vector<FoundFile>& files) {
  const auto decode = [spec = reading.spec](const fs::path& path) { return array_sample(path, spec); };
  return reading.decoded(reading.by_folder(files), reading.spec.dtype, decode);
}

Samples read_images(const Reading& reading, const ImageSpec& reader, const std::vector<FoundFile>& files) {
  const Shape& shape = reading.spec.shape;
  const bool colours = shape.size() == 3 && (shape[0] == 1 || shape[0] == 3);
  if (!colours || shape[1] < 1 || shape[2] < 1 || elements(shape) > kMostBytes) {
    throw DataError(reading.source + ": images become samples of shape (1, H, W) or (3, H, W), the model takes " + shown(shape) +
                    ": give arrays (.npz)");
  }
  if (!reads_images()) {
    throw DataError(reading.source + " has images, and this agent was built without libpng and libjpeg: give arrays (.npz), or use the "
                    "Python agent (edgefl device)");
  }
  return reading.decoded(reading.by_folder(files), DType::u8, [shape, reader](const fs::path& path) {
    if (kOtherImages.count(ending(path)) != 0) throw BadRow("is no PNG or JPEG but " + path.extension().string() + ": convert it");
    try {
      return image_sample(MappedFile(path.string()).text(), shape, reader.white);
    } catch (const DataError& error) {
      throw BadRow(std::string("cannot be read: ") + error.what());
    }
  });
}

}  // namespace edgefl
