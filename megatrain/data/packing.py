"""Which samples share a row.

Scope: best-fit decreasing on the lengths of the samples.
Not here: how a packed row looks (`batch.py`), the models that can take one (`files.py`).

>>> [row.tolist() for row in pack([5, 3, 4, 2], room=7)]
[[0, 3], [1, 2]]
"""

from bisect import bisect_left, insort
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def pack(lengths: Sequence[int] | NDArray[np.integer], room: int) -> list[NDArray[np.int64]]:
    """Rows of sample numbers; the lengths of a row come to `room` at most, each sample is in one row.

    The longest sample goes first, into the row with the least room that is enough. The same lengths give the same rows.
    """
    rows: list[list[int]] = []
    by_room: dict[int, list[int]] = {}
    rooms: list[int] = []  # the keys of by_room, ascending
    for sample in np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable"):
        length = int(lengths[sample])
        assert 0 < length <= room, (length, room)
        place = bisect_left(rooms, length)
        if place == len(rooms):
            row, left = len(rows), room
            rows.append([])
        else:
            left = rooms[place]
            row = by_room[left].pop()
            if not by_room[left]:
                del by_room[left], rooms[place]
        rows[row].append(int(sample))
        left -= length
        if left not in by_room:
            insort(rooms, left)
            by_room[left] = []
        by_room[left].append(row)
    return [np.sort(np.asarray(row, dtype=np.int64)) for row in rows]
