#include "data/readers/sounds.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "data/files/mapped_file.h"

namespace edgefl {
namespace {

constexpr uint64_t kIntegers = 1, kFloats = 3, kExtensible = 0xFFFE;  // codes of formats
// A program that writes to a pipe cannot go back and fill in the sizes: it leaves 0, or at least this much.
constexpr uint64_t kUnknownBytes = 0x7FFF0000;
constexpr size_t kSumBlock = 128, kLanes = 8;

uint64_t number_at(std::string_view bytes, size_t place, size_t size) {
  if (place > bytes.size() || size > bytes.size() - place) throw BadRow("is no WAV that can be read: it ends too early");
  uint64_t number = 0;
  for (size_t at = size; at-- > 0;) number = number << 8 | static_cast<unsigned char>(bytes[place + at]);
  return number;
}

struct Format {
  uint64_t kind = 0, channels = 0, rate = 0, frame = 0, bits = 0;

  uint64_t width() const { return (bits + 7) / 8; }

  static Format of(std::string_view fields) {
    Format found{number_at(fields, 0, 2), number_at(fields, 2, 2), number_at(fields, 4, 4), number_at(fields, 12, 2), number_at(fields, 14, 2)};
    if (found.kind == kExtensible) found.kind = number_at(fields, 24, 2);  // the code is in the first bytes of a GUID
    return found;
  }

  void check(const SoundSpec& reader) const {
    const uint64_t size = width();
    const bool integers = kind == kIntegers && size >= 1 && size <= 4, floats = kind == kFloats && (size == 4 || size == 8);
    if (channels == 0 || (!integers && !floats)) {
      char code[16];
      std::snprintf(code, sizeof code, "%#x", static_cast<unsigned>(kind));
      throw BadRow(std::string("is no WAV that can be read: its samples are of format ") + (kind == 0 ? "0x0" : code) + " with " +
                   std::to_string(bits) + " bits; convert them to integers of 8, 16, 24 or 32 bits (PCM)");
    }
    if (frame != channels * size) {
      throw BadRow("is damaged: a sample of each of its " + std::to_string(channels) + " channels, of " + std::to_string(bits) +
                   " bits, takes " + std::to_string(frame) + " bytes, expected " + std::to_string(channels * size) + "; write the file anew");
    }
    if (rate != static_cast<uint64_t>(reader.rate)) {
      throw BadRow("has " + std::to_string(rate) + " samples a second, the federation's have " + std::to_string(reader.rate) + ": convert it");
    }
  }

  // One number in [-1, 1].
  double value(const char* at) const {
    if (kind == kFloats) {
      float single;
      double number;
      if (width() == 4) {
        std::memcpy(&single, at, sizeof single);
        number = single;
      } else {
        std::memcpy(&number, at, sizeof number);
      }
      if (!std::isfinite(number)) throw BadRow("has samples that are NaN or infinite");
      return number;
    }
    if (width() == 1) return (static_cast<unsigned char>(*at) - 128) / 128.0;
    int64_t number = 0;
    for (size_t byte = width(); byte-- > 0;) number = number << 8 | static_cast<unsigned char>(at[byte]);
    const int64_t full = int64_t{1} << (8 * width() - 1);
    return static_cast<double>(number >= full ? number - 2 * full : number) / static_cast<double>(full);
  }
};

// Whether another chunk with room in the file follows; or nothing, at the end of the file.
bool is_chunk(std::string_view rest) {
  if (rest.size() < 8) return rest.empty();
  const bool name = std::all_of(rest.begin(), rest.begin() + 4, [](char letter) { return letter >= 0x20 && letter < 0x7F; });
  return name && number_at(rest, 4, 4) <= rest.size() - 8;
}

// In the order in which numpy adds: the bits of a mean of many floats depend on it.
double sum_of(const double* values, size_t count) {
  if (count < kLanes) {
    double sum = 0.0;
    for (size_t at = 0; at < count; ++at) sum += values[at];
    return sum;
  }
  if (count > kSumBlock) {
    size_t half = count / 2;
    half -= half % kLanes;
    return sum_of(values, half) + sum_of(values + half, count - half);
  }
  double lanes[kLanes];
  std::copy(values, values + kLanes, lanes);
  size_t at = kLanes;
  for (; at < count - count % kLanes; at += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += values[at + lane];
  }
  double sum = ((lanes[0] + lanes[1]) + (lanes[2] + lanes[3])) + ((lanes[4] + lanes[5]) + (lanes[6] + lanes[7]));
  for (; at < count; ++at) sum += values[at];
  return sum;
}

// The bytes of the samples, no more than the reader's length of them, and their format.
std::pair<Format, std::string_view> samples_in(std::string_view file, const SoundSpec& reader) {
  if (file.substr(0, 4) != "RIFF" || file.substr(std::min<size_t>(8, file.size()), 4) != "WAVE") {
    throw BadRow("is no WAV that can be read: it does not begin with RIFF and WAVE");
  }
  Format format;
  size_t place = 12;
  uint64_t size = 0;
  while (true) {
    if (file.size() - place < 8) throw BadRow("is no WAV that can be read: it has no samples");
    const std::string_view name = file.substr(place, 4);
    size = number_at(file, place + 4, 4);
    place += 8;
    if (name == "data") break;
    if (name == "fmt ") format = Format::of(file.substr(place, size));
    place = static_cast<size_t>(std::min<uint64_t>(place + size + size % 2, file.size()));
  }
  format.check(reader);
  const std::string_view rest = file.substr(place);
  const bool piped = size >= kUnknownBytes || (size == 0 && !is_chunk(rest));
  const uint64_t length = static_cast<uint64_t>(reader.length);
  const uint64_t wanted = (piped ? std::min<uint64_t>(length, rest.size()) : std::min(size / format.frame, length)) * format.frame;
  const std::string_view content = rest.substr(0, wanted);
  if (content.size() < format.frame) throw BadRow(wanted > 0 && !piped ? "is damaged: it is shorter than it says" : "holds no sound");
  if (!piped && content.size() < wanted) throw BadRow("is damaged: it is shorter than it says");
  return {format, content};
}

Tensor wave_in(const std::filesystem::path& path, const SoundSpec& reader) {
  std::unique_ptr<MappedFile> file;
  try {
    file = std::make_unique<MappedFile>(path.string());
  } catch (const DataError& error) {
    throw BadRow(std::string("is no WAV that can be read: ") + error.what());
  }
  return wave_of(file->text(), reader);
}

}  // namespace

Tensor wave_of(std::string_view file, const SoundSpec& reader) {
  const auto [format, content] = samples_in(file, reader);
  Tensor wave(DType::f32, {reader.length});
  std::vector<double> channels(format.channels);
  float* into = wave.as<float>();
  bool holds = true;
  for (size_t at = 0; at + format.frame <= content.size(); at += format.frame) {
    for (size_t channel = 0; channel < channels.size(); ++channel) channels[channel] = format.value(content.data() + at + channel * format.width());
    *into = static_cast<float>(sum_of(channels.data(), channels.size()) / static_cast<double>(channels.size()));
    holds = std::isfinite(*into++) && holds;
  }
  if (!holds) throw BadRow("has samples that are beyond what float32 holds");
  return wave;
}

Samples read_sounds(const Reading& reading, const SoundSpec& reader, const Manifest& manifest, const std::vector<FoundFile>& files) {
  const auto decode = [reader](const std::filesystem::path& path) { return wave_in(path, reader); };
  if (reader.features.empty()) {
    reading.check_shape({{reader.length}, {1, reader.length}});
    return reading.decoded(reading.by_folder(files), DType::f32, decode);
  }
  const auto features = reading.parts.graph(reader.features);
  const Port& made = manifest.graph(reader.features).outputs.front();
  if (elements(made.shape) != elements(reading.spec.shape)) {
    throw BundleError("graph " + reader.features + " makes samples of shape " + shown(made.shape) + ", the model takes " +
                      shown(reading.spec.shape) + "; export the bundle again");
  }
  return reading.decoded(reading.by_folder(files), made.dtype, decode, [features](Tensor wave) {
    wave.shape.insert(wave.shape.begin(), 1);
    return features(wave);
  });
}

}  // namespace edgefl
