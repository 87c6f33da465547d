"""The tests marked `gpu`, in a pytest of their own.

Scope: `marked`: the files that have such tests, what pytest said.
Not here: the tests.
"""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.rig import Rig

ROOT = Path(__file__).resolve().parents[2]
_MARK = re.compile(r"\bmark\.gpu\b")
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?|deselected)\b")
MOST_NAMED = 12
PER_TEST_S = 100


def marked(rig: Rig) -> dict[str, Any]:
    files = marked_files(ROOT / "tests")
    command = [
        sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-rfEs", "--tb=line", f"--timeout={PER_TEST_S}",
        "-p", "no:cacheprovider", f"--basetemp={rig.folder / 'tests'}", *map(str, files),
    ]  # fmt: skip
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=max(1.0, rig.left_s()), check=False
        )
    except subprocess.TimeoutExpired as error:
        out = error.stdout or b""
        text = out.decode(errors="replace") if isinstance(out, bytes) else out
        return {"ok": False, "why": "not done in time", "files": [path.name for path in files], "tests": _counted(text)}
    return {"files": [path.name for path in files], **told(done.returncode, done.stdout, done.stderr)}


def marked_files(folder: Path) -> list[Path]:
    """Only these are collected: the others may need packages that are not there."""
    return [path for path in sorted(folder.glob("test_*.py")) if _MARK.search(path.read_text())]


def told(code: int, out: str, errors: str) -> dict[str, Any]:
    """`ok` None where all tests were skipped."""
    lines = out.splitlines()
    counts = {"tests": _counted(out)}
    bad = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    if code:
        last = (errors.strip() or out.strip()).splitlines()[-1:] or ["pytest said nothing"]
        return {
            "ok": False,
            "why": "; ".join(bad[:MOST_NAMED])[:2000] or f"exit code {code}: {last[0][:300]}",
            **counts,
        }
    if not counts["tests"].get("passed"):
        reasons = [line for line in lines if line.startswith("SKIPPED")]
        return {"ok": None, "skipped": "; ".join(reasons[:2])[:500] or "no test ran", **counts}
    return {"ok": True, **counts}


def _counted(out: str) -> dict[str, int]:
    lines = [line for line in out.splitlines() if _COUNT.search(line) and " in " in line]
    return {name: int(count) for count, name in _COUNT.findall(lines[-1])} if lines else {}
