"""How fast a drive is: by engine, tile size and queue depth, burst and sustained.

Scope: `python -m benchmarks.disk --path DIR`: the trainer's engines, beside them a plain loop in one thread, and fio.
Not here: one transfer (`tiering/probe_file.py`), what a plan takes from it (`megatrain measure`), fio (`fio.py`).
"""

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from benchmarks import fio
from megatrain.console import AsJson, Debug, new_app, print_json, reported, run_app, size_option, stdout_kept
from megatrain.errors import UserError
from megatrain.sizes import format_rate, format_size
from tiering import gds
from tiering.drive import DriveFacts, drive_facts
from tiering.engine import Extent, IOEngine, View, flat
from tiering.gds_trial import best_settings
from tiering.hardware import READ_SHARE
from tiering.hardware_file import ByteRate
from tiering.limits import memory_limit
from tiering.measure_disk import DEPTHS, QUICK_DEPTHS, DiskRates, Series, best_depth, rates_by_depth, series
from tiering.place import check_place, folder_beside
from tiering.posix import PosixEngine
from tiering.probe_file import MIXES, MiB, ProbeFile, What, probe_file
from tiering.workload import PAGE

PLAIN = "plain loop"
LARGEST_FILE = 512 * MiB
app = new_app()


class PlainEngine(PosixEngine):
    """Not an engine: the caller's own thread moves the bytes, one `preadv` or `pwritev` after the other."""

    name = PLAIN

    def submit_read(self, extent: Extent, view: View) -> Future[int]:
        with flat("read", extent, view) as whole:
            return _finished(self._transfer("read", extent, whole))

    def submit_write(self, extent: Extent, view: View) -> Future[int]:
        with flat("write", extent, view) as whole:
            return _finished(self._transfer("write", extent, whole))


def _finished(moved: int) -> Future[int]:
    future: Future[int] = Future()
    future.set_result(moved)
    return future


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is measured. pass_bytes: of each pass of the table; series_bytes: written by each long run."""

    tiles: tuple[int, ...]
    depths: tuple[int, ...]
    pass_bytes: int
    series_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Lasting:
    """Long runs of one engine, at its best tile size and depth."""

    engine: str
    at: DiskRates
    series: dict[What, Series]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """rows: by engine. not_run: why an engine is missing."""

    facts: DriveFacts
    rows: tuple[tuple[str, DiskRates], ...]
    lasting: tuple[Lasting, ...]
    not_run: dict[str, str]
    written_bytes: int

    def as_json(self) -> dict[str, Any]:
        """All rates as entries with value, unit, source, how and date."""
        return {
            "mount_point": self.facts.mount_point,
            "fs_type": self.facts.fs_type,
            "devices": list(self.facts.devices),
            "model": self.facts.model,
            "link_bytes_per_s": self.facts.link_bytes_per_s,
            "rows": [{"engine": engine} | _entry(rates) for engine, rates in self.rows],
            "lasting": [
                {"engine": long.engine, "tile_bytes": long.at.request_bytes, "queue_depth": long.at.queue_depth}
                | {
                    what: {
                        "burst": ByteRate.of(found.burst).model_dump(),
                        "sustained": ByteRate.of(found.sustained).model_dump(),
                        "steady": found.steady,
                    }
                    for what, found in long.series.items()
                }
                for long in self.lasting
            ],
            "not_run": self.not_run,
            "written_bytes": self.written_bytes,
        }

    def render(self, console: Console) -> None:
        """Two tables, and a line for each engine that is missing."""
        where = f"{self.facts.model or ', '.join(self.facts.devices) or 'drive'}, {self.facts.fs_type}"
        table = Table("engine", "tile", "depth", *MIXES, title=f"By tile size and depth: {where}", title_justify="left")
        for engine, rates in self.rows:
            found = (rates.read, rates.write, rates.mixed)
            values = [format_rate(rate.per_s) for rate in found]
            table.add_row(engine, format_size(rates.request_bytes), str(rates.queue_depth), *values)
        long_table = Table("engine", "tile", "depth", "what", "burst", "sustained", "over", title_justify="left")
        long_table.title = "Long runs at the best tile size and depth"
        for long in self.lasting:
            at = (format_size(long.at.request_bytes), str(long.at.queue_depth))
            for what, one in long.series.items():
                rates_shown = (format_rate(one.burst.per_s), format_rate(one.sustained.per_s))
                over = one.sustained.how.split(" in requests")[0].removeprefix(f"{what}: ")
                long_table.add_row(long.engine, *at, what, *rates_shown, over + ("" if one.steady else ", not steady"))
        for each in (table, long_table):
            for column in each.columns[1:3] + each.columns[-3:]:
                column.justify = "right"
            console.print(each)
        for label in sorted({label for _, rates in self.rows for label in _labels(rates)}):
            console.print(f"Beware: {label}", highlight=False, markup=False)
        for engine, why in self.not_run.items():
            console.print(f"{engine}: not run: {why}", highlight=False, markup=False)
        console.print(f"Written to measure: {format_size(self.written_bytes)}; the file is gone", highlight=False)


def _entry(rates: DiskRates) -> dict[str, Any]:
    named = {"read": rates.read, "write": rates.write, "mixed": rates.mixed}
    sizes = {"tile_bytes": rates.request_bytes, "queue_depth": rates.queue_depth}
    return sizes | {what: ByteRate.of(rate).model_dump() for what, rate in named.items()}


def _labels(rates: DiskRates) -> list[str]:
    return [rate.how.partition("; ")[2] for rate in (rates.read, rates.write, rates.mixed) if "; " in rate.how]


@app.command()
def disk(
    path: Annotated[Path, typer.Option("--path", metavar="DIR", help="A folder on the drive.")],
    tile: Annotated[list[str] | None, typer.Option("--tile", help="Tile size; several may be given.")] = None,
    depth: Annotated[list[int] | None, typer.Option("--depth", min=1, max=64, help="Queue depth; several.")] = None,
    max_bytes: Annotated[
        str | None, typer.Option("--max-bytes", help="Bytes to write at most; 8GiB if not given.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Write 4 GiB at most, at two depths.")] = False,
    buffered: Annotated[bool, typer.Option("--buffered", help="Through the page cache, and labelled so.")] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure a drive: reads, writes and the mix of a training step, by engine, tile size and queue depth."""
    with reported(debug):
        check_place(path)
        tiles = tuple(size_option("--tile", text, least=PAGE) // PAGE * PAGE for text in tile or ("1MiB", "8MiB"))
        depths = tuple(sorted(set(depth or (QUICK_DEPTHS if quick else DEPTHS))))
        if max(tiles) * max(depths) > _memory():
            raise UserError(
                f"--tile {max(tiles)} bytes, {max(depths)} in flight: more than the {_memory()} bytes that buffers may "
                f"take (an eighth of the memory). Fix: a smaller tile or depth"
            )
        most = size_option("--max-bytes", max_bytes or ("4GiB" if quick else "8GiB"))
        with stdout_kept(as_json), Console(stderr=True).status("measuring"):
            report = measure(path, tiles, depths, most, buffered=buffered)
        if as_json:
            print_json(report.as_json())
        else:
            report.render(Console())


def measure(
    path: Path, tiles: Sequence[int], depths: Sequence[int], most_written_bytes: int, *, buffered: bool = False
) -> Report:
    """All engines one after the other. Raises UserError where the bound of bytes is too small for the tiles."""
    facts = drive_facts(folder_beside(path))
    not_run: dict[str, str] = {}
    engines: list[tuple[IOEngine, Sequence[int]]] = [
        (PlainEngine(1, direct=not buffered), (1,)),
        (PosixEngine(max(depths), direct=not buffered), depths),
    ]
    why = "it has no buffered form" if buffered else gds.probe(path)
    if why is None:
        settings = best_settings(path, memory=min(_memory(), 128 * MiB))
        engines.append((gds.KvikioEngine(max(depths), settings=settings), depths))
    else:
        not_run["kvikio"] = why
    program = fio.found()
    if program is None or buffered:
        not_run["fio"] = (
            "it is not run buffered" if buffered else f"no fio with {' or '.join(fio.ENGINES)} is installed"
        )
    sizes = _shared_out(tiles, depths, most_written_bytes, len(engines) + (1 if "fio" not in not_run else 0))
    rows: list[tuple[str, DiskRates]] = []
    lasting: list[Lasting] = []
    written = 0
    for engine, engine_depths in engines:
        with engine:
            found, long, wrote = _through(path, engine, sizes, engine_depths, facts.link_bytes_per_s, buffered)
        rows += [(engine.name, rates) for rates in found]
        lasting += long
        written += wrote
    if program is not None and "fio" not in not_run:
        try:
            found, wrote = fio.rates(program, path, sizes.tiles, depths, sizes.pass_bytes)
            rows += [(f"fio {program.ioengine}", rates) for rates in found]
            written += wrote
        except fio.FioError as error:
            not_run["fio"] = str(error)
    return Report(facts=facts, rows=tuple(rows), lasting=tuple(lasting), not_run=not_run, written_bytes=written)


def _memory() -> int:
    """Bytes that buffers may take."""
    return memory_limit()[0] // 8


def _shared_out(tiles: Sequence[int], depths: Sequence[int], most_written_bytes: int, engines: int) -> Sizes:
    """Half of the bytes for the tables of all engines, the rest for long runs of those that are engines."""
    passes = engines * (len(tiles) * (1 + len(depths) * (2 - READ_SHARE)) + 1)  # fills, writes, mixes; a fill for a run
    pass_bytes = min(LARGEST_FILE, int(most_written_bytes / 2 / passes))
    whole_mix = len(MIXES["mixed"]) * max(tiles)
    if pass_bytes < whole_mix:
        least = int(2 * passes * (whole_mix + 1))
        raise UserError(
            f"--max-bytes {most_written_bytes} is too little for tiles of {max(tiles)} bytes at {len(depths)} depths "
            f"with {engines} engines. Fix: --max-bytes {least}, smaller tiles or fewer depths"
        )
    return Sizes(
        tiles=tuple(tiles),
        depths=tuple(depths),
        pass_bytes=pass_bytes,
        series_bytes=int(most_written_bytes / 2 / engines / 2),  # of each a run of writes, and one of the mix
    )


def _through(
    path: Path, engine: IOEngine, sizes: Sizes, depths: Sequence[int], link_bytes_per_s: float, buffered: bool
) -> tuple[list[DiskRates], list[Lasting], int]:
    """Rows of one engine, its long runs (of the plain loop none), and the bytes written."""
    rows: list[DiskRates] = []
    lasting: list[Lasting] = []
    written = 0
    memory = _memory()

    def file_of(tile: int) -> AbstractContextManager[ProbeFile]:
        return probe_file(
            path,
            engine,
            nbytes=sizes.pass_bytes,
            request_bytes=tile,
            memory=memory,
            link_bytes_per_s=link_bytes_per_s,
            buffered=buffered,
        )

    for tile in sizes.tiles:
        with file_of(tile) as file:
            rows += rates_by_depth(file, depths, request_bytes=tile, most_bytes=file.nbytes)
            written += file.written_bytes
    if engine.name != PLAIN:
        best = best_depth(rows)
        with file_of(best.request_bytes) as file:
            long = {
                what: series(
                    file,
                    what,
                    depth=best.queue_depth,
                    request_bytes=best.request_bytes,
                    most_bytes=int(sizes.series_bytes / (1 - READ_SHARE if what == "mixed" else 1)),
                )
                for what in MIXES
            }
            written += file.written_bytes
        lasting.append(Lasting(engine=engine.name, at=best, series=long))
    return rows, lasting, written


if __name__ == "__main__":
    run_app(app, "python -m benchmarks.disk")
