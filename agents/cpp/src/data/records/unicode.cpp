#include "data/records/unicode.h"

#include <algorithm>
#include <array>
#include <cstdio>
#include <vector>

#include "wire/printable.h"

namespace edgefl {
namespace {

constexpr size_t kShown = 60;  // code points of a value in a message
constexpr uint32_t kEscapedByte = 0xDC00;
constexpr uint32_t kHangul = 0xAC00, kHangulCount = 11172, kLead = 0x1100, kVowel = 0x1161, kTail = 0x11A7;
constexpr uint32_t kVowels = 21, kTails = 28;

// The zero of each script that has decimal digits.
constexpr std::array<uint32_t, 66> kZeros = {
    0x0030,  0x0660,  0x06F0,  0x07C0,  0x0966,  0x09E6,  0x0A66,  0x0AE6,  0x0B66,  0x0BE6,  0x0C66,  0x0CE6,  0x0D66,  0x0DE6,
    0x0E50,  0x0ED0,  0x0F20,  0x1040,  0x1090,  0x17E0,  0x1810,  0x1946,  0x19D0,  0x1A80,  0x1A90,  0x1B50,  0x1BB0,  0x1C40,
    0x1C50,  0xA620,  0xA8D0,  0xA900,  0xA9D0,  0xA9F0,  0xAA50,  0xABF0,  0xFF10,  0x104A0, 0x10D30, 0x11066, 0x110F0, 0x11136,
    0x111D0, 0x112F0, 0x11450, 0x114D0, 0x11650, 0x116C0, 0x11730, 0x118E0, 0x11950, 0x11C50, 0x11D50, 0x11DA0, 0x16A60, 0x16AC0,
    0x16B50, 0x1D7CE, 0x1D7D8, 0x1D7E2, 0x1D7EC, 0x1D7F6, 0x1E140, 0x1E2F0, 0x1E950, 0x1FBF0};

void decompose(uint32_t code, std::vector<uint32_t>& into) {
  if (code >= kHangul && code < kHangul + kHangulCount) {
    const uint32_t index = code - kHangul;
    into.push_back(kLead + index / (kVowels * kTails));
    into.push_back(kVowel + index % (kVowels * kTails) / kTails);
    if (index % kTails != 0) into.push_back(kTail + index % kTails);
  } else if (const Decomposition* parts = find_decomposition(code)) {
    decompose(parts->first, into);
    if (parts->second != 0) decompose(parts->second, into);
  } else {
    into.push_back(code);
  }
}

}  // namespace

std::pair<uint32_t, size_t> code_point_at(std::string_view text, size_t place) {
  const auto [code, size] = letter_at(text, place);
  if (size != 0) return {code, size};
  const auto byte = [&](size_t at) { return static_cast<unsigned char>(text[at]); };
  const bool half = byte(place) == 0xED && place + 2 < text.size() && byte(place + 1) >= 0xA0 && (byte(place + 2) & 0xC0) == 0x80;
  if (half) return {0xD000U | (byte(place + 1) & 0x3FU) << 6 | (byte(place + 2) & 0x3FU), 3};
  return {kEscapedByte + byte(place), 1};
}

void append_code_point(std::string& text, uint32_t code) {
  if (code < 0x80) {
    text += static_cast<char>(code);
    return;
  }
  const int more = code < 0x800 ? 1 : code < 0x10000 ? 2 : 3;
  text += static_cast<char>((0xFF00 >> (more + 1) & 0xFF) | code >> 6 * more);
  for (int at = more - 1; at >= 0; --at) text += static_cast<char>(0x80 | (code >> 6 * at & 0x3F));
}

size_t code_points(std::string_view text) {
  size_t count = 0;
  for (size_t place = 0; place < text.size(); ++count) place += code_point_at(text, place).second;
  return count;
}

bool is_space(uint32_t code) {
  return (code >= 0x09 && code <= 0x0D) || (code >= 0x1C && code <= 0x20) || code == 0x85 || code == 0xA0 || code == 0x1680 ||
         (code >= 0x2000 && code <= 0x200A) || code == 0x2028 || code == 0x2029 || code == 0x202F || code == 0x205F || code == 0x3000;
}

bool is_line_end(uint32_t code) {
  return (code >= 0x0A && code <= 0x0D) || (code >= 0x1C && code <= 0x1E) || code == 0x85 || code == 0x2028 || code == 0x2029;
}

int decimal_digit(uint32_t code) {
  const auto next = std::upper_bound(kZeros.begin(), kZeros.end(), code);
  if (next == kZeros.begin() || code - *(next - 1) > 9) return -1;
  return static_cast<int>(code - *(next - 1));
}

std::string_view stripped(std::string_view text) {
  size_t begin = text.size(), end = 0;
  for (size_t place = 0; place < text.size();) {
    const auto [code, size] = code_point_at(text, place);
    if (!is_space(code)) {
      begin = std::min(begin, place);
      end = place + size;
    }
    place += size;
  }
  return begin < end ? text.substr(begin, end - begin) : std::string_view();
}

std::string decomposed(std::string_view text) {
  std::vector<uint32_t> codes;
  for (size_t place = 0; place < text.size();) {
    const auto [code, size] = code_point_at(text, place);
    decompose(code, codes);
    place += size;
  }
  // Marks on one letter have an order of their own, so that it does not matter which was written first.
  for (auto begin = codes.begin(); begin != codes.end();) {
    const auto end = std::find_if(begin, codes.end(), [](uint32_t code) { return combining_order(code) == 0; });
    std::stable_sort(begin, end, [](uint32_t one, uint32_t other) { return combining_order(one) < combining_order(other); });
    begin = end == codes.end() ? end : end + 1;
  }
  std::string found;
  for (const uint32_t code : codes) append_code_point(found, code);
  return found;
}

std::string repr_of_text(std::string_view text) {
  const char mark = text.find('\'') != std::string_view::npos && text.find('"') == std::string_view::npos ? '"' : '\'';
  std::string shown(1, mark);
  for (size_t place = 0; place < text.size();) {
    const auto [code, size] = code_point_at(text, place);
    const std::string_view bytes = text.substr(place, size);
    place += size;
    if (bytes == "\n" || bytes == "\r" || bytes == "\t") {
      shown += bytes == "\n" ? "\\n" : bytes == "\r" ? "\\r" : "\\t";
    } else if (bytes == "\\" || bytes[0] == mark) {
      shown += '\\';
      shown += bytes;
    } else if (is_printable(bytes)) {
      shown += bytes;
    } else {
      char escaped[16];
      std::snprintf(escaped, sizeof escaped, code < 0x100 ? "\\x%02x" : code < 0x10000 ? "\\u%04x" : "\\U%08x", static_cast<unsigned>(code));
      shown += escaped;
    }
  }
  return shown + mark;
}

std::string shortened(const std::string& repr) {
  size_t place = 0;
  for (size_t count = 0; place < repr.size() && count < kShown; ++count) place += code_point_at(repr, place).second;
  return place == repr.size() ? repr : repr.substr(0, place) + "...";
}

}  // namespace edgefl
