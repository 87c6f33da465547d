"""The arena of HOST lies on the node of the GPU where that node has room, and never on the memory of a GPU.

Scope: `tiering/numa.py` over made-up trees of `/sys`, `tiering/mempolicy.py` on this machine, what `CudaLanes` and the
doctor say of it, memory of a GPU that the system counts as RAM.
Not here: locking (`test_cuda.py`), how much may be locked (`test_pinning.py`).
"""

import mmap
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
from test_doctor import check, facts, works

import tiering.cuda
from megatrain.doctor import examine
from megatrain.environment import Cuda, cuda_facts
from tiering import limits, mempolicy
from tiering.arena import Arena
from tiering.cuda import CudaLanes, pci_address
from tiering.mempolicy import bind_pages, page_nodes
from tiering.numa import Node, Placement, device_memory, device_node, memory_nodes, placed

GiB, MiB, PAGE = 1 << 30, 1 << 20, 4096
GPU = "0009:01:00.0"


def node(number: int, total: int, free: int, *, cpus: bool = True) -> Node:
    return Node(number=number, has_cpus=cpus, memory_bytes=total * GiB, free_bytes=free * GiB)


@pytest.fixture
def tree(tmp_path: Path) -> Callable[..., Path]:
    """A root with `/sys` and `/proc` of these nodes, a GPU on `gpu` and the driver of one."""

    def make(nodes: list[Node], *, gpu: int = -1, allowed: str = "", driver: bool = True) -> Path:
        folder = tmp_path / "sys/devices/system/node"
        folder.mkdir(parents=True)
        with_memory = [one.number for one in nodes if one.memory_bytes]
        (folder / "has_memory").write_text(",".join(map(str, with_memory)) + "\n")
        for one in nodes:
            (folder / f"node{one.number}").mkdir()
            (folder / f"node{one.number}" / "cpulist").write_text(f"{one.number * 4}-3\n" if one.has_cpus else "\n")
            sizes = {"MemTotal": one.memory_bytes, "MemFree": one.free_bytes // 2, "MemUsed": 0}
            sizes |= {"Active(file)": one.free_bytes // 4, "Inactive(file)": one.free_bytes // 4, "Active": GiB}
            rows = (f"Node {one.number} {name}: {nbytes // 1024:>12} kB\n" for name, nbytes in sizes.items())
            (folder / f"node{one.number}" / "meminfo").write_text("".join(rows) + "Node 0 HugePages_Total:     0\n")
        (tmp_path / "sys/bus/pci/devices" / GPU).mkdir(parents=True)
        (tmp_path / "sys/bus/pci/devices" / GPU / "numa_node").write_text(f"{gpu}\n")
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/status").write_text(f"Name:\tpython\nMems_allowed_list:\t{allowed}\n")
        if driver:
            (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
        return tmp_path

    return make


TWO = [node(0, 256, 200), node(1, 256, 200)]
GRACE = [node(0, 480, 400), node(1, 96, 90, cpus=False)]


def test_what_the_system_tells_of_nodes_is_read_as_it_stands(tree: Callable[..., Path]) -> None:
    """P2: only nodes with memory that this process may use; what caches files counts as free."""
    every = [*TWO, node(2, 0, 0), node(3, 96, 8, cpus=False)]
    root = tree(every, gpu=1, allowed="0-1,3")
    assert memory_nodes(root) == (*TWO, every[3])
    assert device_node(GPU, root) == device_node(GPU.upper(), root) == 1
    assert device_node("0000:00:00.0", root) is None
    (root / "proc/self/status").write_text("Mems_allowed_list:\t1\n")
    assert memory_nodes(root) == (TWO[1],)
    assert memory_nodes(root / "elsewhere") == ()


def test_a_system_that_does_not_know_the_node_is_believed(tree: Callable[..., Path]) -> None:
    """-1 stands for unknown, not for the last node."""
    assert device_node(GPU, tree(TWO, gpu=-1)) is None


@pytest.mark.parametrize(
    ("nodes", "gpu", "gib", "locked", "policy", "where", "said"),
    [
        pytest.param([TWO[0]], 0, 100, True, "leave", (), "", id="one node: nothing to decide, nothing to say"),
        pytest.param([], None, 1, True, "leave", (), "", id="a system that tells of no nodes"),
        pytest.param(TWO, 1, 100, True, "bind", (1,), "node 1 (where the GPU is)", id="room"),
        pytest.param(TWO, 1, 100, False, "prefer", (1,), "node 1 (where the GPU is)", id="not taken at once"),
        pytest.param(TWO, None, 100, True, "leave", (), "of the GPU is not known", id="unknown"),
        pytest.param(TWO, 5, 100, True, "leave", (), "is 5, which has no memory for HOST", id="node without memory"),
        pytest.param(TWO, 1, 190, True, "interleave", (0, 1), "has room for 180.0 of 190.0 GiB", id="too small"),
        pytest.param(GRACE, 0, 300, True, "bind", (0,), "never on node 1, without processors", id="Grace"),
        pytest.param(GRACE, 0, 399, True, "bind", (0,), "never on node 1", id="Grace, tight"),
        pytest.param(GRACE, 0, 300, False, "bind", (0,), "never on node 1", id="Grace, not locked"),
        pytest.param(GRACE, 1, 10, True, "bind", (0,), "is 1, which has no memory", id="Grace, the GPU's own node"),
        pytest.param(
            [*TWO, node(2, 96, 90, cpus=False), node(10, 96, 90, cpus=False)],
            *(1, 190, True, "bind", (0, 1), "never on nodes 2, 10"),
            id="two sockets with memory of GPUs, too small",
        ),
        pytest.param([node(0, 9, 9, cpus=False)] * 2, 0, 1, True, "leave", (), "no NUMA node has both", id="no host"),
    ],
)
def test_where_the_arena_is_put(
    nodes: list[Node], gpu: int | None, gib: int, locked: bool, policy: str, where: tuple[int, ...], said: str
) -> None:
    """Near the GPU where there is room; spread where not; and never memory of a GPU."""
    found = placed(nodes, gpu, gib * GiB, locked=locked)
    assert (found.policy, found.nodes) == (policy, where), found
    assert said in found.line and bool(found.line) is bool(said) and "\n" not in found.line, found.line


def test_memory_of_a_gpu_is_no_ram(tree: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """P2: the system counts it as RAM; a budget from it would put HOST into DEVICE."""
    root = tree(GRACE, gpu=0)
    assert device_memory(root) == (GRACE[1],)
    monkeypatch.setattr(limits, "device_memory", lambda: device_memory(root))
    monkeypatch.setattr(limits, "_limit_files", lambda: iter(()))
    memory = SimpleNamespace(total=576 * GiB, available=490 * GiB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    limit, why = limits.memory_limit()
    assert limit == 480 * GiB and f"without {96 * GiB} bytes" in why, why
    assert limits.memory_available() == 400 * GiB


def test_a_node_without_processors_is_ram_where_there_is_no_gpu(tree: Callable[..., Path]) -> None:
    """Memory behind a bus is memory: only beside a GPU's driver it is taken for that GPU's."""
    assert device_memory(tree(GRACE, driver=False)) == ()


def _refused() -> str | None:
    """Why this machine does not let its memory be placed."""
    with mmap.mmap(-1, PAGE) as page:
        address = torch.frombuffer(page, dtype=torch.uint8).data_ptr()
        return bind_pages(address, PAGE, "prefer", [0])


@pytest.mark.parametrize("policy", ["prefer", "bind", "interleave"])
def test_the_kernel_takes_pages_from_the_node_that_was_asked_for(policy: str) -> None:
    """On this machine, which may have one node: the call is right, and pages are where it says."""
    with Arena(64 * PAGE) as arena:
        refused = arena.place(Placement(policy=policy, nodes=(0,)))  # type: ignore[arg-type]
        if refused is not None:
            pytest.skip(f"not allowed here: {refused}")
        assert arena.share_on((0,)) is None, "nothing was touched, so nothing lies anywhere"
        arena.tensor(0, arena.nbytes).fill_(1)
        share = arena.share_on((0,))
        if share is None:
            pytest.skip("the kernel does not say where pages are")
        assert share == 1.0 and arena.share_on((1, 7)) == 0.0


def test_a_node_that_is_not_there_is_refused_in_words_and_harms_nothing() -> None:
    """One line; the arena works on."""
    if reason := _refused():
        pytest.skip(f"not allowed here: {reason}")
    with Arena(4 * PAGE) as arena:
        refused = arena.place(Placement(policy="bind", nodes=(63,)))
        assert refused == "mbind: Invalid argument", refused
        arena.tensor(0, arena.nbytes).fill_(1)


def test_a_processor_whose_calls_are_not_known_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """No number is guessed."""
    monkeypatch.setattr(mempolicy.platform, "machine", lambda: "riscv64")
    assert bind_pages(0, PAGE, "bind", [0]) == "mbind: its number on riscv64 is not known here"
    assert page_nodes(0, PAGE, 1) == []


class _Arena(Arena):
    """Notes how it was placed. refuses: what the kernel says; locks: what the driver says."""

    def __init__(self, nbytes: int, refuses: str | None = None, locks: str | None = None, share: float = 1.0) -> None:
        super().__init__(nbytes)
        self.policies: list[str] = []
        self.refuses, self.locks, self.share = refuses, locks, share

    def place(self, placement: Placement) -> str | None:
        self.policies.append(placement.policy)
        return self.refuses

    def pin(self) -> str | None:
        self.policies.append("pin")
        return self.locks

    def share_on(self, nodes: object) -> float | None:
        return self.share


@pytest.mark.parametrize(
    ("refuses", "locks", "share", "asked", "said"),
    [
        (None, None, 1.0, ["bind", "pin"], "HOST arena: node 1 (where the GPU is)"),
        (None, None, 0.4, ["bind", "pin"], "HOST arena: node 1 (where the GPU is); only 40% of it lies there"),
        (None, "no more", 1.0, ["bind", "pin", "prefer"], "HOST arena: node 1 (where the GPU is)"),
        (
            "mbind: Operation not permitted",
            *(None, 1.0, ["bind", "pin"]),
            "HOST arena: node 1 (where the GPU is). The kernel refuses that (mbind: Operation not permitted): memory "
            "comes from where it is first touched",
        ),
    ],
)
def test_the_lanes_place_the_arena_before_it_is_locked_and_say_where(
    monkeypatch: pytest.MonkeyPatch, refuses: str | None, locks: str | None, share: float, asked: list[str], said: str
) -> None:
    """P2: locking takes all of it at once; what cannot be locked is not held to one node."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(tiering.cuda, "pci_address", lambda device: GPU)
    monkeypatch.setattr(tiering.cuda, "device_node", lambda address: 1)
    monkeypatch.setattr(tiering.cuda, "memory_nodes", lambda: tuple(TWO))
    lanes = CudaLanes()
    monkeypatch.setattr(lanes, "_forget_error", lambda: None)
    with _Arena(PAGE, refuses, locks, share) as arena:
        lanes._pin(arena)
    assert (arena.policies, lanes.node_line) == (asked, said)


def test_the_address_of_a_device_is_that_of_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `/sys/bus/pci/devices` names it; a torch that does not tell is no error."""
    told = SimpleNamespace(pci_domain_id=9, pci_bus_id=0xC1, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: told)
    assert pci_address(torch.device("cuda", 0)) == "0009:c1:00.0"
    del told.pci_domain_id
    assert pci_address(torch.device("cuda", 0)) is None


def test_the_doctor_shows_nodes_where_there_are_several() -> None:
    """One line with the GPU's node; a machine with one node has none."""
    gpu = Cuda(device="GPU", card=True)
    names = [one.name for one in examine(facts(cuda=gpu, nodes=(TWO[0],)), None, probe=works).checks]
    assert "NUMA nodes" not in names
    near = check(examine(facts(cuda=gpu, nodes=tuple(GRACE), device_node=0), None, probe=works), "NUMA nodes")
    assert near.state == "ok" and "without processors, not used" in near.found and "the GPU: node 0" in near.found, near
    unknown = check(examine(facts(cuda=gpu, nodes=tuple(TWO)), None, probe=works), "NUMA nodes")
    assert unknown.state == "warn" and "the GPU: not known" in unknown.found and unknown.fix, unknown
    alone = check(examine(facts(cuda=Cuda(why="none"), nodes=tuple(TWO)), None, probe=works), "NUMA nodes")
    assert alone.state == "ok" and "first touched" in alone.found, alone


def test_a_torch_for_hip_is_asked_for_its_device(tmp_path: Path) -> None:
    """A build for AMD has no CUDA version, and names its devices alike."""
    cuda = SimpleNamespace(is_available=lambda: True, get_device_name=lambda index: "Instinct")
    hip = SimpleNamespace(__version__="2.13", version=SimpleNamespace(cuda=None, hip="7.0"), cuda=cuda)
    assert cuda_facts(hip, tmp_path).device == "Instinct"  # type: ignore[arg-type]
    neither = SimpleNamespace(__version__="2.13", version=SimpleNamespace(cuda=None, hip=None), cuda=cuda)
    assert "built without CUDA" in cuda_facts(neither, tmp_path).why  # type: ignore[arg-type]
