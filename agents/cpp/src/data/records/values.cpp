#include "data/records/values.h"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <limits>
#include <system_error>

#include "data/convert.h"
#include "data/records/unicode.h"

namespace edgefl {
namespace {

// `text` with white space as blanks and every script's digits as ASCII, as Python prepares it; nothing for other letters.
std::optional<std::string> in_ascii(std::string_view text) {
  std::string found;
  for (size_t place = 0; place < text.size();) {
    const auto [code, size] = code_point_at(text, place);
    const int digit = decimal_digit(code);
    if (code >= 0x80 && digit < 0) return std::nullopt;
    found += static_cast<char>(digit >= 0 ? '0' + digit : code);
    place += size;
  }
  return found;
}

bool is_word(std::string_view text, std::string_view word) {
  if (text.size() != word.size()) return false;
  for (size_t at = 0; at < text.size(); ++at) {
    if (std::tolower(static_cast<unsigned char>(text[at])) != word[at]) return false;
  }
  return true;
}

size_t digits_at(std::string_view text, size_t place) {
  size_t end = place;
  while (end < text.size() && text[end] >= '0' && text[end] <= '9') ++end;
  return end - place;
}

// A number beyond what a double holds: 0 if it is too small, else infinite. `text` is digits, a point, an exponent.
double beyond(std::string_view text) {
  int64_t place = 0, exponent = 0;  // of the first digit that is not 0, before the point is place 0
  bool point = false, found = false;
  size_t at = 0;
  for (; at < text.size() && text[at] != 'e' && text[at] != 'E'; ++at) {
    if (text[at] == '.') {
      point = true;
    } else {
      found = found || text[at] != '0';
      if (found && !point) ++place;
      if (!found && point) --place;
    }
  }
  if (!found) return 0.0;
  if (at < text.size()) {
    ++at;
    const bool minus = text[at] == '-';
    if (minus || text[at] == '+') ++at;
    const auto read = std::from_chars(text.data() + at, text.data() + text.size(), exponent);
    constexpr int64_t most = std::numeric_limits<int32_t>::max();
    exponent = read.ec != std::errc() ? most : std::min(exponent, most);
    if (minus) exponent = -exponent;
  }
  return place + exponent > 0 ? std::numeric_limits<double>::infinity() : 0.0;
}

}  // namespace

std::string Value::shown() const {
  return shortened(kind == Kind::nothing ? "None" : kind == Kind::text ? repr_of_text(text) : text);
}

Value text_value(std::string text) { return {Value::Kind::text, std::move(text), 0.0}; }

std::string float_text(double number) {
  if (std::isnan(number)) return "nan";
  if (std::isinf(number)) return number < 0 ? "-inf" : "inf";
  char buffer[40];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, number, std::chars_format::scientific);
  const std::string text(buffer, end.ptr);
  const size_t mark = text.find('e'), sign = text[0] == '-' ? 1 : 0;
  const int exponent = std::atoi(text.c_str() + mark + 1);
  std::string digits = text.substr(sign, mark - sign);
  const std::string before = text.substr(0, sign);
  if (exponent < -4 || exponent >= 16) {
    const std::string power = std::to_string(std::abs(exponent));
    return before + digits + (exponent < 0 ? "e-" : "e+") + (power.size() < 2 ? "0" : "") + power;
  }
  if (digits.size() > 1) digits.erase(1, 1);
  if (exponent < 0) return before + "0." + std::string(static_cast<size_t>(-exponent - 1), '0') + digits;
  const auto point = static_cast<size_t>(exponent) + 1;
  if (digits.size() <= point) return before + digits + std::string(point - digits.size(), '0') + ".0";
  return before + digits.substr(0, point) + "." + digits.substr(point);
}

std::optional<double> float_of(std::string_view text) {
  const std::optional<std::string> ascii = in_ascii(stripped(text));
  if (!ascii) return std::nullopt;
  std::string_view rest = *ascii;
  const bool minus = !rest.empty() && rest.front() == '-';
  if (minus || (!rest.empty() && rest.front() == '+')) rest.remove_prefix(1);
  double number = 0.0;
  if (is_word(rest, "inf") || is_word(rest, "infinity")) {
    number = std::numeric_limits<double>::infinity();
  } else if (is_word(rest, "nan")) {
    number = std::numeric_limits<double>::quiet_NaN();
  } else {
    const size_t whole = digits_at(rest, 0);
    size_t end = whole;
    if (end < rest.size() && rest[end] == '.') end += 1 + digits_at(rest, end + 1);
    if (end == 0 || (whole == 0 && end == 1)) return std::nullopt;
    if (end < rest.size() && (rest[end] == 'e' || rest[end] == 'E')) {
      const size_t sign = end + 1 < rest.size() && (rest[end + 1] == '-' || rest[end + 1] == '+') ? 1 : 0;
      const size_t power = digits_at(rest, end + 1 + sign);
      if (power == 0) return std::nullopt;
      end += 1 + sign + power;
    }
    if (end != rest.size()) return std::nullopt;
    if (std::from_chars(rest.data(), rest.data() + rest.size(), number).ec != std::errc()) number = beyond(rest);
  }
  return minus ? -number : number;
}

double finite(const Value& value, const std::string& what, DType dtype) {
  if (value.empty()) throw BadRow(what + " is empty");
  std::optional<double> number;
  if (value.kind == Value::Kind::number) number = value.number;
  if (value.kind == Value::Kind::text) number = float_of(value.text);
  if (!number || !std::isfinite(*number)) throw BadRow(what + " is " + value.shown() + ", which is no number");
  const auto [least, most] = with_type(dtype, [](auto zero) {
    using T = decltype(zero);
    if constexpr (std::is_same_v<T, Half>) {
      return std::pair(-65504.0, 65504.0);
    } else {
      const auto most = static_cast<double>(std::numeric_limits<T>::max());
      const bool rounded = std::is_integral_v<T> && sizeof(T) == 8;  // to 2**63, which is no int64
      return std::pair(static_cast<double>(std::numeric_limits<T>::lowest()), rounded ? std::nextafter(most, 0.0) : most);
    }
  });
  if (*number < least || *number > most) {
    throw BadRow(what + " is " + value.shown() + ", which is beyond what " + std::string(dtype_name(dtype)) + " holds");
  }
  return *number;
}

bool is_number(const Value& value) {
  try {
    (void)finite(value, "", DType::f64);
    return true;
  } catch (const BadRow&) {
    return false;
  }
}

}  // namespace edgefl
