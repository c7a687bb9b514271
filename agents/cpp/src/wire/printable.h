// The other side's own words, so that they fit any log and any terminal; and sizes for people.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

namespace edgefl {

// Code point at `text[place]` and the number of its bytes; 0 bytes if there is no valid UTF-8.
std::pair<uint32_t, size_t> letter_at(std::string_view text, size_t place);
bool is_utf8(std::string_view text);
// Whether it can be shown as it is: valid UTF-8 without control characters, line separators or marks of direction.
bool is_printable(std::string_view text);
// At most `most` letters; what belongs in no line is a blank.
std::string printable(std::string_view text, size_t most = 1000);
std::string in_quotes(std::string_view text);  // 'text', printable
std::string size_text(double bytes);        // "64.0 MiB", "1.5 KiB"
// Bytes of "64MiB", "64M", "1.5GB"; ConfigError, which names `option`, for what is no size and for a bare number.
int64_t parse_size(std::string_view text, const std::string& option);

}  // namespace edgefl
