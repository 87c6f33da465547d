"""NUMA nodes: what the system tells of them, and on which of them the arena of HOST should lie.

Scope: `Node`, `host_nodes`, `device_node`; `placed`, the decision, which is pure.
Not here: asking the kernel for it (`mempolicy.py`), the arena (`arena.py`), which device it is (`cuda.py`).

A node with memory and without processors is never taken for HOST: on machines where the GPU's memory is part of the
system's (Grace Hopper), that is how it appears.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

GiB = 1 << 30
ROOM_SHARE = 0.9
"""Of what a node has left: others take memory too, and a node that is strictly asked for must not run out."""
_GPU_DRIVERS = ("proc/driver/nvidia", "dev/kfd")
Policy = Literal["leave", "prefer", "bind", "interleave"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """free_bytes: nobody's, and what only caches files."""

    number: int
    has_cpus: bool
    memory_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """policy: leave: pages come from where they are first touched; prefer: from `nodes`, from others if those are full;
    bind: from `nodes` alone; interleave: from each of `nodes` in turn. line: for a person; empty: nothing to tell.
    """

    policy: Policy
    nodes: tuple[int, ...] = ()
    line: str = ""


def memory_nodes(root: Path = Path("/")) -> tuple[Node, ...]:
    """Nodes with memory that this process may use. root: what stands for `/`. Empty where the system tells of none."""
    folder = root / "sys/devices/system/node"
    allowed = _numbers(_status(root, "Mems_allowed_list"))
    found = []
    for number in _numbers(_text(folder / "has_memory")):
        if allowed and number not in allowed:
            continue
        sizes = _meminfo(folder / f"node{number}" / "meminfo")
        if not sizes.get("MemTotal"):
            continue
        free = sum(sizes.get(name, 0) for name in ("MemFree", "Active(file)", "Inactive(file)"))
        found.append(
            Node(
                number=number,
                has_cpus=bool(_text(folder / f"node{number}" / "cpulist")),
                memory_bytes=sizes["MemTotal"],
                free_bytes=free,
            )
        )
    return tuple(found)


def device_node(address: str, root: Path = Path("/")) -> int | None:
    """The node that a PCI device hangs on, such as `0000:3b:00.0`; None where the system does not know."""
    with suppress(ValueError):
        number = int(_text(root / "sys/bus/pci/devices" / address.lower() / "numa_node"))
        return number if number >= 0 else None
    return None


def device_memory(root: Path = Path("/")) -> tuple[Node, ...]:
    """Nodes that are taken for memory of a GPU: without processors, on a machine with a GPU's driver."""
    if not any((root / path).exists() for path in _GPU_DRIVERS):
        return ()
    return tuple(node for node in memory_nodes(root) if not node.has_cpus)


def placed(nodes: Sequence[Node], gpu_node: int | None, nbytes: int, *, locked: bool) -> Placement:
    """Where `nbytes` of HOST should lie that are copied to a device on `gpu_node`.

    locked: all of it is taken at once, so that a node that has room now is not asked for more later. Without, a node
    that turned out full would end the process: it is preferred only.
    """
    if len(nodes) < 2:
        return Placement(policy="leave")
    host = {node.number: node for node in nodes if node.has_cpus}
    others = [node.number for node in nodes if not node.has_cpus]
    everywhere = tuple(host)
    apart = f"; never on {_named(others)}, without processors" if others else ""
    if not host:
        return Placement(policy="leave", line="no NUMA node has both memory and processors")
    if gpu_node not in host:
        why = "is not known" if gpu_node is None else f"is {gpu_node}, which has no memory for HOST"
        line = f"the NUMA node of the GPU {why}: memory comes from where it is first touched{apart}"
        return Placement(policy="bind", nodes=everywhere, line=line) if others else Placement(policy="leave", line=line)
    near = host[gpu_node]
    room = int(ROOM_SHARE * near.free_bytes)
    if nbytes <= room or len(host) == 1:
        strict = others and len(host) == 1
        policy: Policy = "bind" if strict or (locked and nbytes <= room) else "prefer"
        return Placement(policy=policy, nodes=(gpu_node,), line=f"node {gpu_node} (where the GPU is){apart}")
    line = (
        f"spread over {_named(everywhere)}: node {gpu_node}, where the GPU is, has room for {room / GiB:.1f} of "
        f"{nbytes / GiB:.1f} GiB{apart}"
    )
    return Placement(policy="bind" if others else "interleave", nodes=everywhere, line=line)


def _named(numbers: Sequence[int]) -> str:
    return f"node{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def _meminfo(path: Path) -> dict[str, int]:
    """Bytes by name, of lines such as `Node 0 MemTotal:  24683656 kB`."""
    sizes = {}
    for line in _text(path).splitlines():
        words = line.split()
        if len(words) >= 4 and words[3].isdigit():
            sizes[words[2].rstrip(":")] = int(words[3]) * 1024
    return sizes


def _status(root: Path, name: str) -> str:
    for line in _text(root / "proc/self/status").splitlines():
        if line.startswith(f"{name}:"):
            return line.partition(":")[2]
    return ""


def _numbers(text: str) -> list[int]:
    """Of a list such as `0-1,4`; nothing of what is none."""
    return sorted(set(_each(text)))


def _each(text: str) -> Iterator[int]:
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        with suppress(ValueError):
            yield from range(int(first), int(last or first) + 1)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
