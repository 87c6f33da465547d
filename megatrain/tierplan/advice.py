"""What would make a step shorter, and the smallest change that makes an impossible question possible.

Scope: variants of a question, planned with the knobs of the plan at hand; a remedy has been tried before it is named.
Not here: the sum of a refusal (`question.py`), one variable over a range (`sweep.py`).
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatrain.chunks import chunk_length
from megatrain.tierplan.forecast import Forecast
from megatrain.tierplan.question import Question, Sized, sized
from megatrain.tierplan.variants import fits, shortage_of, with_drives, with_host_memory, with_question
from megatrain.workspace import LOGITS
from tiering.errors import BudgetError

GiB = 1 << 30
MiB = 1 << 20
MORE_RAM = 64 * GiB
WORTH = 1.005
"""Gains below half a percent are none: a plan is not that exact."""
DEVICE_SIZES = tuple(size * GiB for size in (8, 12, 16, 24, 32, 48, 80, 96, 141, 192, 288))
"""Memory of the cards that there are."""
_TRIES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Help:
    """One change and what it would make of a step. gain: tokens/s as a multiple of those without it."""

    what: str
    step_s: float
    tokens_per_s: float
    gain: float


def helps(ready: Sized, base: Forecast) -> list[Help]:
    """Changes that make training faster, the best first."""
    found = []
    for what, other in (*_more_drives(ready, base), *_variants(ready, base)):
        gain = other.tokens_per_s / base.tokens_per_s
        if gain >= WORTH:
            found.append(Help(what=what, step_s=other.step_s, tokens_per_s=other.tokens_per_s, gain=gain))
    return sorted(found, key=lambda help_: -help_.gain)


def _more_drives(ready: Sized, base: Forecast) -> Iterator[tuple[str, Forecast]]:
    drives = ready.question.drives
    if drives and _io_costs(base):
        more = ready.question.with_drives((*drives, drives[0]))
        yield f"one more drive ({drives[0].name})", with_drives(ready, base, more)


def _io_costs(base: Forecast) -> bool:
    """False where the step could not be shorter even with no transfer from or to NVMe at all."""
    others = [busy_s for name, busy_s in base.plan.timeline.busy().items() if name != "NVMe"]
    return base.nvme_bytes > 0 and base.step_s > WORTH * max(others)


def _variants(ready: Sized, base: Forecast) -> Iterator[tuple[str, Forecast]]:
    question = replace(ready.question, micro_batch=ready.micro_batch)
    host = question.host_memory
    if _io_costs(base):
        label, more = ("+64 GiB of RAM", host + MORE_RAM) if host >= MORE_RAM else ("twice the RAM", 2 * host)
        yield label, with_host_memory(ready, base, more)
    changes = [("twice the tokens a step", replace(question, tokens=2 * question.tokens))]
    if question.device_memory is not None:
        larger = next((size for size in DEVICE_SIZES if size > question.device_memory), None)
        if larger is not None:
            label = f"a device of the same speed with {larger // GiB} GiB"
            changes.append((label, replace(question, device_memory=larger)))
    if question.deferred:
        changes.append(("no clipping (trains differently)", replace(question, deferred=False)))
    for what, changed in changes:
        try:
            yield what, with_question(changed, base)
        except BudgetError:
            continue


def remedies(question: Question) -> list[str]:
    """Options that make a refused question possible, each by itself, the smallest change first."""
    memory = _with_memory(question)
    found = [] if memory is None else [memory]
    first = sized(question)
    chunk = _loss_chunk(first)
    if chunk is not None:
        found.append(f"--loss-chunk {chunk}")
    if first.micro_batch > 1 and fits(replace(question, micro_batch=1)):
        found.append("--micro-batch 1")
    for micro_batch in dict.fromkeys((question.micro_batch, None if question.micro_batch is None else 1)):
        tokens = _fewer_tokens(replace(question, micro_batch=micro_batch))
        if tokens is not None:
            found.append(f"--tokens {tokens}" + ("" if micro_batch == question.micro_batch else " --micro-batch 1"))
            break
    return found


def _loss_chunk(ready: Sized) -> int | None:
    """The largest power of two of tokens that makes a question fit by itself; None if there is none, or if it is not
    the logits that take the most memory.
    """
    question = ready.question
    if not any(line.what.startswith(LOGITS) for line in ready.compute):
        return None
    tokens = ready.micro_batch * chunk_length(ready.micro_batch, question.seq_len, question.loss_chunk)
    powers = range((tokens - 1).bit_length() - 1, (ready.micro_batch - 1).bit_length() - 1, -1)
    chunks = [1 << power for power in powers]
    if not chunks or not fits(replace(question, loss_chunk=chunks[-1])):
        return None
    return next(chunk for chunk in chunks if fits(replace(question, loss_chunk=chunk)))


def _fewer_tokens(question: Question) -> int | None:
    """The tokens a step, halved until they fit."""
    rows = question.rows // 2
    while rows >= (question.micro_batch or 1):
        tokens = rows * question.seq_len
        if fits(replace(question, tokens=tokens)):
            return tokens
        rows //= 2
    return None


def _with_memory(question: Question) -> str | None:
    """The memory options that work: what each refusal names is given, until nothing is refused."""
    options: dict[str, str] = {}
    for _ in range(_TRIES):
        shortage = shortage_of(question)
        if shortage is None:
            return " ".join(options.values()) or None
        nbytes, text = _rounded(shortage.needed_bytes)
        if shortage.tier == "HOST":
            question = replace(question, host_memory=nbytes)
            options["HOST"] = f"--host-memory {text}"
        else:
            question = replace(question, device_memory=nbytes)
            options["DEVICE"] = f"--device-memory {text}"
    return None


def _rounded(nbytes: int) -> tuple[int, str]:
    """Up to a size that one types: whole GiB from 8 GiB on, else whole MiB."""
    unit, name = (GiB, "GiB") if nbytes >= 8 * GiB else (MiB, "MiB")
    count = -(-nbytes // unit)
    return count * unit, f"{count}{name}"
