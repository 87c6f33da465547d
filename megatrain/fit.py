"""Does it fit? The refusals that need no model: of the budget, the drives, the device.

Scope: checks on a run file and the machine that take well under a second.
Not here: what only the model or torch can tell (`prepare.py`), whether there is a device (`accelerator.py`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from megatrain.catalog.estimate import estimate
from megatrain.catalog.shapes import unit_sizes
from megatrain.config import RunConfig
from megatrain.errors import UserError
from megatrain.programs import UnitSize, training_workload
from tiering.choose import refuse_engine
from tiering.device import on_device
from tiering.errors import BudgetError
from tiering.hardware_file import DriveEntry, HardwareFile, load
from tiering.limits import memory_available, memory_limit
from tiering.plan import refuse


def refuse_early(run: RunConfig) -> None:
    """Raises UserError or a TieringError for a run that cannot work, as far as can be told without torch."""
    for folder in run.tiers.nvme:
        refuse_engine(run.tiers.engine, folder)
    if run.tiers.hardware is not None:
        drives_of(run, load(run.tiers.hardware))
    config = run.model.json_config()
    sizes = unit_sizes(config)
    costs = estimate(config, run.train.micro_batch, run.data.seq_len)
    known = not run.model.freeze  # which parameters are frozen, so take no gradients, only the model's names tell
    if known and sizes is not None and costs is not None:
        micro_batches = run.train.batch // run.train.micro_batch
        inputs = {name: micro_batches * cost.input_bytes for name, cost in costs.items()}
        sizes = [replace(size, activation_bytes=inputs.get(size.name, 0)) for size in sizes]
        has_device = None if run.device == "auto" else run.device == "cuda"  # only torch can tell
        refuse_budget(run, sizes, has_device=has_device)
    else:
        host_budget(run)


def drives_of(run: RunConfig, file: HardwareFile) -> list[DriveEntry]:
    """The drive of each folder of `tiers.nvme` in a hardware file: that whose path holds it, else by order."""
    found = []
    for number, folder in enumerate(run.tiers.nvme):
        holding = [drive for drive in file.drives if folder.is_relative_to(drive.path)]
        if holding:
            found.append(max(holding, key=lambda drive: len(drive.path)))
        elif number < len(file.drives):
            found.append(file.drives[number])
        else:
            raise UserError(
                f"tiers.hardware: {run.tiers.hardware} knows {len(file.drives)} drives, and none for folder "
                f"{number + 1} of tiers.nvme, {folder}. Fix: measure them together, with one --path a drive"
            )
    return found


def refuse_budget(run: RunConfig, sizes: list[UnitSize], *, has_device: bool | None) -> None:
    """Raises BudgetError if units of these sizes cannot be trained within the run's budget of host memory.

    has_device: ops compute on a device with memory of its own; None: that is not known yet.
    """
    deferred, bf16 = run.train.max_grad_norm is not None, run.train.precision == "bf16"
    workload = training_workload(sizes, deferred=deferred, bf16=bf16)
    # With updates on the host a device asks for no less of HOST than none, with updates of its own it may.
    tried = [on_device(workload) if has_device else workload]
    if has_device is not False and run.train.update_on != "host":
        there = on_device(workload, update=True)
        tried = [there] if run.train.update_on == "device" else [*tried, there]
    first: BudgetError | None = None
    for one in tried:
        try:
            with in_settings():
                return refuse(one, host_budget(run), resident_share(run))
        except BudgetError as error:
            first = first or error
    assert first is not None, "nothing was tried"
    raise first


@contextmanager
def in_settings() -> Iterator[None]:
    """Inside, a refusal of the planner names the keys of the run file instead of the planner's own arguments."""
    try:
        yield
    except BudgetError as error:
        text = str(error).replace("host_budget >=", "tiers.host_memory >=").replace("resident <", "tiers.resident <")
        raise BudgetError(text) from error


def resident_share(run: RunConfig) -> float | None:
    """`tiers.resident`; None: as much as fits."""
    return None if run.tiers.resident == "auto" else run.tiers.resident


def host_budget(run: RunConfig) -> int:
    """`tiers.host_memory`, or half of what is available to this process. Raises UserError if the machine has less."""
    limit, why = memory_limit()
    if run.tiers.host_memory is None:
        return memory_available() // 2
    if run.tiers.host_memory > limit:
        raise UserError(
            f"tiers.host_memory: {run.tiers.host_memory} bytes is more than {why} allows ({limit} bytes). "
            f"Fix: at most {limit * 3 // 4} bytes"
        )
    return run.tiers.host_memory
