#include "data/files/zip.h"

#include <algorithm>
#include <limits>

#include <zlib.h>

#include "wire/errors.h"

namespace edgefl {
namespace {

constexpr uint64_t kEnd = 0x06054b50, kWideEnd = 0x06064b50, kWideLocator = 0x07064b50;
constexpr uint64_t kCentral = 0x02014b50, kLocal = 0x04034b50;
constexpr uint64_t kEndBytes = 22, kCentralBytes = 46, kLocalBytes = 30, kLocatorBytes = 20, kMostComment = 65535;
constexpr uint64_t kIn64 = 0xFFFFFFFF;
constexpr size_t kPiece = 1 << 16;

}  // namespace

std::string inflated(std::string_view packed, bool gzip, uint64_t most, const std::string& name) {
  z_stream stream{};
  if (inflateInit2(&stream, gzip ? 15 + 16 : -15) != Z_OK) throw DataError(name + " cannot be unfolded: zlib cannot start");
  std::string out;
  std::string piece(kPiece, '\0');
  int state = Z_OK;
  while (state == Z_OK && out.size() <= most) {
    if (stream.avail_in == 0) {
      stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(packed.data()));
      stream.avail_in = static_cast<uInt>(std::min<size_t>(packed.size(), 1 << 30));
      packed.remove_prefix(stream.avail_in);
    }
    stream.next_out = reinterpret_cast<Bytef*>(piece.data());
    stream.avail_out = static_cast<uInt>(piece.size());
    state = inflate(&stream, Z_NO_FLUSH);
    out.append(piece, 0, piece.size() - stream.avail_out);
  }
  inflateEnd(&stream);
  if (state != Z_STREAM_END || out.size() > most) {
    throw DataError(name + " cannot be read: its compressed bytes are damaged or cut short; fetch it again");
  }
  return out;
}

Zip::Zip(std::string_view file, std::string name) : file_(file), name_(std::move(name)) {
  if (file_.size() < kEndBytes) damaged("it is too short");
  uint64_t end = file_.size() - kEndBytes;
  const uint64_t least = end > kMostComment ? end - kMostComment : 0;
  while (end > least && number(end, 4) != kEnd) --end;
  if (number(end, 4) != kEnd) damaged("it has no directory");
  uint64_t count = number(end + 10, 2), at = number(end + 16, 4);
  if (end >= kLocatorBytes && number(end - kLocatorBytes, 4) == kWideLocator) {
    const uint64_t wide = number(end - kLocatorBytes + 8, 8);
    if (number(wide, 4) != kWideEnd) damaged("its directory is damaged");
    count = number(wide + 32, 8);
    at = number(wide + 48, 8);
  }
  for (; count > 0; --count) {
    if (number(at, 4) != kCentral) damaged("its directory is damaged");
    Entry entry{static_cast<int>(number(at + 10, 2)), number(at + 20, 4), number(at + 24, 4),
                static_cast<uint32_t>(number(at + 16, 4)), number(at + 42, 4)};
    const uint64_t letters = number(at + 28, 2), extra = number(at + 30, 2), comment = number(at + 32, 2);
    if (at + kCentralBytes + letters + extra > file_.size()) damaged("its directory is cut short");
    const std::string key(file_.substr(at + kCentralBytes, letters));
    for (uint64_t field = at + kCentralBytes + letters, stop = field + extra; field + 4 <= stop;) {
      const uint64_t length = number(field + 2, 2);
      uint64_t value = field + 4;
      if (number(field, 2) == 1) {  // sizes of 64 bits, only of those that do not fit
        for (uint64_t* each : {&entry.size, &entry.packed, &entry.at}) {
          if (*each == kIn64 && value + 8 <= stop) {
            *each = number(value, 8);
            value += 8;
          }
        }
      }
      field += 4 + length;
    }
    entries_[key] = entry;
    at += kCentralBytes + letters + extra + comment;
  }
}

std::string_view Zip::packed(const Entry& entry) const {
  if (number(entry.at, 4) != kLocal) damaged("an entry of it is damaged");
  const uint64_t start = entry.at + kLocalBytes + number(entry.at + 26, 2) + number(entry.at + 28, 2);
  if (start > file_.size() || entry.packed > file_.size() - start) damaged("an entry of it is cut short");
  return file_.substr(start, entry.packed);
}

std::string Zip::read(const Entry& entry, uint64_t most) const {
  if (entry.size > most) {
    damaged("an entry unpacks to " + std::to_string(entry.size) + " bytes where at most " + std::to_string(most) +
            " are expected");
  }
  if (entry.method != 0 && entry.method != 8) damaged("an entry of it is neither stored nor deflated");
  if (entry.method == 0) return std::string(stored(entry));
  std::string out = inflated(packed(entry), false, entry.size, name_);
  check(out, entry);
  return out;
}

std::string_view Zip::stored(const Entry& entry) const {
  const std::string_view data = packed(entry);
  check(data, entry);
  return data;
}

void Zip::check(std::string_view data, const Entry& entry) const {
  uLong crc = crc32(0, nullptr, 0);
  for (size_t at = 0; at < data.size(); at += kPiece) {
    crc = crc32(crc, reinterpret_cast<const Bytef*>(data.data() + at), static_cast<uInt>(std::min(kPiece, data.size() - at)));
  }
  if (data.size() != entry.size || crc != entry.crc) damaged("an entry of it has other bytes than it says");
}

void Zip::damaged(const std::string& why) const {
  throw DataError(name_ + " is no whole zip file: " + why + "; write or fetch it again");
}

uint64_t Zip::number(uint64_t at, int bytes) const {
  if (at > file_.size() || file_.size() - at < static_cast<uint64_t>(bytes)) damaged("it is cut short");
  uint64_t value = 0;
  for (int place = bytes; place-- > 0;) value = value << 8 | static_cast<uint8_t>(file_[at + static_cast<uint64_t>(place)]);
  return value;
}

}  // namespace edgefl
