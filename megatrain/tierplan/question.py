"""From a question that needs neither the weights nor the machine to a forecast: does it fit, how long is a step.

Scope: `Question`, the two budgets that remain for the arenas, `forecast`, and the refusal with its sum. No torch,
unless the config is of a family that only transformers knows.
Not here: reading options (`command.py`), a way out of a refusal (`advice.py`), planning a run file
(`megatrain/prepare.py`).
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

from megatrain.catalog.estimate import estimate
from megatrain.catalog.shapes import active_parameters, parameters, unit_sizes
from megatrain.catalog.unit_cost import UnitCost
from megatrain.chunks import chunk_length
from megatrain.errors import UserError
from megatrain.programs import Precision, UnitSize, training_workload
from megatrain.sizes import format_rate, format_size
from megatrain.tierplan.forecast import Assumption, Elsewhere, Forecast, Memory
from megatrain.training_plan import Choice, Limits, UpdateOn, plan_training, weigh_places
from megatrain.workspace import (
    CUDA_LIBRARIES,
    DEVICE_CONTEXT,
    HOST_LIBRARIES,
    chosen_micro_batch,
    compute_lines,
)
from tiering.errors import BudgetError
from tiering.hardware import RATE_UNITS, Drive, Hardware, all_direct, all_drives
from tiering.plan import Line, Plan, ShortError, frugal
from tiering.turns import Knobs
from tiering.workload import Tier, Workload

DEFAULT_SEQ = 2048
BF16_NOTE = (
    "computing in BF16 was planned at the rate of FP32 unless one was given (--gpu-flops), and with the workspace of "
    "FP32: a step is no slower and takes no more"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be trained, how, on what. tokens: of a step. host_memory, device_memory: bytes in all, from which the
    libraries take theirs (device_memory None: the CPU computes). micro_batch: sequences (None: to be chosen).
    loss_chunk: tokens of a micro-batch whose logits exist at a time (None: all). precision, update_on: as in a run
    file.
    """

    model: str
    config: Mapping[str, Any]
    tokens: int
    seq_len: int
    host_memory: int
    hardware: Hardware
    drives: tuple[Drive, ...]
    device_memory: int | None = None
    micro_batch: int | None = None
    loss_chunk: int | None = None
    precision: Precision = "fp32"
    update_on: UpdateOn = "auto"
    deferred: bool = False
    resident: float | None = None
    total_tokens: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def rows(self) -> int:
        """Sequences of a step."""
        return self.tokens // self.seq_len

    @property
    def bf16(self) -> bool:
        """True where units compute with BF16 copies of the weights."""
        return self.precision == "bf16"

    def with_drives(self, drives: Sequence[Drive]) -> "Question":
        """The same question with these drives behind the NVME tier."""
        read, write, mixed = all_drives(drives)
        direct = all_direct([drive.direct_read for drive in drives], self.hardware.h2d)
        hardware = replace(self.hardware, read=read, write=write, mixed=mixed, direct_read=direct)
        return replace(self, drives=tuple(drives), hardware=hardware)


class ShortageError(BudgetError):
    """A question whose answer is no: `tier` has `given_bytes` and needs `needed_bytes` in all, the sum of `lines`."""

    def __init__(self, tier: Tier, lines: tuple[Line, ...], given_bytes: int, cause: str) -> None:
        option = {"HOST": "--host-memory", "DEVICE": "--device-memory"}[tier]
        needed = _sum(lines)
        rows = "\n".join(f"  {line.what:<36} {format_size(line.nbytes):>12}" for line in lines)
        super().__init__(
            f"{tier} needs {format_size(needed)}, {option} is {format_size(given_bytes)}. The least that works:\n"
            f"{rows}\n  {'sum':<36} {format_size(needed):>12}" + (f"\n{cause}" if cause else "")
        )
        self.tier, self.lines, self.needed_bytes, self.given_bytes = tier, lines, needed, given_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Sized:
    """A question with everything but the plan: its micro-batch chosen, its units costed, its arenas' budgets known (0
    where nothing is left for an arena).
    """

    question: Question
    micro_batch: int
    units: tuple[UnitSize, ...]
    compute: tuple[Line, ...]
    notes: tuple[str, ...]

    @property
    def on_device(self) -> bool:
        return self.question.device_memory is not None

    @property
    def baseline(self) -> Line:
        """What the libraries take of host memory."""
        return Line(what="library baseline", nbytes=CUDA_LIBRARIES if self.on_device else HOST_LIBRARIES)

    @property
    def beside_host(self) -> tuple[Line, ...]:
        return (self.baseline,) if self.on_device else (*self.compute, self.baseline)

    @property
    def beside_device(self) -> tuple[Line, ...]:
        return (*self.compute, Line(what="CUDA context", nbytes=DEVICE_CONTEXT))

    @property
    def host_budget(self) -> int:
        return max(0, self.question.host_memory - _sum(self.beside_host))

    @property
    def device_budget(self) -> int | None:
        if self.question.device_memory is None:
            return None
        return max(0, self.question.device_memory - _sum(self.beside_device))

    def workload(self) -> Workload:
        return training_workload(self.units, deferred=self.question.deferred, bf16=self.question.bf16)

    @property
    def limits(self) -> Limits:
        return Limits(
            host_bytes=self.host_budget,
            resident=self.question.resident,
            device_bytes=self.device_budget,
            update_on=self.question.update_on,
        )

    def plan(self, candidates: Sequence[Knobs]) -> Plan:
        """The planner's answer with one of these knobs. Raises `ShortageError`."""
        asked = self.question
        try:
            return plan_training(
                self.units,
                asked.hardware,
                self.limits,
                deferred=asked.deferred,
                bf16=asked.bf16,
                candidates=candidates,
            ).plan
        except ShortError as error:
            raise self._shortage(error) from None

    def choice(self) -> Choice:
        """The planner's own answer, and what it says of updates in the other place. Raises `ShortageError`."""
        asked = self.question
        try:
            return weigh_places(self.units, asked.hardware, self.limits, deferred=asked.deferred, bf16=asked.bf16)
        except ShortError as error:
            raise self._shortage(error) from None

    def frugal(self) -> Knobs:
        """The knobs that take the least memory: what does not fit with them does not fit."""
        return frugal(self.workload())

    def _shortage(self, short: ShortError) -> ShortageError:
        """The planner's refusal with everything that stands beside the arena, so that the sum is the tier's."""
        on_host = short.tier == "HOST"
        lines = (*short.lines, *(self.beside_host if on_host else self.beside_device))
        given = self.question.host_memory if on_host else self.question.device_memory
        assert given is not None, "a device that is short has memory of its own"
        return ShortageError(short.tier, tuple(line for line in lines if line.nbytes), given, short.cause)


def _sum(lines: Sequence[Line]) -> int:
    return sum(line.nbytes for line in lines)


def sized(question: Question) -> Sized:
    """Raises UserError if the tokens are no whole micro-batches of whole sequences."""
    _refuse_uneven(question)
    facts = _facts(json.dumps(dict(question.config), sort_keys=True, default=str))
    notes = list(question.notes)
    if not facts.by_arithmetic:
        notes.append(
            "this architecture is not known by arithmetic: transformers built it without weights and was asked"
        )
    if question.bf16:
        notes.append(BF16_NOTE)
    memory = question.device_memory if question.device_memory is not None else question.host_memory
    on_device = question.device_memory is not None

    def workspace(rows: int) -> int:
        costs = facts.costs(rows, question.seq_len, question.loss_chunk, on_device, question.bf16)
        return compute_lines(costs, facts.head, question.rows // rows, on_host=False)[-1].nbytes

    micro_batch = question.micro_batch
    if micro_batch is None:
        micro_batch = chosen_micro_batch(question.rows, memory, workspace)
        notes.append(f"micro-batch {micro_batch} was chosen: it computes in a quarter of the memory at most")
    costs = facts.costs(micro_batch, question.seq_len, question.loss_chunk, on_device, question.bf16)
    count = question.rows // micro_batch
    chunked = chunk_length(micro_batch, question.seq_len, question.loss_chunk) < question.seq_len
    return Sized(
        question=question,
        micro_batch=micro_batch,
        units=tuple(_costed(facts.units, costs, count)),
        compute=compute_lines(costs, facts.head, count, chunked=chunked, on_host=not on_device),
        notes=tuple(notes),
    )


def forecast(question: Question, candidates: Sequence[Knobs] | None = None) -> Forecast:
    """The answer. Raises UserError for what cannot be asked, `ShortageError` for what does not fit."""
    return told(sized(question), candidates)


def told(ready: Sized, candidates: Sequence[Knobs] | None = None) -> Forecast:
    """As `forecast`, for a question that is sized. candidates: knobs to try instead of the planner's own."""
    question = ready.question
    if candidates is not None:
        return from_plan(ready, ready.plan(candidates), question.hardware, question.drives)
    found = ready.choice()
    elsewhere = Elsewhere(asked=question.update_on, step_s=found.other_s) if ready.on_device else None
    return replace(from_plan(ready, found.plan, question.hardware, question.drives), elsewhere=elsewhere)


def from_plan(ready: Sized, plan: Plan, hardware: Hardware, drives: tuple[Drive, ...]) -> Forecast:
    """The forecast of a plan for a question that is sized; what updates in another place would be is not known."""
    question = ready.question
    facts = _facts(json.dumps(dict(question.config), sort_keys=True, default=str))
    device = None
    if question.device_memory is not None:
        assert ready.device_budget is not None
        device = Memory(
            arena=(Line(what="blocks that ops compute on", nbytes=plan.device_bytes),),
            arena_budget_bytes=ready.device_budget,
            compute=ready.compute,
            baseline=ready.beside_device[-1],
            given_bytes=question.device_memory,
        )
    host = Memory(
        arena=plan.lines,
        arena_budget_bytes=ready.host_budget,
        compute=() if ready.on_device else ready.compute,
        baseline=ready.baseline,
        given_bytes=question.host_memory,
    )
    return Forecast(
        model=question.model,
        parameters=facts.parameters,
        active_parameters=facts.active,
        tokens=question.tokens,
        micro_batch=ready.micro_batch,
        seq_len=question.seq_len,
        loss_chunk=question.loss_chunk,
        precision=question.precision,
        deferred=question.deferred,
        plan=plan,
        hardware=hardware,
        host=host,
        device=device,
        drives=drives,
        assumptions=(*assumed_rates(hardware), *_assumed_memory(ready)),
        notes=ready.notes,
        total_tokens=question.total_tokens,
    )


def assumed_rates(hardware: Hardware) -> Iterator[Assumption]:
    """The rates that nobody measured, each with its source."""
    for name, rate in hardware.rates().items():
        if rate.source == "assumed":
            value = format_rate(rate.per_s) if RATE_UNITS[name] == "B/s" else f"{rate.per_s / 1e12:.3g} TFLOP/s"
            yield Assumption(what=name, value=value, source=rate.how.removeprefix("assumed: ") or "no source given")


def _assumed_memory(ready: Sized) -> Iterator[Assumption]:
    if ready.question.hardware.mixed is None:
        yield Assumption(what="mixed", value="no slower than alone", source="not given for these drives")
    yield Assumption(
        what="library baseline", value=format_size(ready.baseline.nbytes), source="round figure of a torch process"
    )
    if ready.on_device:
        yield Assumption(what="CUDA context", value=format_size(DEVICE_CONTEXT), source="round figure, with cuBLAS")


def _refuse_uneven(question: Question) -> None:
    """A step is whole micro-batches of whole sequences."""
    chunk = question.seq_len * (question.micro_batch or 1)
    rest = question.tokens % chunk
    if not rest:
        return
    near = [tokens for tokens in (question.tokens - rest, question.tokens - rest + chunk) if tokens > 0]
    each = f"{question.micro_batch} x {question.seq_len}" if question.micro_batch else f"{question.seq_len}"
    what = "micro-batches" if question.micro_batch else "sequences"
    raise UserError(
        f"--tokens {question.tokens} is no whole number of {what} of {each} tokens. "
        f"Fix: --tokens {' or '.join(map(str, near))}"
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Facts:
    """What a config says of its model. model: the real one, where arithmetic does not know the family."""

    config: Mapping[str, Any]
    parameters: int
    active: int
    units: tuple[UnitSize, ...]
    model: Any = None

    @property
    def by_arithmetic(self) -> bool:
        return self.model is None

    @property
    def head(self) -> str:
        return self.units[-1].name

    def costs(
        self, micro_batch: int, seq_len: int, loss_chunk: int | None, gpu: bool, bf16: bool
    ) -> Mapping[str, UnitCost]:
        costs: Mapping[str, UnitCost] | None
        if self.model is not None:
            costs = _profiled(self, micro_batch, seq_len, loss_chunk)
        else:
            costs = estimate(self.config, micro_batch, seq_len, gpu=gpu, loss_chunk=loss_chunk)
        assert costs is not None, "a config with sizes but without costs"
        return {name: _halved(cost) for name, cost in costs.items()} if bf16 else costs


def _halved(cost: UnitCost) -> UnitCost:
    """What is handed on in BF16; `BF16_NOTE` says what of the workspace."""
    return replace(cost, input_bytes=cost.input_bytes // 2, output_bytes=cost.output_bytes // 2)


@cache
def _facts(config_json: str) -> _Facts:
    config = json.loads(config_json)
    units = unit_sizes(config)
    if units is not None:
        count, active = parameters(config), active_parameters(config)
        assert count is not None and active is not None
        return _Facts(config=config, parameters=count, active=active, units=tuple(units))
    from megatrain.model import build, find_units, model_config

    real = find_units(build(model_config(config)))
    sizes = tuple(unit.size() for unit in real)
    return _Facts(config=config, parameters=real.parameters, active=real.parameters, units=sizes, model=real)


@lru_cache(maxsize=16)
def _profiled(facts: _Facts, micro_batch: int, seq_len: int, loss_chunk: int | None) -> Mapping[str, UnitCost]:
    from megatrain.loss import refuse_uncuttable
    from megatrain.profile import profile

    if loss_chunk is not None:
        refuse_uncuttable(facts.model, "--loss-chunk")
    return profile(facts.model, micro_batch, seq_len, loss_chunk)


def _costed(units: Sequence[UnitSize], costs: Mapping[str, UnitCost], micro_batches: int) -> Iterator[UnitSize]:
    """Units with what they cost a step."""
    for unit in units:
        cost = costs[unit.name]
        yield replace(
            unit,
            activation_bytes=micro_batches * cost.input_bytes,
            forward_flops=micro_batches * cost.forward_flops,
            backward_flops=micro_batches * cost.backward_flops,
        )
