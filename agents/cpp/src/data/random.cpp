#include "data/random.h"

#include <numeric>
#include <unordered_set>
#include <utility>

namespace edgefl {
namespace {

using Wide = unsigned __int128;

// SeedSequence of numpy: a pool of four words into which all words of the entropy are mixed.
constexpr size_t kPool = 4;
constexpr uint32_t kInitA = 0x43b0d7e5, kMultA = 0x931e8875, kInitB = 0x8b51f9dd, kMultB = 0x58f38ded;
constexpr uint32_t kMixLeft = 0xca01f9dd, kMixRight = 0x4973f715;

// Philox 4x64 of Random123.
constexpr uint64_t kFirst = 0xD2E7470EE14C6C93, kSecond = 0xCA5A826395121157;
constexpr uint64_t kBumpFirst = 0x9E3779B97F4A7C15, kBumpSecond = 0xBB67AE8584CAA73B;
constexpr int kRounds = 10;

// Of numpy's choice: beyond so many to choose from, and where that many are drawn, it shuffles all of them.
constexpr int64_t kMany = 10000, kShare = 50;

uint32_t folded(uint32_t value) { return value ^ (value >> 16); }

uint32_t hashed(uint32_t value, uint32_t& constant, uint32_t factor) {
  value ^= constant;
  constant *= factor;
  return folded(value * constant);
}

uint32_t mixed(uint32_t left, uint32_t right) { return folded(kMixLeft * left - kMixRight * right); }

// Each number as words of 32 bits, the lowest first, as few as it takes.
std::vector<uint32_t> words_of(const std::vector<uint64_t>& key) {
  std::vector<uint32_t> words;
  for (const uint64_t number : key) {
    words.push_back(static_cast<uint32_t>(number));
    if (number >> 32 != 0) words.push_back(static_cast<uint32_t>(number >> 32));
  }
  return words;
}

std::array<uint64_t, 2> seeded(const std::vector<uint64_t>& key) {
  const std::vector<uint32_t> words = words_of(key);
  std::array<uint32_t, kPool> pool{};
  uint32_t constant = kInitA;
  for (size_t at = 0; at < kPool; ++at) pool[at] = hashed(at < words.size() ? words[at] : 0, constant, kMultA);
  for (size_t from = 0; from < kPool; ++from) {
    for (size_t to = 0; to < kPool; ++to) {
      if (from != to) pool[to] = mixed(pool[to], hashed(pool[from], constant, kMultA));
    }
  }
  for (size_t from = kPool; from < words.size(); ++from) {
    for (uint32_t& word : pool) word = mixed(word, hashed(words[from], constant, kMultA));
  }
  constant = kInitB;
  std::array<uint64_t, 2> state{};
  for (size_t at = 0; at < kPool; ++at) {
    state[at / 2] |= static_cast<uint64_t>(hashed(pool[at], constant, kMultB)) << (32 * (at % 2));
  }
  return state;
}

}  // namespace

Random::Random(const std::vector<uint64_t>& key) : key_(seeded(key)) {}

uint64_t Random::next64() {
  if (place_ < drawn_.size()) return drawn_[place_++];
  for (uint64_t& word : counter_) {
    if (++word != 0) break;
  }
  drawn_ = counter_;
  std::array<uint64_t, 2> key = key_;
  for (int round = 0; round < kRounds; ++round) {
    const Wide first = static_cast<Wide>(kFirst) * drawn_[0], second = static_cast<Wide>(kSecond) * drawn_[2];
    drawn_ = {static_cast<uint64_t>(second >> 64) ^ drawn_[1] ^ key[0], static_cast<uint64_t>(second),
              static_cast<uint64_t>(first >> 64) ^ drawn_[3] ^ key[1], static_cast<uint64_t>(first)};
    key[0] += kBumpFirst;
    key[1] += kBumpSecond;
  }
  place_ = 1;
  return drawn_[0];
}

uint32_t Random::next32() {
  if (has_half_) {
    has_half_ = false;
    return half_;
  }
  const uint64_t drawn = next64();
  half_ = static_cast<uint32_t>(drawn >> 32);
  has_half_ = true;
  return static_cast<uint32_t>(drawn);
}

float Random::uniform() { return static_cast<float>(next32() >> 8) * (1.0F / 16777216.0F); }

// Lemire's method, in 32 bits where the numbers fit.
uint64_t Random::below(uint64_t count) {
  if (count <= 1) return 0;
  if (count <= UINT32_MAX) {
    uint64_t product = static_cast<uint64_t>(next32()) * count;
    if (static_cast<uint32_t>(product) < count) {
      const uint32_t least = static_cast<uint32_t>((uint64_t{1} << 32) - count) % static_cast<uint32_t>(count);
      while (static_cast<uint32_t>(product) < least) product = static_cast<uint64_t>(next32()) * count;
    }
    return product >> 32;
  }
  if (count == uint64_t{1} << 32) return next32();
  Wide product = static_cast<Wide>(next64()) * count;
  if (static_cast<uint64_t>(product) < count) {
    const uint64_t least = (0 - count) % count;
    while (static_cast<uint64_t>(product) < least) product = static_cast<Wide>(next64()) * count;
  }
  return static_cast<uint64_t>(product >> 64);
}

// By the bits that `most` has, again where they are more. numpy shuffles by this, and picks by Lemire's method.
uint64_t Random::up_to(uint64_t most) {
  uint64_t mask = most;
  for (int shift = 1; shift < 64; shift *= 2) mask |= mask >> shift;
  uint64_t drawn = most + 1;
  while (most != 0 && drawn > most) drawn = mask & (most <= UINT32_MAX ? next32() : next64());
  return most == 0 ? 0 : drawn;
}

std::vector<int64_t> Random::integers(int64_t count, int64_t draws) {
  std::vector<int64_t> found(static_cast<size_t>(draws));
  for (int64_t& each : found) each = static_cast<int64_t>(below(static_cast<uint64_t>(count)));
  return found;
}

std::vector<int64_t> Random::permutation(int64_t count) {
  std::vector<int64_t> order(static_cast<size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  for (size_t at = order.size(); at-- > 1;) std::swap(order[at], order[up_to(at)]);
  return order;
}

std::vector<int64_t> Random::without_replacement(int64_t count, int64_t draws) {
  if (count > kMany && draws > count / kShare) {
    std::vector<int64_t> order(static_cast<size_t>(count));
    std::iota(order.begin(), order.end(), 0);
    shuffle(order, static_cast<size_t>(count - draws > 1 ? count - draws : 1));
    return {order.end() - draws, order.end()};
  }
  std::vector<int64_t> found;  // Floyd's method
  std::unordered_set<int64_t> taken;
  for (int64_t most = count - draws; most < count; ++most) {
    int64_t value = static_cast<int64_t>(below(static_cast<uint64_t>(most) + 1));
    if (!taken.insert(value).second) taken.insert(value = most);
    found.push_back(value);
  }
  shuffle(found, 1);
  return found;
}

void Random::shuffle(std::vector<int64_t>& values, size_t first) {
  for (size_t at = values.size(); at-- > first;) std::swap(values[at], values[below(at + 1)]);
}

}  // namespace edgefl
