"""Tells when a device has done what was issued on its streams.

Scope: `Completions`: one thread a lane that waits for the events of its lane, in order.
Not here: issuing, and what follows when something is done (`pipeline.py`).
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

from tiering.lanes import Event
from tiering.workload import Lane

T = TypeVar("T")


class Completions(Generic[T]):
    """Calls `done(what, event)` when `event` has happened, and `fail(error)` when it failed; both on an own thread.

    After a failure of a lane the rest of it is waited for and not told of.
    """

    def __init__(self, done: Callable[[T, Event], None], fail: Callable[[BaseException], None]) -> None:
        self._done = done
        self._fail = fail
        self._queues: dict[Lane, SimpleQueue[tuple[T, Event] | None]] = {}
        self._threads: list[threading.Thread] = []

    def put(self, lane: Lane, what: T, event: Event) -> None:
        """`what` was issued in `lane`. Called by one thread at a time; the first of a lane starts its thread."""
        queue = self._queues.get(lane)
        if queue is None:
            queue = self._queues[lane] = SimpleQueue()
            self._threads.append(threading.Thread(target=self._wait, args=(queue,), name=f"device-{lane}", daemon=True))
            self._threads[-1].start()
        queue.put((what, event))

    def close(self) -> None:
        """Return when all that was put has happened or failed."""
        for queue in self._queues.values():
            queue.put(None)
        for thread in self._threads:
            thread.join()
        self._queues.clear()
        self._threads.clear()

    def _wait(self, queue: "SimpleQueue[tuple[T, Event] | None]") -> None:
        failed = False
        while (entry := queue.get()) is not None:
            what, event = entry
            try:
                event.synchronize()
                if not failed:
                    self._done(what, event)
            except BaseException as error:  # raised on this thread it would be lost, and everybody would wait for ever
                failed = True
                self._fail(error)
