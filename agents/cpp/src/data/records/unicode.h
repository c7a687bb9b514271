// Rules of Python's str that readers of tables follow: white space, decimal digits, equal spellings, and repr.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace edgefl {

// Code point at `text[place]` and the number of its bytes. A byte that is no UTF-8 counts as one of the code points from
// U+DC80 on (Python's surrogateescape); half of a surrogate pair, which JSON can escape, counts as itself.
std::pair<uint32_t, size_t> code_point_at(std::string_view text, size_t place);
void append_code_point(std::string& text, uint32_t code);
size_t code_points(std::string_view text);

bool is_space(uint32_t code);
bool is_line_end(uint32_t code);
int decimal_digit(uint32_t code);  // 0 to 9, or -1

std::string_view stripped(std::string_view text);  // without white space at its ends
// Canonical decomposition (NFD): two spellings of one text are equal in it.
std::string decomposed(std::string_view text);
std::string repr_of_text(std::string_view text);          // repr of a str
std::string shortened(const std::string& repr);     // the first 60 code points, and "..." for the rest

// Rows of the Unicode database, in ascending order of `from`.
struct Decomposition {
  uint32_t from, first, second = 0;  // `second` is 0 for a single code point
};
struct CombiningRun {
  uint32_t from, to;
  uint8_t order;
};
const Decomposition* find_decomposition(uint32_t code);  // null if there is none
uint8_t combining_order(uint32_t code);                  // 0 for a code point that combines with none

}  // namespace edgefl
