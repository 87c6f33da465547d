"""How much of a budget blocks can have as their home: drafts of a candidate's schedules that fit.

Scope: `Search.fill`: with given knobs, what is pinned and what memory the schedules then need; what pinning is worth.
Not here: which knobs are best (`plan.py`), which bytes are pinned first (`homes.py`), the memory of one schedule
(`lower.py`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tiering.homes import Placement, choose_homes, place
from tiering.lower import Draft
from tiering.turns import Cut, Knobs
from tiering.workload import Program, Workload

_LOOKS, _FINE_LOOKS = 5, 14
"""Drafts in search of the most that can be pinned: to compare candidates, and for the best of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Bytes that the arenas may take. device_bytes None: ops compute on HOST."""

    host_bytes: int
    device_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """A candidate with the drafts of its schedules; its time is not known yet. widest_bytes: of a durable block, which
    has to be whole in HOST while it is filled, even if all passes only ever need it in tiles.
    """

    knobs: Knobs
    placement: Placement
    drafts: Mapping[str, Draft]
    widest_bytes: int

    @property
    def host_bytes(self) -> int:
        return max(self.widest_bytes, *(draft.host_bytes for draft in self.drafts.values()))

    @property
    def device_bytes(self) -> int:
        return max(draft.device_bytes for draft in self.drafts.values())

    def over(self, budget: Budget) -> tuple[int, int]:
        """Bytes beyond the device's budget and beyond HOST's, 0 where they fit."""
        device = 0 if budget.device_bytes is None else max(0, self.device_bytes - budget.device_bytes)
        return device, max(0, self.host_bytes - budget.host_bytes)

    def fits(self, budget: Budget) -> bool:
        return self.over(budget) == (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What all looks for a plan have in common. cuts: those made so far, by program and what they depend on."""

    workload: Workload
    gain: Mapping[str, float]
    resident: float | None
    cuts: dict[tuple[str, int, int, int], Cut] = field(default_factory=dict)

    def cut(self, program: Program, knobs: Knobs) -> Cut:
        key = (program.name, knobs.lag, knobs.copies_ahead, knobs.tile_bytes)
        if key not in self.cuts:
            self.cuts[key] = Cut(self.workload, program, knobs)
        return self.cuts[key]

    def lowered(self, cuts: Mapping[str, Cut], knobs: Knobs, pinned: int, carried: int | None) -> Lowered:
        """Drafts over the homes that so many bytes make, as `choose_homes` has them."""
        homes = choose_homes(self.workload, self.gain, knobs.tile_bytes, pinned, carried) if pinned or carried else {}
        placement = place(homes)
        drafts = {name: Draft(cut, placement, knobs) for name, cut in cuts.items()}
        widest = max([block.nbytes for block in self.workload.of_life("durable")], default=0)
        return Lowered(knobs=knobs, placement=placement, drafts=drafts, widest_bytes=widest)

    def fill(self, knobs: Knobs, budget: Budget, *, whole: bool = False, fine: bool = False) -> Lowered:
        """Drafts with these knobs that pin as much as `budget` (or exactly the share `resident`) allows.

        whole: of all programs; otherwise of the one that repeats itself, the widest as a rule: drafting takes time.
        fine: to the last percent of the budget.
        """
        programs = self.workload.programs.values() if whole else [main_program(self.workload)]
        cuts = {program.name: self.cut(program, knobs) for program in programs}
        if self.resident is None:
            return self._fill_up(cuts, knobs, budget, fine)
        return self._fill_share(cuts, knobs, budget, self.resident)

    def completed(self, lowered: Lowered) -> Lowered:
        """With drafts of the programs that it lacks, over the same homes."""
        others = {
            name: Draft(self.cut(program, lowered.knobs), lowered.placement, lowered.knobs)
            for name, program in self.workload.programs.items()
            if name not in lowered.drafts
        }
        return replace(lowered, drafts={**lowered.drafts, **others})

    def _fill_share(self, cuts: Mapping[str, Cut], knobs: Knobs, budget: Budget, resident: float) -> Lowered:
        """The share `resident` of what is durable; what else is left of the budget goes to blocks that are not."""
        workload = self.workload
        pinned = round(resident * sum(block.nbytes for block in workload.of_life("durable")))
        found = self.lowered(cuts, knobs, pinned, 0)
        spare = budget.host_bytes - found.host_bytes
        if spare > 0 and any(workload.of_life("carried", "passing")):
            fuller = self.lowered(cuts, knobs, pinned, spare)
            found = fuller if fuller.host_bytes <= budget.host_bytes else found
        return found

    def _fill_up(self, cuts: Mapping[str, Cut], knobs: Knobs, budget: Budget, fine: bool) -> Lowered:
        """As much as fits. What is pinned is not staged, so a second look finds more room; one too far is halved."""
        everything = sum(block.nbytes for block in self.workload.of_life("durable", "carried", "passing"))
        pinned, too_much = 0, 2 * everything + 1
        found = self.lowered(cuts, knobs, 0, None)
        if not found.fits(budget):
            return found  # thriftier knobs make it smaller, homes hardly ever
        least = budget.host_bytes >> 10 if fine else max(knobs.tile_bytes, budget.host_bytes >> 6)
        for _ in range(_FINE_LOOKS if fine else _LOOKS):
            spare = budget.host_bytes - found.host_bytes
            more = min(spare, everything - pinned, (too_much - pinned) // 2)  # half of the way to what was too much
            if more < min(everything - pinned, least) or not more:
                break
            fuller = self.lowered(cuts, knobs, pinned + more, None)
            if fuller.host_bytes > budget.host_bytes:
                too_much = pinned + more
            else:
                pinned, found = pinned + more, fuller
        return found


def gain_of(workload: Workload) -> dict[str, float]:
    """NVME bytes a pass that each byte of a block costs when it is not pinned: counted on the schedule itself."""
    coarse = max(block.nbytes for block in workload.blocks.values())
    knobs = Knobs(lookahead=0, lag=0, tile_bytes=coarse, ring=1, copies_ahead=0)
    moved = Draft(Cut(workload, main_program(workload), knobs), place({}), knobs).moved_bytes()
    return {name: nbytes / workload.blocks[name].nbytes for name, nbytes in moved.items()}


def main_program(workload: Workload) -> Program:
    """The program that repeats itself; the only one where there is no such."""
    programs = list(workload.programs.values())
    return next((program for program in programs if program.cyclic), programs[0])
