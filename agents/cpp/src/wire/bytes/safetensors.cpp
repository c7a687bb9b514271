#include "wire/bytes/safetensors.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>

#include "wire/errors.h"
#include "wire/printable.h"

namespace edgefl {
namespace {

using nlohmann::json;

constexpr std::array<std::string_view, 12> kNames = {"BOOL", "I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64", "F16", "F32", "F64"};
constexpr const char* kGaps = "~gaps:";
constexpr int64_t kMostHeader = 100'000'000;  // as the library has it

[[noreturn]] void invalid(const std::string& why) {
  throw ProtocolError("tensor bytes are not valid safetensors (" + why + "); write them with a safetensors library");
}

// The rank of a type in the order in which the library writes.
int rank(DType dtype) {
  constexpr std::array<DType, 12> order = {DType::u64, DType::i64, DType::f64, DType::f32, DType::u32, DType::i32,
                                           DType::f16, DType::u16, DType::i16, DType::i8, DType::u8, DType::boolean};
  return static_cast<int>(std::find(order.begin(), order.end(), dtype) - order.begin());
}

struct Entry {
  DType dtype;
  Shape shape;
  int64_t begin, end;
};

Entry read_entry(const json& value) {
  if (!value.is_object() || !value.contains("dtype") || !value.contains("shape") || !value.contains("data_offsets")) invalid("an entry lacks a field");
  const auto& dtype = value["dtype"];
  const auto& shape = value["shape"];
  const auto& offsets = value["data_offsets"];
  if (!dtype.is_string() || !shape.is_array() || !offsets.is_array() || offsets.size() != 2) invalid("an entry has a field of another type");
  const auto found = std::find(kNames.begin(), kNames.end(), dtype.get_ref<const std::string&>());
  if (found == kNames.end()) invalid("type " + printable(dtype.get<std::string>(), 20));
  Entry entry{static_cast<DType>(found - kNames.begin()), {}, 0, 0};
  for (const auto& size : shape) {
    if (!size.is_number_unsigned() || size.get<uint64_t>() > uint64_t{INT64_MAX}) invalid("a shape");
    entry.shape.push_back(size.get<int64_t>());
  }
  for (const auto& offset : offsets)
    if (!offset.is_number_unsigned() || offset.get<uint64_t>() > uint64_t{INT64_MAX}) invalid("an offset");
  entry.begin = offsets[0].get<int64_t>();
  entry.end = offsets[1].get<int64_t>();
  return entry;
}

// Names and places by the header; a name that occurs twice is refused.
std::vector<std::pair<std::string, Entry>> read_header(std::string_view text) {
  std::vector<std::pair<std::string, Entry>> entries;
  std::vector<std::string> seen;
  const auto once = [&](int depth, json::parse_event_t event, json& parsed) {
    if (depth > 8) invalid("nesting");
    if (event == json::parse_event_t::key && depth == 1) seen.push_back(parsed.get<std::string>());
    return true;
  };
  json header;
  try {
    header = json::parse(text.begin(), text.end(), once);
  } catch (const json::exception&) {
    invalid("its header is no JSON");
  }
  if (!header.is_object()) invalid("its header is no map");
  std::sort(seen.begin(), seen.end());
  if (const auto twice = std::adjacent_find(seen.begin(), seen.end()); twice != seen.end())
    throw ProtocolError("a blob holds tensor " + in_quotes(*twice) + " twice; send it once");
  for (const auto& [name, value] : header.items())
    if (name != "__metadata__") entries.emplace_back(name, read_entry(value));
  std::sort(entries.begin(), entries.end(), [](const auto& a, const auto& b) {
    return std::pair(a.second.begin, a.second.end) < std::pair(b.second.begin, b.second.end);
  });
  return entries;
}

// The entries of the mask in "<name>~gaps:<count>", and its name; nothing for a plain name.
std::optional<std::pair<std::string, int64_t>> gaps_of(const std::string& entry) {
  const size_t mark = entry.find('~');
  if (mark == std::string::npos) return std::nullopt;
  const std::string tail = entry.substr(mark);
  const std::string digits = tail.rfind(kGaps, 0) == 0 ? tail.substr(std::strlen(kGaps)) : "";
  const bool number = !digits.empty() && digits.size() <= 19 && digits.find_first_not_of("0123456789") == std::string::npos && (digits[0] != '0' || digits == "0");
  if (!number) throw ProtocolError("a blob holds " + in_quotes(entry) + ", and '~' marks an encoding that this version does not know; update this side or rename the tensor");
  const unsigned long long count = std::stoull(digits);
  return std::pair(entry.substr(0, mark), count > uint64_t{INT64_MAX} ? INT64_MAX : static_cast<int64_t>(count));
}

}  // namespace

Bytes dump_tensors(const Tensors& tensors, const std::map<std::string, int64_t>& masks) {
  std::map<std::string, Tensor> gaps;
  std::vector<std::pair<std::string, const Tensor*>> stored;
  for (const auto& [name, tensor] : tensors) {
    if (name.find('~') != std::string::npos) throw ProtocolError("a tensor cannot be called " + in_quotes(name) + ": '~' is reserved in blobs; rename it");
    const auto mask = masks.find(name);
    if (mask != masks.end()) {
      const Bytes folded = mask_to_gaps(tensor, mask->second);
      if (folded.size() < tensor.data.size()) {
        Tensor flat(DType::u8, {static_cast<int64_t>(folded.size())});
        if (!folded.empty()) std::memcpy(flat.data.data(), folded.data(), folded.size());
        const std::string entry = name + kGaps + std::to_string(mask->second);
        stored.emplace_back(entry, &(gaps[entry] = std::move(flat)));
        continue;
      }
    }
    stored.emplace_back(name, &tensor);
  }
  for (const auto& [name, count] : masks)
    if (tensors.count(name) == 0) throw ProtocolError("there is no tensor " + in_quotes(name) + " to send as a mask");
  std::sort(stored.begin(), stored.end(), [](const auto& a, const auto& b) {
    return std::pair(rank(a.second->dtype), a.first) < std::pair(rank(b.second->dtype), b.first);
  });
  // Written piece by piece: an ordered_json would be compiled as a second copy of the library.
  std::string text = "{";
  size_t end = 0;
  for (const auto& [name, tensor] : stored) {
    text += (text.size() == 1 ? "" : ",") + json(name).dump() + ":{\"dtype\":\"" +
            std::string(kNames[static_cast<size_t>(tensor->dtype)]) + "\",\"shape\":[";
    for (size_t axis = 0; axis < tensor->shape.size(); ++axis) text += (axis == 0 ? "" : ",") + std::to_string(tensor->shape[axis]);
    text += "],\"data_offsets\":[" + std::to_string(end) + "," + std::to_string(end + tensor->nbytes()) + "]}";
    end += tensor->nbytes();
  }
  text += "}";
  text.append((8 - text.size() % 8) % 8, ' ');
  Bytes whole;
  whole.reserve(8 + text.size() + end);
  for (int i = 0; i < 8; ++i) whole += static_cast<char>(text.size() >> 8 * i & 255);
  whole += text;
  for (const auto& [name, tensor] : stored) whole.append(reinterpret_cast<const char*>(tensor->data.data()), tensor->nbytes());
  return whole;
}

Tensors load_tensors(std::string_view data, int64_t most_bits) {
  if (data.size() < 8) invalid("it is cut short");
  uint64_t length = 0;
  for (int i = 7; i >= 0; --i) length = length << 8 | static_cast<unsigned char>(data[static_cast<size_t>(i)]);
  if (length > kMostHeader || length > data.size() - 8) invalid("its header is cut short");
  if (length == 0 || data[8] != '{') invalid("its header is no map");
  const std::string_view rest = data.substr(8 + length);
  Tensors tensors;
  int64_t end = 0;
  for (const auto& [stored, entry] : read_header(data.substr(8, length))) {
    const int64_t count = elements(entry.shape), each = static_cast<int64_t>(dtype_bytes(entry.dtype));
    if (entry.begin != end || entry.end < entry.begin || count > INT64_MAX / each || entry.end - entry.begin != count * each) invalid("the offsets of " + in_quotes(stored));
    end = entry.end;
    if (end > static_cast<int64_t>(rest.size())) invalid("it is cut short");
    const std::string_view bytes = rest.substr(static_cast<size_t>(entry.begin), static_cast<size_t>(count * each));
    const auto gaps = gaps_of(stored);
    const std::string& name = gaps ? gaps->first : stored;
    if (tensors.count(name) != 0) throw ProtocolError("a blob holds tensor " + in_quotes(name) + " twice; send it once");
    if (gaps) {
      if (gaps->second > most_bits) throw ProtocolError("mask " + in_quotes(name) + " has " + std::to_string(gaps->second) + " entries where at most " + std::to_string(most_bits) + " are left for the masks of this blob");
      most_bits -= gaps->second;
      if (entry.dtype != DType::u8 || entry.shape.size() != 1) throw ProtocolError("the gaps of mask " + in_quotes(name) + " are uint8 in one dimension; send the blob again");
      tensors[name] = mask_from_gaps(bytes, gaps->second);
      continue;
    }
    Tensor tensor(entry.dtype, entry.shape);
    if (!bytes.empty()) std::memcpy(tensor.data.data(), bytes.data(), bytes.size());
    tensors[name] = std::move(tensor);
  }
  if (end != static_cast<int64_t>(rest.size())) invalid("it has bytes that no tensor holds");
  return tensors;
}

}  // namespace edgefl
