"""The draws of docs/protocol.md ("The generator") in plain integers: what the vectors, which numpy made, are held against.

Whoever writes an agent in another language can read it as the specification.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

_32, _64 = (1 << 32) - 1, (1 << 64) - 1
_POOL = 4


def words_of(key: Sequence[int]) -> list[int]:
    """Each number as 32-bit words, the lowest first, at least one; all behind each other."""
    words = []
    for number in key:
        words += [number >> 32 * place & _32 for place in range(max(1, -(-number.bit_length() // 32)))]
    return words


def seed_sequence(key: Sequence[int], count: int) -> list[int]:
    """``count`` 64-bit numbers of a SeedSequence of ``key``."""
    entropy = words_of(key)
    constant = 0x43B0D7E5

    def hashed(value: int) -> int:
        nonlocal constant
        value = (value ^ constant) & _32
        constant = constant * 0x931E8875 & _32
        value = value * constant & _32
        return value ^ value >> 16

    def mixed(x: int, y: int) -> int:
        value = (x * 0xCA01F9DD - y * 0x4973F715) & _32
        return value ^ value >> 16

    pool = [hashed(entropy[place] if place < len(entropy) else 0) for place in range(_POOL)]
    for source in range(_POOL):
        for target in range(_POOL):
            if source != target:
                pool[target] = mixed(pool[target], hashed(pool[source]))
    for source in range(_POOL, len(entropy)):
        for target in range(_POOL):
            pool[target] = mixed(pool[target], hashed(entropy[source]))
    constant, words = 0x8B51F9DD, []
    for place in range(2 * count):
        value = (pool[place % _POOL] ^ constant) & _32
        constant = constant * 0x58F38DED & _32
        value = value * constant & _32
        words.append(value ^ value >> 16)
    return [words[2 * place] | words[2 * place + 1] << 32 for place in range(count)]


class Philox:
    """Philox 4x64 with ten rounds; its key is the SeedSequence of ``key``, its counter begins at 1."""

    def __init__(self, *key: int) -> None:
        self._key = seed_sequence(key, 2)
        self._counter = 0
        self._left: list[int] = []
        self._half: int | None = None

    def next64(self) -> int:
        """Four numbers of each counter, in their order."""
        if not self._left:
            self._counter += 1
            self._left = self._block()
        return self._left.pop(0)

    def next32(self) -> int:
        """The low half of a 64-bit number, and then its high half."""
        if self._half is not None:
            value, self._half = self._half, None
            return value
        whole = self.next64()
        self._half = whole >> 32
        return whole & _32

    def _block(self) -> list[int]:
        counter = [self._counter >> 64 * place & _64 for place in range(4)]
        first, second = self._key
        for round_number in range(10):
            if round_number:
                first, second = (first + 0x9E3779B97F4A7C15) & _64, (second + 0xBB67AE8584CAA73B) & _64
            left, right = 0xD2E7470EE14C6C93 * counter[0], 0xCA5A826395121157 * counter[2]
            counter = [
                right >> 64 ^ counter[1] ^ first,
                right & _64,
                left >> 64 ^ counter[3] ^ second,
                left & _64,
            ]
        return counter

    def uniform(self) -> Fraction:
        """A float32 in [0, 1): 24 bits."""
        return Fraction(self.next32() >> 8, 1 << 24)

    def below(self, count: int) -> int:
        """An integer in [0, count), for counts below 2^32: Lemire's way. Nothing is drawn for a count of 1."""
        if count == 1:
            return 0
        product = self.next32() * count
        if product & _32 < count:
            least = ((1 << 32) - count) % count
            while product & _32 < least:
                product = self.next32() * count
        return product >> 32

    def interval(self, most: int) -> int:
        """An integer in [0, most], for ``most`` below 2^32: masked, and drawn again while it is too large."""
        if most == 0:
            return 0
        mask = (1 << most.bit_length()) - 1
        while (value := self.next32() & mask) > most:
            pass
        return value

    def permutation(self, count: int) -> list[int]:
        """0 to count - 1: from the last place to the second, each changes places with one at or before it."""
        order = list(range(count))
        for place in range(count - 1, 0, -1):
            other = self.interval(place)
            order[place], order[other] = order[other], order[place]
        return order

    def distinct(self, rows: int, count: int) -> list[int]:
        """``count`` of ``rows`` numbers without replacement: Floyd's way, shuffled at the end; of more than 10,000 rows,
        where ``count`` is more than a fiftieth of them, the last ``count`` of a shuffle that goes no further."""
        if rows > 10_000 and count > rows // 50:
            order = list(range(rows))
            for place in range(rows - 1, max(rows - count, 1) - 1, -1):
                other = self.below(place + 1)
                order[place], order[other] = order[other], order[place]
            return order[rows - count :]
        chosen: list[int] = []
        for last in range(rows - count, rows):
            value = self.below(last + 1)
            chosen.append(last if value in chosen else value)
        for place in range(count - 1, 0, -1):
            other = self.below(place + 1)
            chosen[place], chosen[other] = chosen[other], chosen[place]
        return chosen


def walk(seed: int, stream: int, step: int, rows: int, batch: int) -> list[int]:
    """Row numbers of a batch with ``draws`` = walk."""
    if rows < batch:
        return with_replacement(seed, stream, step, rows, batch)
    order = Philox(seed, stream).permutation(rows)
    return [order[place % rows] for place in range(step * batch, (step + 1) * batch)]


def draw(seed: int, stream: int, step: int, rows: int, batch: int) -> list[int]:
    """Row numbers of a batch with ``draws`` = draw."""
    if rows < batch:
        return with_replacement(seed, stream, step, rows, batch)
    return Philox(seed, stream, step).distinct(rows, batch)


def with_replacement(seed: int, stream: int, step: int, rows: int, batch: int) -> list[int]:
    """Row numbers where there are fewer rows than a batch has."""
    generator = Philox(seed, stream, step)
    return [generator.below(rows) for _ in range(batch)]


def noise(seed: int, step: int, port: int, count: int) -> list[Fraction]:
    """The numbers of one noise port in one step."""
    generator = Philox(seed, 1 << 20, step, port)
    return [generator.uniform() for _ in range(count)]
