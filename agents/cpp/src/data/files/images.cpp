#include "data/files/images.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace edgefl {
namespace {

constexpr int kBits = 22;  // of a coefficient's fraction, as Pillow has them for bytes

// What each place of a stretched line is made of: places from `first` on, each by its share.
struct Share {
  int64_t first = 0;
  std::vector<int64_t> parts;
};

std::vector<Share> shares(int64_t from, int64_t to) {
  const double scale = static_cast<double>(from) / static_cast<double>(to), support = std::max(scale, 1.0);
  std::vector<Share> found(static_cast<size_t>(to));
  for (int64_t place = 0; place < to; ++place) {
    const double center = (static_cast<double>(place) + 0.5) * scale, steep = 1.0 / support;
    const int64_t first = std::max<int64_t>(0, static_cast<int64_t>(center - support + 0.5));
    const int64_t last = std::min(from, static_cast<int64_t>(center + support + 0.5));
    std::vector<double> weights;
    double sum = 0.0;
    for (int64_t at = first; at < last; ++at) {
      const double off = std::fabs((static_cast<double>(at) - center + 0.5) * steep);
      weights.push_back(off < 1.0 ? 1.0 - off : 0.0);
      sum += weights.back();
    }
    Share& share = found[static_cast<size_t>(place)];
    share.first = first;
    for (const double weight : weights) {
      const double part = (sum != 0.0 ? weight / sum : weight) * (1 << kBits);
      share.parts.push_back(static_cast<int64_t>(part < 0 ? part - 0.5 : part + 0.5));
    }
  }
  return found;
}

uint8_t clipped(int64_t sum) { return static_cast<uint8_t>(std::clamp<int64_t>(sum >> kBits, 0, 255)); }

// Along one axis: `inner` bytes lie between two places on it.
Pixels along(const Pixels& pixels, bool across, int64_t to) {
  Pixels made{across ? to : pixels.width, across ? pixels.height : to, pixels.channels, {}};
  made.data.resize(static_cast<size_t>(made.width * made.height * made.channels));
  const std::vector<Share> all = shares(across ? pixels.width : pixels.height, to);
  const int64_t stride = across ? pixels.channels : pixels.width * pixels.channels;
  size_t into = 0;
  for (int64_t y = 0; y < made.height; ++y) {
    for (int64_t x = 0; x < made.width; ++x) {
      const Share& share = all[static_cast<size_t>(across ? x : y)];
      const int64_t start = (across ? y * pixels.width * pixels.channels : x * pixels.channels) + share.first * stride;
      for (int64_t channel = 0; channel < made.channels; ++channel) {
        int64_t sum = 1 << (kBits - 1), from = start + channel;
        for (const int64_t part : share.parts) {
          sum += pixels.data[static_cast<size_t>(from)] * part;
          from += stride;
        }
        made.data[into++] = clipped(sum);
      }
    }
  }
  return made;
}

}  // namespace

Pixels in_channels(Pixels pixels, int64_t channels) {
  if (pixels.channels == channels) return pixels;
  Pixels made{pixels.width, pixels.height, channels, {}};
  made.data.reserve(static_cast<size_t>(made.width * made.height * channels));
  for (size_t at = 0; at < pixels.data.size(); at += static_cast<size_t>(pixels.channels)) {
    const uint8_t* from = &pixels.data[at];
    if (channels == 3) {
      made.data.insert(made.data.end(), 3, *from);
    } else {  // the luma of ITU-R 601
      made.data.push_back(static_cast<uint8_t>((from[0] * 19595 + from[1] * 38470 + from[2] * 7471 + 0x8000) >> 16));
    }
  }
  return made;
}

Pixels upright(Pixels pixels, int orientation) {
  if (orientation < 2 || orientation > 8) return pixels;
  const bool lies = orientation >= 5;  // width and height change places
  Pixels made{lies ? pixels.height : pixels.width, lies ? pixels.width : pixels.height, pixels.channels, {}};
  made.data.reserve(pixels.data.size());
  for (int64_t y = 0; y < made.height; ++y) {
    for (int64_t x = 0; x < made.width; ++x) {
      int64_t from_x = lies ? y : x, from_y = lies ? x : y;
      if (orientation == 2 || orientation == 3 || orientation == 7 || orientation == 8) from_x = pixels.width - 1 - from_x;
      if (orientation == 3 || orientation == 4 || orientation == 6 || orientation == 7) from_y = pixels.height - 1 - from_y;
      const auto* from = &pixels.data[static_cast<size_t>((from_y * pixels.width + from_x) * pixels.channels)];
      made.data.insert(made.data.end(), from, from + pixels.channels);
    }
  }
  return made;
}

Pixels stretched(Pixels pixels, int64_t width, int64_t height) {
  if (pixels.width != width) pixels = along(pixels, true, width);
  if (pixels.height != height) pixels = along(pixels, false, height);
  return pixels;
}

int exif_orientation(std::string_view tiff) {
  const bool little = tiff.substr(0, 2) == "II";
  if (!little && tiff.substr(0, 2) != "MM") return 1;
  const auto number = [&](size_t at, size_t bytes) {
    uint32_t value = 0;
    for (size_t place = 0; place < bytes; ++place) {
      const size_t from = at + (little ? bytes - 1 - place : place);
      value = value << 8 | (from < tiff.size() ? static_cast<uint8_t>(tiff[from]) : 0U);
    }
    return value;
  };
  const size_t table = number(4, 4);
  for (size_t entry = 0, count = number(table, 2); entry < count && table + 2 + 12 * entry < tiff.size(); ++entry) {
    const size_t at = table + 2 + 12 * entry;
    if (number(at, 2) == 0x0112) return static_cast<int>(number(at + 8, 2));
  }
  return 1;
}

Tensor image_sample(std::string_view file, const Shape& shape, int64_t white) {
  const int64_t channels = shape[0], height = shape[1], width = shape[2];
  const Pixels pixels = stretched(decoded(file, channels, width, height), width, height);
  Tensor sample(DType::u8, shape);
  auto* into = sample.as<uint8_t>();
  for (int64_t channel = 0; channel < channels; ++channel) {
    for (size_t at = static_cast<size_t>(channel); at < pixels.data.size(); at += static_cast<size_t>(channels)) {
      *into++ = white == 255 ? pixels.data[at] : static_cast<uint8_t>((pixels.data[at] * white + 127) / 255);
    }
  }
  return sample;
}

}  // namespace edgefl
