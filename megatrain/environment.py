"""What surrounds a run: versions, device, native libraries, kernel, limits. Facts only.

Scope: `Facts`, and `gather`, which reads them; nothing here raises for what is missing, and nothing is judged.
Not here: what the facts mean and what to do (`doctor.py`), trials (`probes.py`), drives (`tiering/drive.py`).
"""

import ctypes
import importlib.util
import os
import platform
import resource
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType

from megatrain.errors import UserError
from megatrain.sizes import parse_size
from tiering.limits import memory_available, memory_limit
from tiering.numa import Node, device_node, memory_nodes
from tiering.pinning import PinFacts

PIN_LIMIT = "MEGATRAIN_PIN_LIMIT"
_CARD_FILES = ("proc/driver/nvidia/version", "dev/nvidiactl", "dev/kfd")
PACKAGES = ("torch", "transformers")
CAP_IPC_LOCK = 14
"""Bit of the capability that lifts RLIMIT_MEMLOCK; source: `linux/capability.h`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """version: empty where it is not installed. wanted: as the package's own requirements say. error: what importing it
    raised.
    """

    name: str
    version: str
    wanted: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuda:
    """device: the name of the first one, empty where torch sees none; then `why`. card: the system shows one."""

    device: str = ""
    why: str = ""
    card: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class DirectStorage:
    """What GPUDirect Storage needs of a system. kvikio: it is installed; whether it works only a transfer can tell."""

    kvikio: bool
    libcuda: bool
    libcufile: bool
    udev: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """shm_bytes: size of /dev/shm, None without one. memory_why: what sets `memory_bytes`. memlock_bytes: None where
    this process may lock what it likes. pin_limit_bytes: of the variable `MEGATRAIN_PIN_LIMIT`. nodes: NUMA nodes with
    memory; device_node: the one of the first device, None where nobody knows.
    """

    packages: tuple[Package, ...]
    cuda: Cuda
    storage: DirectStorage
    release: str
    shm_bytes: int | None
    memory_bytes: int
    memory_why: str
    available_bytes: int
    memlock_bytes: int | None
    pin_limit_bytes: int | None
    nodes: tuple[Node, ...] = ()
    device_node: int | None = None

    def pin_facts(self, probed_bytes: int = 0) -> PinFacts:
        return PinFacts(
            has_cuda=bool(self.cuda.device),
            memory_bytes=self.memory_bytes,
            release=self.release,
            memlock_bytes=self.memlock_bytes,
            limit_bytes=self.pin_limit_bytes,
            probed_bytes=probed_bytes,
        )


def gather(
    *,
    root: Path = Path("/"),
    environ: Mapping[str, str] = os.environ,
    loads: Callable[[str], bool] | None = None,
    memlock: Callable[[], int] | None = None,
) -> Facts:
    """The facts of this machine. root: what stands for `/`; loads: can a native library be loaded; memlock: the soft
    limit. Raises UserError for a `MEGATRAIN_PIN_LIMIT` that is no size.
    """
    loads = _loads if loads is None else loads
    limit = memlock() if memlock is not None else resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    memory_bytes, memory_why = memory_limit()
    torch, torch_error = _imported("torch")
    cuda = cuda_facts(torch, root)
    return Facts(
        packages=(
            Package(name="python", version=platform.python_version(), wanted=_python_wanted()),
            *(_package(name, torch_error if name == "torch" else "") for name in PACKAGES),
        ),
        cuda=cuda,
        storage=DirectStorage(
            kvikio=_is_installed("kvikio"),
            libcuda=loads("libcuda.so.1"),
            libcufile=loads("libcufile.so.0") or loads("libcufile.so"),
            udev=(root / "run" / "udev").is_dir(),
        ),
        release=_text(root / "proc/sys/kernel/osrelease") or platform.release(),
        shm_bytes=_file_system_bytes(root / "dev/shm"),
        memory_bytes=memory_bytes,
        memory_why=memory_why,
        available_bytes=memory_available(),
        memlock_bytes=None if limit == resource.RLIM_INFINITY or _may_lock_all(root) else limit,
        pin_limit_bytes=pin_limit(environ),
        nodes=memory_nodes(root),
        device_node=_device_node(root) if cuda.device else None,
    )


def _device_node(root: Path) -> int | None:
    """Of the first device, which torch sees."""
    import torch

    from tiering.cuda import pci_address  # imports torch: only where that works

    address = pci_address(torch.device("cuda", 0))
    return None if address is None else device_node(address, root)


def _imported(name: str) -> tuple[ModuleType | None, str]:
    try:
        return importlib.import_module(name), ""
    except Exception as error:  # a broken native library raises whatever it likes
        return None, f"{type(error).__name__}: {' '.join(str(error).split())}"


def _package(name: str, error: str) -> Package:
    try:
        version = metadata.version(name)
    except metadata.PackageNotFoundError:
        version = ""
    return Package(name=name, version=version, wanted=_wanted(name), error=error)


def _wanted(name: str) -> str:
    """`<3,>=2.13` of the line `torch<3,>=2.13` in this package's own metadata."""
    with suppress(metadata.PackageNotFoundError):
        for line in metadata.requires("megatrain") or ():
            if line.startswith(name) and line[len(name) : len(name) + 1] in "<>=~!( " and ";" not in line:
                return line[len(name) :].strip()
    return ""


def _python_wanted() -> str:
    with suppress(metadata.PackageNotFoundError):
        return metadata.metadata("megatrain")["Requires-Python"] or ""
    return ""


def cuda_facts(torch: ModuleType | None = None, root: Path = Path("/")) -> Cuda:
    """What torch sees of CUDA. torch: the module, where it has been imported already."""
    card = any((root / path).exists() for path in _CARD_FILES)
    torch = _imported("torch")[0] if torch is None else torch
    if torch is None:
        return Cuda(why="torch cannot be imported", card=card)
    if torch.version.cuda is None and getattr(torch.version, "hip", None) is None:
        return Cuda(why=f"torch {torch.__version__} is built without CUDA", card=card)
    try:
        if torch.cuda.is_available():
            return Cuda(device=torch.cuda.get_device_name(0), card=True)
        torch.cuda.init()
    except Exception as error:  # the driver's own words say best what is missing
        return Cuda(why=" ".join(str(error).split()), card=card)
    return Cuda(why="torch finds no CUDA device", card=card)


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):  # a module without a spec, as a stand-in is
        return True


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _may_lock_all(root: Path) -> bool:
    for line in _text(root / "proc/self/status").splitlines():
        name, _, value = line.partition(":")
        if name == "CapEff":
            return bool(int(value, 16) >> CAP_IPC_LOCK & 1)
    return False


def _file_system_bytes(path: Path) -> int | None:
    try:
        room = os.statvfs(path)
    except OSError:
        return None
    return room.f_blocks * room.f_frsize


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def pin_limit(environ: Mapping[str, str]) -> int | None:
    text = environ.get(PIN_LIMIT, "").strip()
    if not text:
        return None
    try:
        return parse_size(text)
    except ValueError as error:
        raise UserError(f"{PIN_LIMIT}: {error}") from None
