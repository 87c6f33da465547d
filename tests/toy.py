"""Small workloads, and an interpreter on real bytes that says what a schedule comes to.

Scope: toy models as the planner sees them; a `Machine` with a HOST arena and NVME bytes that runs a schedule, in list
order or in any order that `after` allows; `interpret`, which runs the program itself and knows no schedule.
Not here: tests. Nothing here uses `check` or `lower`: an oracle that shared their code would share their faults.

Each op is a hash of the bytes that it reads, page by page where it is tiled, so that tiles come to the same as the
whole. What every op read is kept as well: a forward that writes nothing would otherwise never show a wrong byte.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from heapq import heapify, heappop, heappush
from typing import Literal

from hypothesis import strategies as st

from megatrain.programs import UnitSize, forward_workload, late_units, training_workload
from tiering.homes import Placement
from tiering.schedule import Action, Operand, Schedule, Verb
from tiering.workload import PAGE, Block, Lane, Life, Op, Program, Touch, Workload, make_workload, pages

Seen = dict[tuple[int, str, int], list[bytes]]
"""(pass, op, page) to digests of what the op read, one for each time it ran."""

Policy = Literal["any", "io first", "io last"]


def toy_units(
    layers: int,
    layer: int,
    embedding: int,
    *,
    tied: bool = False,
    norm: int = PAGE,
    activation: int = 0,
    flops_per_byte: float = 128.0,
) -> list[UnitSize]:
    """A transformer as units: embedding, layers, final norm (where `norm` is not 0) and head; sizes in bytes."""
    head = 0 if tied else embedding
    units = [UnitSize(name="embed", nbytes=embedding)]
    units += [
        UnitSize(
            name=f"L{number}",
            nbytes=layer,
            activation_bytes=activation,
            forward_flops=layer * flops_per_byte,
            backward_flops=layer * flops_per_byte * 3,
        )
        for number in range(layers)
    ]
    if norm:
        units.append(UnitSize(name="norm", nbytes=norm, activation_bytes=activation))
    borrows = ("embed",) if tied else ()
    flops = embedding * flops_per_byte
    units.append(UnitSize(name="head", nbytes=head, borrows=borrows, forward_flops=flops, backward_flops=flops * 2))
    return units


MODES = ("fused", "deferred", "mixed", "forward")
"""The workloads of a model: updates in backward, all late, a half of them late; and a forward alone."""


def toy_workload(units: Sequence[UnitSize], mode: str, *, bf16: bool = False) -> Workload:
    if mode == "forward":
        return forward_workload(units)
    late = late_units(units, 0.5) if mode == "mixed" else ()
    return training_workload(units, deferred=mode == "deferred", late=late, bf16=bf16)


def parameters(workload: Workload) -> int:
    """FP32 parameters of all units."""
    return sum(block.nbytes for block in workload.blocks.values() if block.kind == "weight") // 4


@lru_cache(maxsize=4096)
def noise(name: str, nbytes: int, salt: str = "") -> bytes:
    """Bytes that differ from page to page and from name to name."""
    return b"".join(_page(salt.encode(), name.encode(), _int(at)) for at in range(0, nbytes, PAGE))


def first_state(workload: Workload) -> dict[str, bytearray]:
    """Every block that lives on, with its bytes before the first pass."""
    return {block.name: bytearray(noise(block.name, block.nbytes)) for block in workload.of_life("durable", "carried")}


def interpret(
    workload: Workload, state: Mapping[str, bytearray], program: Program, passes: int
) -> tuple[dict[str, bytearray], Seen]:
    """What `passes` repetitions of `program` make of `state`, op after op, with every block at hand as a whole."""
    blocks = {name: bytearray(held) for name, held in state.items()}
    seen: Seen = {}
    for number in range(passes):
        for block in workload.of_life("local", "passing"):
            blocks[block.name] = bytearray(noise(block.name, block.nbytes, salt=f"undefined in pass {number}"))
        for op in program.ops:
            operands = [
                Operand(
                    block=touch.block,
                    lo=0,
                    hi=workload.blocks[touch.block].nbytes,
                    address=0,
                    reads=touch.reads,
                    writes=touch.writes,
                )
                for touch in op.touches
            ]
            found = [bytes(blocks[touch.block]) for touch in op.touches]
            for operand, fresh in computed(op, operands, found, number, seen):
                blocks[operand.block][:] = fresh
    return {name: blocks[name] for name in state}, seen


@dataclass(slots=True)
class Machine:
    """HOST, DEVICE and NVME as bytes. What no home or stay holds is noise, and a DROP turns bytes into noise again."""

    workload: Workload
    placement: Placement
    host: bytearray
    device: bytearray
    nvme: dict[str, bytearray]
    seen: Seen = field(default_factory=dict)

    @classmethod
    def holding(
        cls,
        workload: Workload,
        placement: Placement,
        state: Mapping[str, bytearray],
        host_bytes: int,
        device_bytes: int = 0,
    ) -> "Machine":
        """Each block of `state` at its home, and noise everywhere else."""
        host = bytearray(noise("host", host_bytes, salt="free"))
        device = bytearray(noise("device", device_bytes, salt="free"))
        nvme = {name: bytearray(noise(name, block.nbytes, salt="no home")) for name, block in workload.blocks.items()}
        for name, held in state.items():
            split = placement.host_bytes.get(name, 0)
            if split:
                at = placement.address[name]
                host[at : at + split] = held[:split]
            nvme[name][split:] = held[split:]
        return cls(workload, placement, host, device, nvme)

    def homes(self) -> dict[str, bytearray]:
        """Every block that lives on, read from its home."""
        result = {}
        for block in self.workload.of_life("durable", "carried"):
            split = self.placement.host_bytes.get(block.name, 0)
            at = self.placement.address.get(block.name, 0)
            result[block.name] = self.host[at : at + split] + self.nvme[block.name][split:]
        return result

    def run(self, schedule: Schedule, passes: int, turns: Sequence[tuple[int, int]] | None = None) -> None:
        """The lead-in, then `turns` of (pass, line), in list order if None; a last pass serves no next one."""
        ops = {op.name: op for op in self.workload.programs[schedule.name].ops}
        self.seen = {}
        for action in schedule.lead_in:
            self._step(action, ops, 0)
        lines = range(len(schedule.actions))
        for number, line in turns or [(number, line) for number in range(passes) for line in lines]:
            action = schedule.actions[line]
            if not (action.next_pass and number == passes - 1):
                self._step(action, ops, number)

    def _step(self, action: Action, ops: Mapping[str, Op], number: int) -> None:
        found = [bytes(self._at(x)) for x in action.operands]
        for x, held in zip(action.operands, found, strict=True):
            if action.verb is Verb.READ:
                self._put(x, self.nvme[x.block][x.lo : x.hi])
            elif action.verb is Verb.WRITE:
                self.nvme[x.block][x.lo : x.hi] = held
            elif action.verb is Verb.DROP:
                self._put(x, noise(x.block, x.nbytes, salt="dropped"))
        if action.verb.is_op:
            for x, fresh in computed(ops[action.op], action.operands, found, number, self.seen):
                self._put(x, fresh)

    def _at(self, x: Operand) -> bytearray:
        arena = self._arena(x)
        if not 0 <= x.address <= x.address + x.nbytes <= len(arena):
            raise IndexError(f"{x} lies outside of {len(arena)} bytes of {x.tier}")
        return arena[x.address : x.address + x.nbytes]

    def _arena(self, x: Operand) -> bytearray:
        return self.host if x.tier == "HOST" else self.device

    def _put(self, x: Operand, fresh: bytes | bytearray) -> None:
        self._arena(x)[x.address : x.address + x.nbytes] = fresh


def legal_turns(schedule: Schedule, passes: int, rng: random.Random, policy: Policy) -> list[tuple[int, int]]:
    """An order of all lines of all passes that keeps `after` and nothing else; `policy` leans it to one side."""
    count = len(schedule.actions)
    missing = [0] * (count * passes)
    followers: list[list[int]] = [[] for _ in range(count * passes)]
    for turn in range(count * passes):
        for waited, back in schedule.actions[turn % count].after:
            earlier = waited + (turn // count - back) * count
            if earlier >= 0:
                missing[turn] += 1
                followers[earlier].append(turn)
    early = {"any": 0.0, "io first": -1.0, "io last": 1.0}[policy]

    def urgency(turn: int) -> tuple[float, int]:
        return rng.random() + early * (schedule.actions[turn % count].lane == "io"), turn

    ready = [urgency(turn) for turn in range(count * passes) if not missing[turn]]
    heapify(ready)
    turns = []
    while ready:
        _, turn = heappop(ready)
        turns.append(divmod(turn, count))
        for follower in followers[turn]:
            missing[follower] -= 1
            if not missing[follower]:
                heappush(ready, urgency(follower))
    assert len(turns) == count * passes, f"{schedule.name}: some lines wait for each other for ever"
    return turns


def wrong(workload: Workload, placement: Placement, schedule: Schedule, *, orders: int = 3, seed: int = 0) -> str:
    """Empty if `schedule` comes to the same bytes as its program in list order and in `orders` other legal orders.

    Otherwise which block, or which op's input, is wrong after how many passes in which order.
    """
    rng = random.Random(seed)
    policies: tuple[Policy, ...] = ("any", "io first", "io last")
    for passes in (1, 3) if schedule.cyclic else (1,):
        state = first_state(workload)
        expected, expected_seen = interpret(workload, state, workload.programs[schedule.name], passes)
        for number in range(orders + 1):
            turns = legal_turns(schedule, passes, rng, policies[number % 3]) if number else None
            machine = Machine.holding(workload, placement, state, schedule.host_bytes, schedule.device_bytes)
            how = f"{passes} passes, {f'order {number} ({policies[number % 3]})' if number else 'list order'}"
            try:
                machine.run(schedule, passes, turns)
            except IndexError as error:
                return f"{how}: {error}"
            found = machine.homes()
            bad = [name for name in expected if found[name] != expected[name]]
            bad += [f"input of {key}" for key in expected_seen if machine.seen.get(key) != expected_seen[key]]
            bad += [f"input of {key}" for key in machine.seen if key not in expected_seen]
            if bad:
                return f"{how}: {', '.join(bad[:4])} is not what the program says"
    return ""


def computed(
    op: Op, operands: Sequence[Operand], found: Sequence[bytes], number: int, seen: Seen
) -> list[tuple[Operand, bytes]]:
    """Fresh bytes for every operand that `op` writes; what it read is noted in `seen`, unless it only copies."""
    if op.lane in ("h2d", "d2h"):
        return [(operands[1], found[0])]
    read = [held for x, held in zip(operands, found, strict=True) if x.reads]
    fresh: list[tuple[Operand, bytes]] = []
    if op.tiled or op.lane == "update":  # whole on a device, tile by tile on HOST: the same
        nbytes, lo = max(x.nbytes for x in operands), max(x.lo for x in operands)
        inputs = []
        for at in range(0, nbytes, PAGE):
            # A page of a block of half the bytes goes with two pages of the others.
            pages = [
                held[at:][:PAGE] if len(held) == nbytes else held[at // 2 // PAGE * PAGE :][:PAGE] for held in read
            ]
            inputs.append(blake2b(b"".join(pages)).digest())
            seen.setdefault((number, op.name, (lo + at) // PAGE), []).append(inputs[-1])
        for x in operands:
            if x.writes:
                tag = f"{op.name} {_original(x.block)}".encode()
                each = 1 if x.nbytes == nbytes else 2
                found = [b"".join(inputs[n : n + each]) for n in range(0, len(inputs), each)]
                fresh.append((x, b"".join(_page(tag, had, _int(x.lo + n * PAGE)) for n, had in enumerate(found))))
        return fresh
    whole = blake2b(b"".join(read)).digest()
    seen.setdefault((number, op.name, 0), []).append(whole)
    for x in operands:
        if x.writes:
            tag = f"{op.name} {_original(x.block)}".encode()
            fresh.append((x, b"".join(_page(tag, whole, _int(at)) for at in range(x.lo, x.hi, PAGE))))
    return fresh


def _original(block: str) -> str:
    """The block that a copy on the device is a copy of."""
    return block.partition("@")[0]


def _page(*parts: bytes) -> bytes:
    return blake2b(b"|".join(parts)).digest() * (PAGE // 64)


def _int(value: int) -> bytes:
    return value.to_bytes(8, "little")


MODES = ("r", "w", "rw")


@st.composite
def free_workloads(draw: st.DrawFn, *, kept: bool) -> Workload:
    """Any program at all, over blocks of any life; `kept`: one that keeps what lowering asks of a program.

    That is: no tiled op defines a block that dies in a pass; a block that is written has one tiled op at most; where
    several ops of a cyclic program write a block, the first of them defines it; a cyclic program has a whole op.
    """
    sizes = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    lives: list[Life] = ["durable", "durable", "carried", "passing", "local"]
    blocks = [
        Block(
            name=f"B{number}",
            unit=f"B{number}",
            kind="any",
            nbytes=draw(st.sampled_from(sizes)) * PAGE,
            life=draw(st.sampled_from(lives)),
        )
        for number in range(draw(st.integers(1, 6)))
    ]
    ops: list[Op] = []
    for number in range(draw(st.integers(1, 7))):
        op = draw(_ops(f"op{number}", blocks, ops, kept))
        ops += [op] if op.touches else []
    if kept:
        fleeting = blocks[0].life in ("local", "passing")
        whole = Op(
            name="whole",
            lane="compute",
            touches=(Touch(block="B0", reads=not fleeting, writes=fleeting),),
        )
        ops += [] if any(not op.tiled for op in ops) else [whole]
    return make_workload(blocks, [Program(name="free", ops=tuple(ops), cyclic=draw(st.booleans()))])


@st.composite
def _ops(draw: st.DrawFn, name: str, blocks: Sequence[Block], before: Sequence[Op], kept: bool) -> Op:
    tiled = draw(st.booleans())
    nbytes = draw(st.sampled_from([block.nbytes for block in blocks]))
    pool = [block for block in blocks if not tiled or block.nbytes in (nbytes, pages(nbytes // 2))]
    touches = []
    for block in draw(st.lists(st.sampled_from(pool), min_size=1, max_size=3, unique=True)):
        earlier = [(op.tiled, touch) for op in before for touch in op.touches if touch.block == block.name]
        mode = draw(st.sampled_from(MODES))
        fleeting = block.life in ("local", "passing")
        if fleeting and not any(touch.writes for _, touch in earlier):
            mode = "w"
        if kept and tiled and ((mode == "w" and fleeting) or any(was_tiled for was_tiled, _ in earlier)):
            continue
        writers = [touch for _, touch in earlier if touch.writes]
        if kept and "w" in mode and writers and not writers[0].defines:
            mode = "r"
        touches.append(Touch(block=block.name, reads="r" in mode, writes="w" in mode))
    moves = draw(st.sampled_from(["no", "later", "earlier"])) if tiled else "no"
    lane: Lane = "update" if tiled else "compute"
    return Op(name=name, lane=lane, touches=tuple(touches), tiled=tiled, moves=moves)  # type: ignore[arg-type]
