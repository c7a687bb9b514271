#include "wire/bytes/bits.h"

#include "wire/errors.h"

namespace edgefl {
namespace {

constexpr int kLongest = 9;

void put_varint(Bytes& out, uint64_t value) {
  for (; value >= 128; value >>= 7) out += static_cast<char>((value & 127) | 128);
  out += static_cast<char>(value);
}

}  // namespace

int64_t packed_mask_bytes(int64_t entries) { return entries / 8 + (entries % 8 != 0); }

void check_mask(const Tensor& packed, int64_t entries) {
  if (packed.dtype != DType::u8 || packed.shape != Shape{packed_mask_bytes(entries)})
    throw ProtocolError("a packed mask of " + std::to_string(entries) + " entries is uint8 [" + std::to_string(packed_mask_bytes(entries)) +
                        "], not " + std::string(dtype_name(packed.dtype)) + " " + shown(packed.shape));
  if (entries % 8 != 0 && std::to_integer<int>(packed.data.back()) >> entries % 8 != 0)
    throw ProtocolError("a packed mask of " + std::to_string(entries) + " entries has bits set beyond its last entry");
}

Bytes mask_to_gaps(const Tensor& packed, int64_t entries) {
  check_mask(packed, entries);
  Bytes gaps;
  int64_t previous = -1;
  for (size_t place = 0; place < packed.data.size(); ++place) {
    const int byte = std::to_integer<int>(packed.data[place]);
    for (int bit = 0; bit < 8; ++bit) {
      if ((byte >> bit & 1) == 0) continue;
      const int64_t index = static_cast<int64_t>(place) * 8 + bit;
      put_varint(gaps, static_cast<uint64_t>(index - previous - 1));
      previous = index;
    }
  }
  return gaps;
}

Tensor mask_from_gaps(std::string_view gaps, int64_t entries) {
  Tensor packed(DType::u8, {packed_mask_bytes(entries)});
  uint64_t previous = ~uint64_t{0};
  for (size_t place = 0; place < gaps.size();) {
    uint64_t gap = 0;
    int length = 0;
    for (bool more = true; more; ++length, ++place) {
      if (place == gaps.size() || length == kLongest)
        throw ProtocolError("a gap of a mask is cut short or longer than 9 bytes; send the blob again");
      const auto byte = static_cast<unsigned char>(gaps[place]);
      gap |= uint64_t{byte & 127u} << 7 * length;
      more = byte >= 128;
    }
    const uint64_t left = static_cast<uint64_t>(entries) - (previous + 1);
    if (gap >= left) throw ProtocolError("the gaps of a mask lead beyond its " + std::to_string(entries) + " entries; send the blob again");
    previous += gap + 1;
    packed.data[previous / 8] |= std::byte{1} << (previous % 8);
  }
  return packed;
}

}  // namespace edgefl
