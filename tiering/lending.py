"""The bytes that an action works on, as tensors over the arenas.

Scope: `Lender`: an operand's bytes in the arena of its tier, an action's under the names that its caller knows.
Not here: who may have them when (`pipeline.py`), the arenas (`arena.py`, `lanes.py`).
"""

from collections.abc import Mapping

import torch

from tiering.arena import Arena
from tiering.device import copied_from
from tiering.lanes import Lanes
from tiering.schedule import Action, Operand

Views = Mapping[str, torch.Tensor]
"""Block name to its bytes where the action computes (flat uint8): the whole block, or the tile that it names."""


class Lender:
    """Both arenas of a plan."""

    def __init__(self, arena: Arena, lanes: Lanes) -> None:
        self._arena = arena
        self._lanes = lanes

    def bytes(self, x: Operand) -> torch.Tensor:
        arena = self._lanes if x.tier == "DEVICE" else self._arena
        return arena.tensor(x.address, x.address + x.nbytes)

    def view(self, x: Operand) -> memoryview:
        """Of HOST alone, as an engine moves them."""
        return self._arena.view(x.address, x.address + x.nbytes)

    def for_engine(self, x: Operand) -> memoryview | torch.Tensor:
        """Of either, as an engine moves them."""
        return self.bytes(x) if x.tier == "DEVICE" else self.view(x)

    def views(self, action: Action) -> dict[str, torch.Tensor]:
        """Those of DEVICE are lent under the names of the blocks that they are copies of."""
        return {copied_from(x.block) if x.tier == "DEVICE" else x.block: self.bytes(x) for x in action.operands}
