"""What one unit costs to compute: the record that is seen by running it, or estimated from a config.

Scope: the record alone; no torch.
Not here: seeing it (`megatrain/profile.py`), estimating it (`estimate.py`).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCost:
    """One micro-batch through one unit. workspace: the most bytes alive in its backward, beyond inputs and weights.

    input: bytes of the activation that it computes from, and that backward needs again (0: token ids). output: bytes of
    what it hands to the next unit. backward_flops: with the forward that backward runs again. assumed:
    reckoned from the unit's size, not seen.
    """

    forward_flops: float
    backward_flops: float
    workspace_bytes: int
    output_bytes: int
    input_bytes: int = 0
    assumed: bool = False
