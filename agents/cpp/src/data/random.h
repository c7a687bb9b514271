// The generator that batches and noise are drawn by: numpy's Philox (4x64, ten rounds), seeded by its SeedSequence, and
// those of numpy's draws that a device makes of it. Equal keys give the bits that numpy gives.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace edgefl {

class Random {
 public:
  // `key` as docs/protocol.md has it: (seed, stream), (seed, stream, step), (seed, 2^20, step, port).
  explicit Random(const std::vector<uint64_t>& key);

  uint64_t next64();
  uint32_t next32();                                                 // the low half of a draw, then its high half
  float uniform();                                                   // [0, 1), 24 bits
  uint64_t below(uint64_t count);                                    // 0 .. count-1; `count` is at least 1
  std::vector<int64_t> integers(int64_t count, int64_t draws);       // with replacement
  std::vector<int64_t> permutation(int64_t count);                   // 0 .. count-1, shuffled
  std::vector<int64_t> without_replacement(int64_t count, int64_t draws);

 private:
  uint64_t up_to(uint64_t most);  // 0 .. most
  void shuffle(std::vector<int64_t>& values, size_t first);

  std::array<uint64_t, 4> counter_{};
  std::array<uint64_t, 2> key_{};
  std::array<uint64_t, 4> drawn_{};
  size_t place_ = 4;  // in drawn_
  uint32_t half_ = 0;
  bool has_half_ = false;
};

}  // namespace edgefl
