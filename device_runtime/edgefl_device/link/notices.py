"""What is told now and then: whoever can write to a device may write the same a million times."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable

_MOST = 256


class Notices:
    """Each thing is due once in ``every_s`` seconds; how often one was not is counted in ``hushed``. For one thread."""

    def __init__(self, every_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._every_s = every_s
        self._clock = clock
        self._again_at: OrderedDict[Hashable, float] = OrderedDict()
        self.hushed = 0

    def due(self, what: Hashable) -> bool:
        """Whether ``what`` is told now."""
        now = self._clock()
        if now < self._again_at.get(what, now):
            self.hushed += 1
            return False
        self._again_at[what] = now + self._every_s
        self._again_at.move_to_end(what)
        if len(self._again_at) > _MOST:
            self._again_at.popitem(last=False)
        return True
