"""SIGINT and SIGTERM as a flag that the trainer polls after every step and between the batches of other passes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType


class StopRequest:
    """Remember the first SIGINT or SIGTERM; a second one ends the process as usual.

    Under torchrun further ones are ignored: it passes on signals that the ranks may have received from the terminal
    already, and ends ranks that take too long itself.

    Args:
        notify: Called at the first signal, to let the user know that it was received.

    >>> with StopRequest() as stop:
    ...     stop()
    False
    """

    def __init__(self, notify: Callable[[], None] = lambda: None) -> None:
        self.notify = notify
        self.signal: int | None = None
        self._previous: dict[int, object] = {}

    def __call__(self) -> bool:
        """Whether to stop."""
        return self.signal is not None

    @property
    def exit_code(self) -> int:
        """The exit code of a process that a signal has ended."""
        return 128 + (self.signal or signal.SIGTERM)  # without one, another rank was asked to stop

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._previous[number] = signal.signal(number, self._remember)
        return self

    def __exit__(self, *error: object) -> None:
        self._restore()

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            return
        self.signal = number
        if "TORCHELASTIC_RUN_ID" not in os.environ:  # not under torchrun
            self._restore()
        self.notify()

    def _restore(self) -> None:
        while self._previous:
            number, handler = self._previous.popitem()
            signal.signal(number, handler)  # type: ignore[arg-type]
