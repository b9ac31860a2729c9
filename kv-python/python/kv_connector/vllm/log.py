"""A log whose lines are few: per key one a second, the next one saying how many it stands for."""

import logging
import time

log = logging.getLogger("vllm.kv_connector")


class Limited:
    """Lines about things that can happen a thousand times at once."""

    def __init__(self, seconds: float = 1.0, keys_max: int = 256) -> None:
        self._seconds = seconds
        self._keys_max = keys_max
        self._last: dict[str, tuple[float, int]] = {}

    def warning(self, key: str, text: str, *args: object) -> None:
        """Writes the line, unless one of the same key was written within the last second."""
        now = time.monotonic()
        at, left_out = self._last.get(key, (float("-inf"), 0))
        if now - at < self._seconds:
            self._last[key] = (at, left_out + 1)
            return
        if len(self._last) >= self._keys_max:
            self._last.clear()
        self._last[key] = (now, 0)
        if left_out:
            text += f" ({left_out} more like this)"
        log.warning(text, *args)
