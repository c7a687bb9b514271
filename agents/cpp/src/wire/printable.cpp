#include "wire/printable.h"

#include <array>
#include <cctype>
#include <cstdio>
#include <regex>

#include "wire/errors.h"

namespace edgefl {
namespace {

// The code point at `text[place]`, and its bytes; 0 bytes where there is none.
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
  static const std::regex pattern(R"(\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([KMG]?)(I?)(B?)\s*)", std::regex::icase);
  std::cmatch found;
  const std::string shown = printable(text, 100);
  if (!std::regex_match(text.data(), text.data() + text.size(), found, pattern) || (found[3].length() > 0 && found[2].length() == 0))
    throw ConfigError(option + ": '" + shown + "' is not a size; write 512KiB, 64MiB, 64M or 1GB");
  const std::string number = found[1], unit = found[2];
  const bool bytes = found[4].length() > 0, binary = found[3].length() > 0 || !bytes;
  if (unit.empty() && !bytes) throw ConfigError(option + ": '" + shown + "' has no unit; write " + number + "MiB, or " + number + "B for bytes");
  double count = std::stod(number);
  const double power = binary ? 1024.0 : 1000.0;
  const size_t powers = unit.empty() ? 0 : std::string_view("KMG").find(static_cast<char>(std::toupper(unit[0]))) + 1;
  for (size_t i = 0; i < powers; ++i) count *= power;
  if (count > 1152921504606846976.0) throw ConfigError(option + ": '" + shown + "' is not a size; write 512KiB, 64MiB, 64M or 1GB");
  return static_cast<int64_t>(count);
}

}  // namespace edgefl
