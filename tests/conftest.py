"""Fixtures that more than one test file uses.

Scope: a small valid run file in a temporary folder; `slow` values of a parameter.
Not here: what only one test file needs.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tiering.hardware import assumed_hardware

TEXT = "".join(f"line {n}: the quick brown fox jumps over the lazy dog\n" for n in range(40))

RunFile = Callable[..., Path]


def slow(*values: Any, id: str | None = None) -> Any:  # pytest's own name for it
    """Values of a parameter that are left out otherwise."""
    return pytest.param(*values, id=id, marks=pytest.mark.slow)


@pytest.fixture
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans do not depend on how busy this machine is: nothing is measured, every rate is assumed."""
    import megatrain.prepare  # here, for tests that need no torch: it takes seconds to import

    monkeypatch.setattr(megatrain.prepare, "measure", lambda *args, **kwargs: assumed_hardware())
    monkeypatch.setattr(megatrain.prepare, "time_units", lambda *args: {})
    monkeypatch.setattr(megatrain.prepare, "io_steals", lambda *args, **kwargs: 0.0)


@pytest.fixture
def run_file(tmp_path: Path) -> RunFile:
    """Writes a run file for a two-layer Llama on a small text; `changes` are dotted keys with their values.

    The value `...` removes a key. The text file, the NVMe tier and the output lie below `tmp_path`.
    """
    (tmp_path / "text.txt").write_text(TEXT)

    def write(changes: dict[str, Any] | None = None, name: str = "run.yaml") -> Path:
        llama = {
            "model_type": "llama",
            "vocab_size": 256,
            "hidden_size": 16,
            "intermediate_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 64,
            "tie_word_embeddings": False,
        }
        tree: dict[str, Any] = {
            "model": {"config": llama},
            "data": {"paths": str(tmp_path / "text.txt"), "tokenizer": "bytes", "seq_len": 16},
            "train": {"steps": 4, "batch": 4, "micro_batch": 2},
            "device": "cpu",
            "tiers": {"nvme": str(tmp_path / "run" / "nvme")},
            "output": {"dir": str(tmp_path / "run")},
        }
        for dotted, value in (changes or {}).items():
            *sections, leaf = dotted.split(".")
            node = tree
            for section in sections:
                node = node.setdefault(section, {})
            if value is ...:
                node.pop(leaf)
            else:
                node[leaf] = value
        path = tmp_path / name
        path.write_text(yaml.safe_dump(tree, sort_keys=False))
        return path

    return write
