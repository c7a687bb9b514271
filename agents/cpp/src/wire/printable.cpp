#include "wire/printable.h"

#include <array>
#include <cctype>
#include <charconv>
#include <cstdio>
#include <limits>

#include "wire/errors.h"

namespace edgefl {
namespace {

bool shows(uint32_t code) {
  if (code < 0x20 || (code >= 0x7F && code < 0xA0)) return false;
  const bool spaces = code == 0xA0 || code == 0x1680 || (code >= 0x2000 && code <= 0x200A) || code == 0x202F ||
                      code == 0x205F || code == 0x3000;
  const bool marks = code == 0xAD || (code >= 0x200B && code <= 0x200F) || (code >= 0x2028 && code <= 0x202E) ||
                     (code >= 0x2060 && code <= 0x206F) || code == 0xFEFF || (code >= 0xE000 && code <= 0xF8FF) ||
                     (code >= 0xFFF0 && code <= 0xFFFB) || code >= 0xE0000;
  return !spaces && !marks;
}

}  // namespace

std::pair<uint32_t, size_t> letter_at(std::string_view text, size_t place) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(place);
  if (first < 0x80) return {first, 1};
  const size_t size = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
  if (first < 0xC2 || first > 0xF4 || place + size > text.size()) return {0, 0};
  uint32_t code = first & (0xFF >> (size + 1));
  for (size_t i = 1; i < size; ++i) {
    if ((byte(place + i) & 0xC0) != 0x80) return {0, 0};
    code = code << 6 | (byte(place + i) & 0x3F);
  }
  constexpr std::array<uint32_t, 5> least = {0, 0, 0x80, 0x800, 0x10000};
  const bool surrogate = code >= 0xD800 && code <= 0xDFFF;
  if (code < least[size] || code > 0x10FFFF || surrogate) return {0, 0};
  return {code, size};
}

bool is_utf8(std::string_view text) {
  for (size_t place = 0; place < text.size();) {
    const size_t size = letter_at(text, place).second;
    if (size == 0) return false;
    place += size;
  }
  return true;
}

bool is_printable(std::string_view text) {
  for (size_t place = 0; place < text.size();) {
    const auto [code, size] = letter_at(text, place);
    if (size == 0 || !shows(code)) return false;
    place += size;
  }
  return true;
}

std::string printable(std::string_view text, size_t most) {
  std::string shown;
  for (size_t place = 0, letters = 0; place < text.size() && letters < most; ++letters) {
    const auto [code, size] = letter_at(text, place);
    if (size > 0 && shows(code)) {
      shown += text.substr(place, size);
    } else {
      shown += ' ';
    }
    place += size > 0 ? size : 1;
  }
  return shown;
}

std::string in_quotes(std::string_view text) { return "'" + printable(text, 200) + "'"; }

std::string size_text(double bytes) {
  char text[48];
  const double mib = 1024.0 * 1024.0;
  if (bytes >= mib) {
    std::snprintf(text, sizeof text, "%.1f MiB", bytes / mib);
  } else {
    std::snprintf(text, sizeof text, "%.1f KiB", bytes / 1024.0);
  }
  return text;
}

int64_t parse_size(std::string_view text, const std::string& option) {
  const std::string shown = printable(text, 100);
  const auto no_size = [&] { return ConfigError(option + ": '" + shown + "' is not a size; write 512KiB, 64MiB, 64M or 1GB"); };
  size_t place = 0;
  const auto at = [&] { return place < text.size() ? static_cast<unsigned char>(text[place]) : 0; };
  const auto digits = [&] {
    const size_t begin = place;
    while (std::isdigit(at()) != 0) ++place;
    return place > begin;
  };
  const auto blanks = [&] {
    while (std::isspace(at()) != 0) ++place;
  };
  const auto letter = [&](std::string_view any) {
    const size_t found = at() == 0 ? std::string_view::npos : any.find(static_cast<char>(std::toupper(at())));
    if (found == std::string_view::npos) return size_t{0};
    ++place;
    return found + 1;
  };
  blanks();
  const size_t begin = place;
  const bool whole = digits();
  const bool point = at() == '.';
  if (point) ++place;
  const bool fraction = point && digits();
  const std::string number(text.substr(begin, place - begin));
  blanks();
  const size_t powers = letter("KMG");
  const bool infix = powers > 0 && letter("I") > 0, bytes = letter("B") > 0;
  blanks();
  if ((!whole && !fraction) || place != text.size()) throw no_size();
  if (powers == 0 && !bytes) throw ConfigError(option + ": '" + shown + "' has no unit; write " + number + "MiB, or " + number + "B for bytes");
  double count = std::numeric_limits<double>::infinity();  // stays so for more digits than a double has
  (void)std::from_chars(number.data(), number.data() + number.size(), count);
  for (size_t i = 0; i < powers; ++i) count *= infix || !bytes ? 1024.0 : 1000.0;
  if (count > 1152921504606846976.0) throw no_size();
  return static_cast<int64_t>(count);
}

}  // namespace edgefl
