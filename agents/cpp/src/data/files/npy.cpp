#include "data/files/npy.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "data/files/zip.h"
#include "wire/errors.h"

namespace edgefl {
namespace {

constexpr uint64_t kMostUnfolded = uint64_t{1} << 34;

struct Header {
  DType dtype = DType::f32;
  bool swapped = false;  // the other byte order
  bool columns = false;  // Fortran's order
  Shape shape;
  size_t at = 0;  // of the numbers
};

[[noreturn]] void refuse(const std::string& name, const std::string& why) {
  throw DataError(name + " is no array that can be read: " + why + "; write it with numpy.save");
}

DType dtype_of_code(const std::string& code, const std::string& name) {
  static const std::map<std::string, DType> known = {
      {"b1", DType::boolean}, {"i1", DType::i8},  {"i2", DType::i16}, {"i4", DType::i32},
      {"i8", DType::i64},     {"u1", DType::u8},  {"u2", DType::u16}, {"u4", DType::u32},
      {"u8", DType::u64},     {"f2", DType::f16}, {"f4", DType::f32}, {"f8", DType::f64}};
  const auto found = known.find(code);
  if (found == known.end()) refuse(name, "its entries are of type '" + code + "', which are no numbers of this agent");
  return found->second;
}

// What stands between `open` and `close` behind `key`; "" for nothing.
std::string value_of(const std::string& text, const std::string& key, const char* open, const char* close) {
  const size_t at = text.find(key);
  const size_t start = at == std::string::npos ? at : text.find(open, at + key.size());
  const size_t end = start == std::string::npos ? start : text.find(close, start + 1);
  return end == std::string::npos ? "" : text.substr(start + 1, end - start - 1);
}

Header header_of(std::string_view bytes, const std::string& name) {
  if (bytes.size() < 12 || bytes.substr(0, 6) != "\x93NUMPY") refuse(name, "it does not begin as one");
  const bool wide = bytes[6] != 1;  // four bytes for the header's length in place of two
  const auto byte = [&bytes](size_t at) { return static_cast<size_t>(static_cast<uint8_t>(bytes[at])); };
  const size_t length = byte(8) | byte(9) << 8 | (wide ? byte(10) << 16 | byte(11) << 24 : 0);
  const size_t at = (wide ? 12U : 10U) + length;
  if (at > bytes.size() || length > 65536) refuse(name, "its header is cut short");
  const std::string text(bytes.substr(at - length, length));
  const std::string code = value_of(text, "'descr':", "'", "'"), order = value_of(text, "'fortran_order':", " ", ","),
                    axes = value_of(text, "'shape':", "(", ")");
  if (code.size() < 3 || std::string("<>|=").find(code[0]) == std::string::npos || (order != "True" && order != "False")) {
    refuse(name, "its entries are no plain numbers");
  }
  Header header{dtype_of_code(code.substr(1), name), code[0] == '>', order == "True", {}, at};
  int64_t size = -1;
  for (const char each : axes + ",") {
    if (each >= '0' && each <= '9' && size < INT64_MAX / 16) {
      size = std::max<int64_t>(size, 0) * 10 + (each - '0');
    } else if (each == ',' && size >= 0) {
      header.shape.push_back(std::exchange(size, -1));
    } else if (each != ' ' && each != ',') {
      refuse(name, "its shape is (" + axes + ")");
    }
  }
  const int64_t count = elements(header.shape);
  const auto left = static_cast<int64_t>((bytes.size() - at) / dtype_bytes(header.dtype));
  if (count > left) refuse(name, "it announces shape " + shown(header.shape) + " and holds " + std::to_string(left) + " entries");
  return header;
}

void swap_bytes(Tensor& values) {
  const size_t size = dtype_bytes(values.dtype);
  if (size == 1) return;
  for (size_t at = 0; at < values.nbytes(); at += size) std::reverse(values.data.begin() + at, values.data.begin() + at + size);
}

// Column order to row order.
Tensor turned(const Tensor& columns) {
  Tensor rows(columns.dtype, columns.shape);
  const size_t size = dtype_bytes(columns.dtype), rank = columns.shape.size();
  std::vector<int64_t> place(rank, 0);
  for (int64_t at = 0, count = columns.count(); at < count; ++at) {
    int64_t from = 0;
    for (size_t axis = rank; axis-- > 0;) from = from * columns.shape[axis] + place[axis];
    std::memcpy(rows.data.data() + at * size, columns.data.data() + from * size, size);
    for (size_t axis = rank; axis-- > 0 && ++place[axis] == columns.shape[axis];) place[axis] = 0;
  }
  return rows;
}

Tensor loaded(std::string_view bytes, const Header& header) {
  Tensor values(header.dtype, header.shape);
  std::memcpy(values.data.data(), bytes.data() + header.at, values.nbytes());
  if (header.swapped) swap_bytes(values);
  return header.columns ? turned(values) : values;
}

}  // namespace

Tensor npy_tensor(std::string_view bytes, const std::string& name) { return loaded(bytes, header_of(bytes, name)); }

RowsPtr read_npy(std::string bytes, const std::string& name) { return rows_of(npy_tensor(bytes, name)); }

RowsPtr read_npy(std::string_view bytes, std::shared_ptr<const MappedFile> file, const std::string& name) {
  const Header header = header_of(bytes, name);
  if (header.swapped || (header.columns && header.shape.size() > 1)) return rows_of(loaded(bytes, header));
  const auto* data = reinterpret_cast<const std::byte*>(bytes.data()) + header.at;
  const MappedFile* mapped = file.get();
  return mapped_rows(std::move(file), data, header.dtype, header.shape, [mapped] { mapped->released(); });
}

RowsPtr read_idx(const std::string& path) {
  static const std::map<int, DType> known = {{0x08, DType::u8},  {0x09, DType::i8},  {0x0B, DType::i16},
                                             {0x0C, DType::i32}, {0x0D, DType::f32}, {0x0E, DType::f64}};
  auto file = std::make_shared<MappedFile>(path);
  const bool packed = path.size() > 3 && path.compare(path.size() - 3, 3, ".gz") == 0;
  const std::string unfolded = packed ? inflated(file->text(), true, kMostUnfolded, path) : std::string();
  const std::string_view bytes = packed ? std::string_view(unfolded) : file->text();
  const auto byte = [&](size_t at) { return static_cast<uint8_t>(bytes[at]); };
  if (bytes.size() < 4 || byte(0) != 0 || byte(1) != 0 || known.count(byte(2)) == 0) {
    throw DataError(path + " is not an idx file: its first bytes are not those of one");
  }
  const DType dtype = known.at(byte(2));
  const size_t start = 4 + 4 * static_cast<size_t>(byte(3));
  Shape shape;
  for (size_t at = 4; at < start && at + 4 <= bytes.size(); at += 4) {
    shape.push_back(static_cast<int64_t>(byte(at)) << 24 | byte(at + 1) << 16 | byte(at + 2) << 8 | byte(at + 3));
  }
  const int64_t held = static_cast<int64_t>(bytes.size()) - static_cast<int64_t>(start);
  if (shape.size() != byte(3) || held % static_cast<int64_t>(dtype_bytes(dtype)) != 0 ||
      elements(shape) != held / static_cast<int64_t>(dtype_bytes(dtype))) {
    throw DataError(path + " announces shape " + shown(shape) + " and holds " + std::to_string(held) + " bytes; fetch it again");
  }
  if (!packed && dtype_bytes(dtype) == 1) {
    const MappedFile* mapped = file.get();
    return mapped_rows(file, file->data() + start, dtype, shape, [mapped] { mapped->released(); });
  }
  Tensor values(dtype, shape);
  std::memcpy(values.data.data(), bytes.data() + start, values.nbytes());
  swap_bytes(values);
  return rows_of(std::move(values));
}

}  // namespace edgefl
