"""Models and run files that the benchmarks share: Llamas by size, and how much of what a step of them takes.

Scope: `llama`, `run_mapping`, the tokens at which computing and I/O take as long as each other.
Not here: measuring (`step.py`, `scaling.py`, `rivals.py`).
"""

from pathlib import Path
from typing import Any, Literal

from tiering.hardware import Hardware

Case = Literal["io", "balanced", "compute"]
MiB = 1 << 20
STAGING_BYTES, STAGED_UNITS = 640 * MiB, 6
"""Of a preset's budget, what is not for resident blocks: units passing through, tiles, lookahead."""
STATE_BYTES = 12
"""A parameter in FP32 and its two moments."""
MOVED_BYTES = 28
"""A step without clipping moves these bytes a parameter at most: 16 read, 12 written (design, section 3)."""
UPDATED_BYTES = 16
"""AdamW goes over these bytes a parameter: weight, gradient, both moments."""
STEP_FLOPS = 8
"""A parameter and token: 2 forward, 2 for its recompute, 4 backward."""
IO_TOKENS, SEQ_LEN, ABOVE_BALANCE = 16, 512, 3


def llama(
    hidden: int = 1024, layers: int = 16, intermediate: int = 3456, vocabulary: int = 8192, head: int = 64
) -> dict[str, Any]:
    """The configuration of a Llama with heads of `head`, none shared, and an untied head; the default has 253.8M
    parameters.
    """
    return {
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // head,
        "num_key_value_heads": hidden // head,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }


def parameters(model: dict[str, Any]) -> int:
    """Of a `llama`.

    >>> f"{parameters(llama()):,}", f"{parameters(llama(intermediate=3328)):,}"
    ('253,789,184', '247,497,728')
    """
    hidden, layers = model["hidden_size"], model["num_hidden_layers"]
    return int(layers * _layer_parameters(model) + 2 * model["vocab_size"] * hidden + hidden)


def _layer_parameters(model: dict[str, Any]) -> int:
    hidden = model["hidden_size"]
    return int(4 * hidden**2 + 3 * hidden * model["intermediate_size"] + 2 * hidden)


def staging_bytes(model: dict[str, Any]) -> int:
    """What a tiered step of a `llama` needs of RAM to look ahead: some layers' weights and gradients, and tiles."""
    return max(STAGING_BYTES, STAGED_UNITS * 4 * _layer_parameters(model))


def case_tokens(case: Case, hardware: Hardware, resident: float) -> int:
    """Tokens of a step that make it bound by I/O, by both alike, or by computing, on a machine of these rates.

    Both alike: 8 T/F + 16/U = 28 (1 - resident)/B, with F flops, U bytes of updates and B moved bytes a second. Where
    updates cost nothing that is T = 3.5 F/B; `compute` is three times that, `io` so few that updates are most of the
    computing.

    >>> from tiering.hardware import assumed_hardware
    >>> [case_tokens(case, assumed_hardware(), 0.0) for case in ("io", "balanced", "compute")]
    [16, 288, 1024]
    """
    if case == "io":
        return IO_TOKENS
    mixed = hardware.mixed.per_s if hardware.mixed is not None else min(hardware.read.per_s, hardware.write.per_s)
    io_s = MOVED_BYTES / mixed
    if case == "compute":
        return _whole(ABOVE_BALANCE * io_s * hardware.compute.per_s / STEP_FLOPS)
    update_s = UPDATED_BYTES / hardware.update.per_s
    return _whole(max(0.0, (1 - resident) * io_s - update_s) * hardware.compute.per_s / STEP_FLOPS)


def _whole(tokens: float) -> int:
    """In steps of 32, or of whole sequences of `SEQ_LEN`."""
    grain = 32 if tokens < SEQ_LEN else SEQ_LEN
    return max(1, round(tokens / grain)) * grain


def run_mapping(
    model: dict[str, Any],
    folder: Path,
    *,
    seq_len: int,
    batch: int,
    host_memory: int,
    resident: float | None,
    micro_batch: int = 1,
) -> dict[str, Any]:
    """A run file with everything it writes below `folder`; fused updates. resident None: as much as fits."""
    return {
        "model": {"config": model},
        "data": {"paths": "$PYTHON_STDLIB/*.py", "seq_len": seq_len},
        "train": {"steps": 1_000_000, "batch": batch, "micro_batch": micro_batch},
        "device": "cpu",
        "tiers": {
            "host_memory": host_memory,
            "nvme": str(folder / "nvme"),
            "resident": "auto" if resident is None else resident,
        },
        "output": {"dir": str(folder / "run")},
    }


def sequences(tokens: int) -> tuple[int, int]:
    """Tokens of a sequence and sequences of a step: one, or whole ones of `SEQ_LEN` (what is over is left out).

    >>> sequences(64), sequences(1024)
    ((64, 1), (512, 2))
    """
    return (tokens, 1) if tokens <= SEQ_LEN else (SEQ_LEN, tokens // SEQ_LEN)
