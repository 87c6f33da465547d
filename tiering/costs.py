"""Bytes and seconds in closed form.

Scope: formulas that one can redo by hand, each with its source; the tests hold schedules against them. Worked examples
stand in docs/planning.md.
Not here: the exact bytes of a schedule (`schedule.moved_bytes`), its time (`simulate.py`).

Sizes are bytes, P is `parameters`. "design" is docs/design.md, section 3.
"""

from dataclasses import dataclass

FP32 = 4
"""Bytes of a number."""
BF16 = 2
"""Bytes of a number that a unit computes with in BF16."""
DAY_S = 86_400
DURABLE_KINDS = 3
"""weight, exp_avg and exp_avg_sq survive the process."""
SLOTS = 2
"""Copies of what is durable on NVME: the live state and the last commit."""
MATRIX_FLOPS = 8
"""FLOP a parameter and token: forward 2, the forward that backward runs again 2, backward 4 (two products)."""
ATTENTION_FLOPS = 18
"""FLOP a token, token of its sequence and column of the heads: forward 4 (two products), the same again 4, backward 10
(five products, since the fused kernel makes the scores once more; FlashAttention-2, arXiv 2307.08691, counts so)."""


def state_bytes(parameters: int) -> int:
    """Training state in FP32: weight, grad, exp_avg, exp_avg_sq.

    >>> state_bytes(7_000_000_000) / 1e9
    112.0
    """
    return 4 * FP32 * parameters


def durable_bytes(parameters: int) -> int:
    """What lives on NVME when nothing is resident: weights and both moments. Two slots take twice that.

    >>> durable_bytes(7_000_000_000) / 1e9
    84.0
    """
    return DURABLE_KINDS * FP32 * parameters


def disk_bytes(parameters: int, spilled_bytes: int = 0) -> int:
    """Room on NVME: two slots of what is durable, resident or not, and one place for what is spilled in a step.

    Source: design, "Room on disk".

    >>> disk_bytes(7_000_000_000) / 1e9
    168.0
    """
    return SLOTS * durable_bytes(parameters) + spilled_bytes


def export_bytes(parameters: int, number_bytes: int = FP32) -> int:
    """Weights alone, as a model folder: number_bytes 4 for FP32, 2 for BF16.

    >>> export_bytes(7_000_000_000) / 1e9, export_bytes(7_000_000_000, number_bytes=2) / 1e9
    (28.0, 14.0)
    """
    return number_bytes * parameters


def step_read_bytes(
    parameters: int, resident_bytes: int = 0, spilled_gradient_bytes: int = 0, *, bf16: bool = False
) -> int:
    """NVME bytes that a step reads; arguments and source as `step_io_bytes`.

    >>> step_read_bytes(7_000_000_000) / 1e9
    112.0
    """
    passes, updates = _on_nvme(parameters, resident_bytes, bf16)
    return 2 * passes + updates + spilled_gradient_bytes


def step_written_bytes(
    parameters: int, resident_bytes: int = 0, spilled_gradient_bytes: int = 0, *, bf16: bool = False
) -> int:
    """NVME bytes that a step writes; arguments and source as `step_io_bytes`.

    >>> step_written_bytes(7_000_000_000) / 1e9
    84.0
    """
    passes, updates = _on_nvme(parameters, resident_bytes, bf16)
    return passes + updates + spilled_gradient_bytes


def step_io_bytes(
    parameters: int, resident_bytes: int = 0, spilled_gradient_bytes: int = 0, *, bf16: bool = False
) -> int:
    """NVME bytes of one step, each unit read once a pass; read and written together.

    Nothing resident: weights read in forward and backward (8) and written (4), both moments read and written (16).
    A resident byte of weights saves two reads and a write, one of moments a read and a write; weights come first.
    spilled_gradient_bytes: of gradients that wait for the clip factor on NVME, each written and read once; 0 without
    clipping, and with it where they stay in RAM. Sources: design,
    `IO(C) = 28 P - 3 min(C, 4P) - 2 max(0, min(C, 12P) - 4P)`, and section 5. Turn-around hits save a little more.
    bf16: forward and backward read BF16 copies (4) and the update makes them anew (2), the weights themselves are read
    (4) and written (4) as moments are. Resident copies come first: `30 P - 3 min(C, 2P) - 2 max(0, min(C, 14P) - 2P)`.

    >>> step_io_bytes(7_000_000_000) / 1e9
    196.0
    >>> step_io_bytes(7_000_000_000, resident_bytes=28_000_000_000) / 1e9
    112.0
    >>> step_io_bytes(7_000_000_000, resident_bytes=84_000_000_000)
    0
    >>> step_io_bytes(7_000_000_000, spilled_gradient_bytes=28_000_000_000) / 7_000_000_000
    36.0
    >>> step_io_bytes(7_000_000_000, bf16=True) / 7_000_000_000
    30.0
    """
    read = step_read_bytes(parameters, resident_bytes, spilled_gradient_bytes, bf16=bf16)
    return read + step_written_bytes(parameters, resident_bytes, spilled_gradient_bytes, bf16=bf16)


def _on_nvme(parameters: int, resident_bytes: int, bf16: bool = False) -> tuple[int, int]:
    """Bytes, not resident, that forward and backward read and the update writes, and those that the update alone reads
    and writes; the former having come first.
    """
    passes, updates = FP32 * parameters, (DURABLE_KINDS - 1) * FP32 * parameters
    if bf16:
        passes, updates = BF16 * parameters, DURABLE_KINDS * FP32 * parameters
    at_home = min(resident_bytes, passes)
    return passes - at_home, updates - min(resident_bytes - at_home, updates)


def ram_knees(parameters: int, *, clipping: bool = False) -> tuple[int, int]:
    """Resident bytes at which the saving a byte changes: all weights (3 moved bytes saved for each up to here), and
    everything (2 for each up to here, 0 beyond). clipping: gradients live on between steps and count too.

    Source: the corners of `IO(C)`, see `step_io_bytes`. What passes through takes its room on top.

    >>> [nbytes / 1e9 for nbytes in ram_knees(7_000_000_000)]
    [28.0, 84.0]
    """
    return FP32 * parameters, state_bytes(parameters) if clipping else durable_bytes(parameters)


def activation_bytes(tokens: int, hidden: int, layers: int, number_bytes: int = FP32) -> int:
    """Inputs that the layers and the final norm leave in forward for their backward, for all tokens of a step.

    Source: one vector of the hidden size a token and unit; a unit recomputes all else (design, section 6).

    >>> activation_bytes(32_768, hidden=8192, layers=80) / 2**30
    81.0
    """
    return number_bytes * tokens * hidden * (layers + 1)


def activation_io_bytes(spilled_bytes: int) -> int:
    """NVME bytes of activations that find no room in memory: written in forward, read in backward.

    >>> activation_io_bytes(1000)
    2000
    """
    return 2 * spilled_bytes


def step_flops(active_parameters: int, tokens: int) -> float:
    """FLOP of a step's matrix products, attention's scores left out. active: those that one token meets.

    Source: a multiplication and an addition a parameter and token in forward, which backward runs again; twice as
    much for the gradients of input and weight. Looking up an embedding is free, so this counts a little too much.

    >>> step_flops(7_000_000_000, 65_536) / 1e15
    3.670016
    """
    return float(MATRIX_FLOPS * active_parameters * tokens)


def attention_flops(tokens: int, seq_len: int, width: int, layers: int) -> float:
    """FLOP of the scores and of the sums that they weigh. width: heads x head_dim.

    Counted in full: the kernel skips the half that a causal mask hides. Source: `ATTENTION_FLOPS`.

    >>> round(attention_flops(32_768, seq_len=2048, width=8192, layers=80) / 1e15, 3)
    0.792
    """
    return float(ATTENTION_FLOPS * tokens * seq_len * width * layers)


def update_bytes(parameters: int) -> int:
    """Operands of a step's update: weight, gradient and both moments. Rates of updates are stated for these bytes.

    >>> update_bytes(7_000_000_000) / 1e9
    112.0
    """
    return state_bytes(parameters)


def h2d_bytes(
    parameters: int,
    kept_bytes: int = 0,
    activations: int = 0,
    number_bytes: int = FP32,
    *,
    update_there: bool = False,
) -> int:
    """Bytes copied to the device in a step without clipping: weights for forward and for backward, and what forward
    left; both moments where the device updates, and the FP32 weight where computing has another copy.

    kept_bytes: of weights that stay on the device from forward to backward. activations: bytes of those that do not.
    number_bytes: of a weight that is computed with.

    >>> P = 7_000_000_000
    >>> h2d_bytes(P) // P, h2d_bytes(P, kept_bytes=4 * P) // P, h2d_bytes(P, update_there=True) // P
    (8, 4, 16)
    >>> h2d_bytes(P, number_bytes=BF16) // P, h2d_bytes(P, number_bytes=BF16, update_there=True) // P
    (4, 16)
    """
    kinds = DURABLE_KINDS - (number_bytes == FP32)
    updated = kinds * FP32 * parameters if update_there else 0
    return 2 * number_bytes * parameters - kept_bytes + activations + updated


def d2h_bytes(parameters: int, activations: int = 0, number_bytes: int = FP32, *, update_there: bool = False) -> int:
    """Bytes copied from the device in a step without clipping: gradients for the update on the host, or what the device
    has updated, with the copy that it has made of a weight to compute with; and what forward leaves.

    number_bytes: of a weight that is computed with.

    >>> P = 7_000_000_000
    >>> d2h_bytes(P) // P, d2h_bytes(P, update_there=True) // P
    (4, 12)
    >>> d2h_bytes(P, number_bytes=BF16) // P, d2h_bytes(P, number_bytes=BF16, update_there=True) // P
    (4, 14)
    """
    copies = 0 if number_bytes == FP32 else number_bytes * parameters
    updated = DURABLE_KINDS * FP32 * parameters + copies
    return (updated if update_there else FP32 * parameters) + activations


def io_seconds(
    read_bytes: float, written_bytes: float, read_bytes_per_s: float, write_bytes_per_s: float, stretch: float = 1.0
) -> float:
    """Seconds that the drives are busy: reads and writes share them. stretch: `Hardware.mixed_stretch`.

    Source: measured on virtual disks, where reads and writes together reach no more than either alone.

    >>> io_seconds(112e9, 84e9, read_bytes_per_s=7e9, write_bytes_per_s=6e9)
    30.0
    """
    return stretch * (read_bytes / read_bytes_per_s + written_bytes / write_bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """Seconds of a step for which each resource is busy. shared: updates run on the processors that compute.
    io_steals: the share of their speed that processors lose while the drive is busy (`Hardware.io_steals`).

    >>> Busy(nvme_s=30.0, compute_s=60.0, update_s=3.0, shared=True)
    Busy(nvme_s=30.0, compute_s=60.0, update_s=3.0, h2d_s=0.0, d2h_s=0.0, shared=True, io_steals=0.0)
    >>> step = Busy(nvme_s=30.0, compute_s=60.0, update_s=3.0, shared=True)
    >>> step.lower_s, step.bottleneck, step.upper_s
    (63.0, 'compute', 93.0)
    """

    nvme_s: float
    compute_s: float
    update_s: float
    h2d_s: float = 0.0
    d2h_s: float = 0.0
    shared: bool = False
    io_steals: float = 0.0

    @property
    def lower_s(self) -> float:
        """The busiest resource: all others hide behind it at best."""
        return max(self._resources().values())

    @property
    def upper_s(self) -> float:
        """One thing after the other: nothing overlaps."""
        kept = 1 - self.io_steals
        on_processors_s = (self.compute_s + self.update_s) / kept if self.shared else self.update_s / kept
        return self.nvme_s + self.h2d_s + self.d2h_s + on_processors_s + (0.0 if self.shared else self.compute_s)

    @property
    def bottleneck(self) -> str:
        """The resource that `lower_s` is the busy time of."""
        resources = self._resources()
        return max(resources, key=lambda name: resources[name])

    def _resources(self) -> dict[str, float]:
        both = {"compute": self.compute_s, "update": self.update_s}
        processors = {"compute": self.compute_s + self.update_s} if self.shared else both
        return {"NVMe": self.nvme_s, "H2D": self.h2d_s, "D2H": self.d2h_s} | processors


def hiding_tokens_rule(flops_per_s: float, io_bytes_per_s: float) -> float:
    """Tokens a step from which computing hides all I/O, nothing resident: `3.5 F / B`, whatever P is.

    Source: 28 P / B seconds of I/O are 8 P T / F seconds of computing.

    >>> round(hiding_tokens_rule(62e12, 26e9))
    8346
    """
    return 28 / MATRIX_FLOPS * flops_per_s / io_bytes_per_s


def hiding_tokens(fixed_s: float, compute_s_per_token: float, activation_s_per_token: float = 0.0) -> float | None:
    """Tokens a step from which computing hides all I/O: `fixed_s / (c - a)`; None: never.

    fixed_s: seconds of I/O that do not grow with the tokens, less those of the update where it shares the processors.
    activation_s_per_token: I/O of spilled activations, which grows as computing does.

    >>> hiding_tokens(30.0, compute_s_per_token=0.003, activation_s_per_token=0.001)
    15000.0
    >>> hiding_tokens(30.0, compute_s_per_token=0.001, activation_s_per_token=0.003) is None
    True
    """
    if fixed_s <= 0:
        return 0.0
    gain_s = compute_s_per_token - activation_s_per_token
    return fixed_s / gain_s if gain_s > 0 else None


def balancing_share(parameters: int, resident_bytes: int = 0, forward_share: float = 0.25) -> float:
    """`alpha`: the share of every unit's update that, moved into the next forward, gives both passes I/O in
    proportion to their computing. forward_share: of a step's FLOP, a quarter with recompute.

    Forward reads R bytes of weights, backward moves the rest of IO: R + alpha (IO - 2R) = forward_share x IO. Source:
    design. The planner tries an eighth of the units; with clipping alpha is 1.

    >>> round(balancing_share(7_000_000_000), 3)
    0.15
    """
    weights, _ = _on_nvme(parameters, resident_bytes)
    moved = step_io_bytes(parameters, resident_bytes)
    if not moved:
        return 0.0
    return min(1.0, max(0.0, (forward_share * moved - weights) / (moved - 2 * weights)))


def written_bytes_per_day(written_bytes: float, step_s: float) -> float:
    """What steps without a pause write in a day; commits come on top.

    >>> written_bytes_per_day(84e9, step_s=60.0) / 1e12
    120.96
    """
    return written_bytes * DAY_S / step_s


def drive_life_days(endurance_bytes: float, bytes_per_day: float, drives: int = 1) -> float:
    """Days until equal drives, which share the writes, have written what their maker lets them (TBW).

    >>> drive_life_days(1200e12, bytes_per_day=120e12)
    10.0
    """
    return drives * endurance_bytes / bytes_per_day
