#include "data/records/json.h"

#include <algorithm>
#include <limits>
#include <optional>

#include "data/records/unicode.h"

namespace edgefl {
namespace {

constexpr int kDeepest = 970;         // about where Python's interpreter stops
constexpr size_t kMostDigits = 4300;  // of a whole number that Python converts

class Parser {
 public:
  explicit Parser(std::string_view line) : text_(line) {}

  std::map<std::string, Value> object() {
    if (text_.substr(0, 3) == "\xEF\xBB\xBF") wrong("Unexpected UTF-8 BOM (decode using utf-8-sig)", 0);
    skip_space();
    std::optional<std::map<std::string, Value>> found;
    if (at() == '{') {
      found.emplace();
      (void)read_object(&*found);
    } else {
      (void)value();
    }
    skip_space();
    if (place_ != text_.size()) wrong("Extra data", place_);
    if (!found) throw BadRow("it is no JSON object");
    return *std::move(found);
  }

 private:
  int at() const { return place_ < text_.size() ? static_cast<unsigned char>(text_[place_]) : -1; }

  void skip_space() {
    while (at() == ' ' || at() == '\t' || at() == '\n' || at() == '\r') ++place_;
  }

  // As json.JSONDecodeError has it: `place` in code points.
  [[noreturn]] void wrong(const std::string& what, size_t place) const {
    const std::string_view before = text_.substr(0, place);
    const size_t line = 1 + static_cast<size_t>(std::count(before.begin(), before.end(), '\n')), start = before.rfind('\n') + 1;
    throw BadRow("it is no JSON: " + what + ": line " + std::to_string(line) + " column " +
                 std::to_string(code_points(before.substr(start)) + 1) + " (char " + std::to_string(code_points(before)) + ")");
  }

  bool taken(std::string_view word) {
    if (text_.substr(place_, word.size()) != word) return false;
    place_ += word.size();
    return true;
  }

  Value value() {
    if (at() == '"') return text_value(string());
    if (at() == '{') return {Value::Kind::other, read_object(nullptr), 0.0};
    if (at() == '[') return {Value::Kind::other, read_array(), 0.0};
    if (taken("null")) return {};
    if (taken("true")) return {Value::Kind::number, "True", 1.0};
    if (taken("false")) return {Value::Kind::number, "False", 0.0};
    const double infinite = std::numeric_limits<double>::infinity();
    if (taken("NaN")) return {Value::Kind::number, "nan", std::numeric_limits<double>::quiet_NaN()};
    if (taken("Infinity")) return {Value::Kind::number, "inf", infinite};
    if (taken("-Infinity")) return {Value::Kind::number, "-inf", -infinite};
    return number();
  }

  size_t skip_digits() {
    const size_t begin = place_;
    while (at() >= '0' && at() <= '9') ++place_;
    return place_ - begin;
  }

  Value number() {
    const size_t begin = place_;
    if (at() == '-') ++place_;
    const size_t first = place_;
    if (at() == '0') {
      ++place_;
    } else if (skip_digits() == 0) {
      place_ = begin;
      wrong("Expecting value", begin);
    }
    const size_t digits = place_ - first;
    bool whole = true;
    const size_t point = place_;
    if (at() == '.') {
      ++place_;
      if (skip_digits() == 0) place_ = point;
      whole = place_ == point;
    }
    const size_t power = place_;
    if (at() == 'e' || at() == 'E') {
      ++place_;
      if (at() == '+' || at() == '-') ++place_;
      if (skip_digits() == 0) {
        place_ = power;
      } else {
        whole = false;
      }
    }
    const std::string text(text_.substr(begin, place_ - begin));
    if (whole && digits > kMostDigits) throw BadRow("it has a number of thousands of digits");
    const double found = *float_of(text);
    if (!whole) return {Value::Kind::number, float_text(found), found};
    if (text == "-0") return {Value::Kind::number, "0", 0.0};  // a whole number has no negative zero
    return {Value::Kind::number, text, found};
  }

  uint32_t four_digits() {
    if (place_ + 4 >= text_.size()) wrong("Invalid \\uXXXX escape", place_ - 1);
    uint32_t code = 0;
    for (int digit = 0; digit < 4; ++digit, ++place_) {
      const int letter = at() >= 'a' ? at() - 'a' + 'A' : at();
      const bool hexadecimal = (letter >= '0' && letter <= '9') || (letter >= 'A' && letter <= 'F');
      if (!hexadecimal) wrong("Invalid \\uXXXX escape", place_ - static_cast<size_t>(digit) - 1);
      code = code << 4 | static_cast<uint32_t>(letter <= '9' ? letter - '0' : letter - 'A' + 10);
    }
    return code;
  }

  uint32_t escaped_code() {
    const uint32_t code = four_digits();
    const bool pair = code >= 0xD800 && code < 0xDC00 && place_ + 6 < text_.size() && text_[place_] == '\\' && text_[place_ + 1] == 'u';
    if (!pair) return code;
    const size_t after = place_;
    place_ += 2;
    const uint32_t second = four_digits();
    if (second >= 0xDC00 && second < 0xE000) return 0x10000 + ((code - 0xD800) << 10) + (second - 0xDC00);
    place_ = after;
    return code;
  }

  std::string string() {
    constexpr std::string_view kNamed = "\"\\/bfnrt", kMeant = "\"\\/\b\f\n\r\t";
    const size_t begin = place_++;
    std::string found;
    while (true) {
      const int letter = at();
      if (letter < 0) wrong("Unterminated string starting at", begin);
      if (letter < 0x20) wrong("Invalid control character at", place_);
      ++place_;
      if (letter == '"') return found;
      if (letter != '\\') {
        found += static_cast<char>(letter);
        continue;
      }
      if (at() < 0) wrong("Unterminated string starting at", begin);
      const size_t named = kNamed.find(static_cast<char>(at()));
      ++place_;
      if (text_[place_ - 1] == 'u') {
        append_code_point(found, escaped_code());
      } else if (named != std::string_view::npos) {
        found += kMeant[named];
      } else {
        wrong("Invalid \\escape", place_ - 2);
      }
    }
  }

  void deeper() {
    if (++depth_ > kDeepest) throw BadRow("it is JSON that is nested too deeply");
  }

  // Its repr; `into`, if it is not null, gets the values.
  std::string read_object(std::map<std::string, Value>* into) {
    deeper();
    std::string repr = "{";
    ++place_;
    skip_space();
    while (at() != '}') {
      if (at() != '"') wrong("Expecting property name enclosed in double quotes", place_);
      const std::string name = string();
      skip_space();
      if (at() != ':') wrong("Expecting ':' delimiter", place_);
      ++place_;
      skip_space();
      Value found = value();
      if (into == nullptr) repr += (repr.size() > 1 ? ", " : "") + repr_of_text(name) + ": " + repr_of(found);
      if (into != nullptr) (*into)[name] = std::move(found);
      skip_space();
      if (at() == '}') break;
      if (at() != ',') wrong("Expecting ',' delimiter", place_);
      ++place_;
      skip_space();
      if (at() == '}') wrong("Expecting property name enclosed in double quotes", place_);
    }
    ++place_;
    --depth_;
    return repr + "}";
  }

  std::string read_array() {
    deeper();
    std::string repr = "[";
    ++place_;
    skip_space();
    while (at() != ']') {
      repr += (repr.size() > 1 ? ", " : "") + repr_of(value());
      skip_space();
      if (at() == ']') break;
      if (at() != ',') wrong("Expecting ',' delimiter", place_);
      ++place_;
      skip_space();
      if (at() == ']') wrong("Expecting value", place_);
    }
    ++place_;
    --depth_;
    return repr + "]";
  }

  static std::string repr_of(const Value& value) {
    if (value.kind == Value::Kind::nothing) return "None";
    return value.kind == Value::Kind::text ? repr_of_text(value.text) : value.text;
  }

  std::string_view text_;
  size_t place_ = 0;
  int depth_ = 0;
};

}  // namespace

std::map<std::string, Value> json_object(std::string_view line) { return Parser(line).object(); }

}  // namespace edgefl
