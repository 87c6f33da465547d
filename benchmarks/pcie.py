"""How fast bytes move between host and GPU: to it, from it and both at once, pinned and pageable.

Scope: `python -m benchmarks.pcie`. Without a GPU it says so and measures copies within the host.
Not here: the timing (`tiering/measure_device.py`), drives (`disk.py`).
"""

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from megatrain.console import AsJson, Debug, new_app, print_json, reported, run_app, size_option, stdout_kept
from megatrain.errors import UserError
from megatrain.sizes import format_rate
from tiering.hardware import Rate
from tiering.hardware_file import ByteRate
from tiering.limits import memory_limit
from tiering.measure_device import device_copy_rates, first_device
from tiering.measure_memory import host_copy_rate

app = new_app()


@app.command()
def pcie(
    size: Annotated[str, typer.Option("--bytes", help="Size of a buffer; two in the host.")] = "256MiB",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Measure copies between host memory and the GPU; without a GPU, copies within host memory."""
    with reported(debug):
        nbytes = size_option("--bytes", size)
        limit, why = memory_limit()
        if 4 * nbytes > limit:
            raise UserError(f"--bytes {nbytes} takes {4 * nbytes} bytes, {limit} are there ({why}). Fix: a smaller one")
        with stdout_kept(as_json):
            device, rates = measure(nbytes)
        if as_json:
            print_json(_as_json(device, rates))
        else:
            _render(device, rates, Console())


def measure(nbytes: int) -> tuple[str, dict[str, Rate]]:
    """The GPU's name (empty without one), and rates by name."""
    import torch

    device = first_device()
    name = torch.get_device_module(device).get_device_name(device) if device is not None else ""
    return name, {"host_copy": host_copy_rate(nbytes)} | device_copy_rates(device, nbytes)


def _as_json(device: str, rates: dict[str, Rate]) -> dict[str, Any]:
    return {
        "device": device or None,
        "reason": "" if device else "no CUDA device: copies within host memory only",
        "rates": {name: ByteRate.of(rate).model_dump() for name, rate in rates.items()},
    }


def _render(device: str, rates: dict[str, Rate], console: Console) -> None:
    if not device:
        console.print("No CUDA device on this machine: copies within host memory only.")
    table = Table("copy", "rate", "how", title=device or "Host memory", title_justify="left")
    table.columns[1].justify = "right"
    for name, rate in rates.items():
        table.add_row(name.replace("_", " "), format_rate(rate.per_s), rate.how)
    console.print(table)


if __name__ == "__main__":
    run_app(app, "python -m benchmarks.pcie")
