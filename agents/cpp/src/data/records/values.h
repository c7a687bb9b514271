// One value of a record, as Python's csv and json modules give it, and the numbers in it.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "data/check.h"
#include "wire/tensor.h"

namespace edgefl {

struct Value {
  enum class Kind { nothing, number, text, other };

  Kind kind = Kind::nothing;
  std::string text;     // str() of it
  double number = 0.0;  // of a number; NaN or infinite if it is none that a double holds

  bool empty() const { return kind == Kind::nothing || (kind == Kind::text && text.empty()); }
  std::string shown() const;  // its repr, shortened
};

Value text_value(std::string text);
// The repr of a float: the shortest digits that give it again.
std::string float_text(double number);
// float(text) of Python; nothing for what it refuses.
std::optional<double> float_of(std::string_view text);
// A finite number that `dtype` holds; BadRow, which begins with `what`, for anything else.
double finite(const Value& value, const std::string& what, DType dtype);
bool is_number(const Value& value);  // a finite number, of any size

}  // namespace edgefl
