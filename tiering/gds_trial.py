"""A short trial on the drive: with how many threads, in which pieces, does kvikio move most?

Scope: `best_settings`, for the start of a run and for `megatrain measure`.
Not here: the pairs and the choice (`gds_settings.py`), the file that is moved (`probe_file.py`).
"""

import time
from dataclasses import replace
from pathlib import Path

from tiering.gds import KvikioEngine
from tiering.gds_settings import ASSUMED, TRIALS, GdsSettings, best
from tiering.measure_disk import request_size
from tiering.probe_file import MiB, probe_file

FILE_BYTES = 64 * MiB
PASS_REQUESTS = 14
"""Two mixes of seven requests of 8 MiB: of all passes 304 MiB are written, with the file."""
PASS_S, TRIAL_S = 0.3, 2.0
DEPTH = 8
BUFFER_BYTES = 128 * MiB


def best_settings(path: Path, *, memory: int) -> GdsSettings:
    """The best of `TRIALS` on the drive of `path`, after about two seconds. memory: bytes for buffers.

    Only where `gds.probe` works. `ASSUMED` where this kvikio cannot be told. Raises what `probe_file` and the engine
    raise.
    """
    request_bytes = request_size(min(memory, BUFFER_BYTES))
    until_s = time.perf_counter() + TRIAL_S
    found: list[GdsSettings] = []
    with KvikioEngine() as engine:
        if not engine.use(TRIALS[0]):
            return ASSUMED
        nbytes = min(FILE_BYTES, 8 * request_bytes)
        with probe_file(path, engine, nbytes=nbytes, request_bytes=request_bytes, memory=memory) as file:
            for settings in TRIALS:
                if found and time.perf_counter() > until_s:
                    break
                engine.use(settings)
                most_bytes = PASS_REQUESTS * request_bytes
                rate = file.rate(
                    "mixed", depth=DEPTH, request_bytes=request_bytes, most_bytes=most_bytes, most_s=PASS_S
                )
                found.append(replace(settings, mixed=rate))
    return best(found)
