"""`train.compile`: layers as compiled graphs have the same bits wherever weights lie; few graphs; what is refused.

Scope: whole runs through `verify`, placements and resumes, how often it compiles, what is said and what is refused.
Not here: runs without it (`test_same_numbers.py`, `test_run.py`).

Promise: the bits of a plain loop whose layers are compiled with the same settings, and computed again in backward by
`torch.utils.checkpoint`. What inductor makes takes a compiler and half a minute, so that is marked `slow`; the default
run has the same graphs carried out by torch's own operators (`aot_eager`).
"""

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from committed_runs import QUIET, parameters, same_bits
from conftest import RunFile
from models import MODELS
from rich.console import Console
from torch import nn
from torch._inductor import config as inductor
from torch.utils._triton import has_triton

import megatrain.compiled
import megatrain.compiler_trial
from megatrain.compiled import Compiler
from megatrain.compiler_trial import refuse_uncompilable
from megatrain.config import load_run
from megatrain.errors import UserError
from megatrain.inputs import every_token
from megatrain.model import build, find_units, model_config
from megatrain.prepare import prepare
from megatrain.stream import StreamedModel
from megatrain.timing import time_units
from megatrain.trainer import train
from megatrain.verify import verify

# torch's own: of every input of a graph it reads `grad`, and inductor still has parts that torch gives up.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning"),
]

CPU = torch.device("cpu")
DROPS = {**MODELS["gpt2"], "n_layer": 2, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}
COMPILED = {"train.compile": True, "optimizer.lr": 0.01, "tiers.host_memory": "8MiB"}
MIXED = {
    "model.config": {**MODELS["llama"], "num_hidden_layers": 2},
    "train.micro_batch": 2,
    "train.max_grad_norm": 0.5,
}
DROPPING = {"model.config": DROPS, "train.micro_batch": 4}
RUNS = pytest.mark.parametrize("changes", [MIXED, DROPPING], ids=["llama", "gpt2-dropout"])

real_settings = megatrain.compiled.settings


@pytest.fixture
def no_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are made and shared as ever, and carried out by torch's own operators: no compiler, no half minutes."""

    def settings(layers: int) -> dict[str, Any]:
        given = {key: value for key, value in real_settings(layers).items() if key != "options"}
        return {**given, "backend": "aot_eager"}

    monkeypatch.setattr(megatrain.compiled, "settings", settings)
    monkeypatch.setattr(megatrain.compiler_trial, "refuse_uncompilable", lambda device: None)


def check_placements(run_file: RunFile, changes: dict[str, Any], residents: Sequence[float] = (0, 0.5, 1)) -> None:
    """Each equals the compiled plain loop, and so they equal each other."""
    seen = set()
    for resident in residents:
        result = verify(load_run(run_file({**COMPILED, **changes, "tiers.resident": resident})), 2, QUIET)
        shown = {key: result[key] for key in ("losses", "plain_losses", "grad_norms", "plain_grad_norms", "differing")}
        assert result["identical"], shown
        seen.add((*result["losses"], *result["grad_norms"]))
    assert len(seen) == 1, seen


def check_resume(run_file: RunFile, tmp_path: Path, changes: dict[str, Any]) -> None:
    """Two steps, then two more elsewhere in RAM, equal four at once."""
    states = []
    for name, parts in (("whole", [(4, 0)]), ("parts", [(2, 0), (4, 1)])):
        for steps, resident in parts:
            where = {"tiers.nvme": str(tmp_path / name / "nvme"), "output.dir": str(tmp_path / name)}
            run = {**COMPILED, **changes, **where, "train.steps": steps, "tiers.resident": resident}
            assert train(load_run(run_file(run)), resume=steps == 4 and name == "parts", console=QUIET) == 0
        states.append(tmp_path / name / "nvme")
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        whole, parts = (parameters(state, kind) for state in states)
        differing = [key for key in whole if not same_bits(whole[key], parts[key])]
        assert whole.keys() == parts.keys() and not differing, f"{kind}: {differing}"


@pytest.mark.usefixtures("known_machine", "no_inductor")
def test_graphs_have_the_same_bits_in_every_placement(run_file: RunFile) -> None:
    """P1, I8: weights are inputs of a graph, wherever they lie; forward and recompute drop the same elements."""
    check_placements(run_file, DROPPING, (0, 1))


@pytest.mark.slow
@pytest.mark.usefixtures("known_machine")
@RUNS
def test_compiled_layers_have_the_same_bits_in_every_placement(run_file: RunFile, changes: dict[str, Any]) -> None:
    """P1, I8: the same with what inductor makes."""
    check_placements(run_file, changes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.skipif(torch.cuda.is_available() and not has_triton(), reason="Triton does not work with this device")
@pytest.mark.usefixtures("known_machine")
@pytest.mark.parametrize(
    ("changes", "place"), [(MIXED, "host"), (MIXED, "device"), (DROPPING, "host")], ids=["llama", "there", "dropout"]
)
def test_layers_compiled_for_cuda_have_the_bits_of_the_compiled_plain_loop_on_cuda(
    run_file: RunFile, changes: dict[str, Any], place: str
) -> None:
    """P1, I8: Triton's kernels, with weights at other addresses each time; the plain loop's layers are compiled with
    the same settings, and computed again in backward.
    """
    check_placements(run_file, {**changes, "device": "cuda", "train.update_on": place}, (0, 1))


@pytest.mark.slow
@pytest.mark.usefixtures("known_machine")
@pytest.mark.parametrize("model", ["qwen3", "gemma3", "mixtral"])
def test_compiled_layers_of_other_models_have_the_bits_of_the_compiled_plain_loop(
    run_file: RunFile, model: str
) -> None:
    """P1: layers of two kinds in one model, and experts."""
    result = verify(load_run(run_file({**COMPILED, "model.config": MODELS[model], "train.micro_batch": 4})), 2, QUIET)
    assert result["identical"], {key: result[key] for key in ("losses", "plain_losses", "differing")}


@pytest.mark.usefixtures("known_machine", "no_inductor")
@pytest.mark.slow
def test_graphs_have_the_same_bits_after_a_resume(run_file: RunFile, tmp_path: Path) -> None:
    """P3: in another placement."""
    check_resume(run_file, tmp_path, MIXED)


@pytest.mark.slow
@pytest.mark.usefixtures("known_machine")
@RUNS
def test_compiled_layers_have_the_same_bits_after_a_resume(
    run_file: RunFile, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """P3: the same with what inductor makes."""
    check_resume(run_file, tmp_path, changes)


@pytest.mark.slow
@pytest.mark.usefixtures("known_machine", "no_inductor")
def test_frozen_embeddings_leave_the_compiled_layers_the_plain_loops_bits(run_file: RunFile) -> None:
    """P1: nothing below the first layer needs a gradient."""
    changes = {**MIXED, "model.freeze": ["model.embed_tokens.*", "*.0.mlp.*"], "tiers.resident": 0}
    result = verify(load_run(run_file({**COMPILED, **changes})), 2, QUIET)
    assert result["identical"], {key: result[key] for key in ("losses", "plain_losses", "differing")}


class Steps:
    """A compiled model whose weights lie at another address each time."""

    def __init__(self, layers: int, **changes: Any) -> None:
        config = {**MODELS["llama"], "num_hidden_layers": layers, **changes}
        self.told: list[str] = []
        self.compiler = Compiler(self.told.append)
        self.units = self.compiler.units(find_units(build(model_config(config))))

    def run(self, rows: int = 2, seq_len: int = 16) -> None:
        time_units(self.units, rows, seq_len, 64 << 20)


@pytest.mark.usefixtures("no_inductor")
def test_six_layers_make_as_many_graphs_as_two() -> None:
    """Layers of a kind share their graphs, and a weight at another address needs no new one."""
    seen = {}
    for layers in (2, 6):
        steps = Steps(layers)
        places = []
        forwards = [unit for unit in steps.units if unit.compiled is not None]
        assert [unit.name for unit in forwards] == [f"model.layers.{n}" for n in range(layers)]
        for _ in range(2):
            streamed_step(steps, places)
        seen[layers] = steps.compiler.graphs
        assert len(set(places)) > layers, f"{len(set(places))} addresses in {len(places)} lends"
        assert steps.told == [
            "compiling LlamaDecoderLayer, forward ...",
            "compiling LlamaDecoderLayer, recompute and backward ...",
        ], steps.told
    assert seen == {2: 2, 6: 2}, seen


def streamed_step(steps: Steps, places: list[int]) -> None:
    """One step on weights that are somewhere else for each op; `places` gets their addresses."""

    @contextmanager
    def lend(op: str) -> Iterator[dict[str, torch.Tensor]]:
        blocks = {f"{u.name}/{k}": torch.zeros(u.nbytes, dtype=torch.uint8) for u in units for k in ("weight", "grad")}
        kept.append(blocks)
        places.extend(blocks[f"{op.partition('.')[2]}/weight"].data_ptr() for _ in range(op != "loss"))
        yield blocks

    units, kept = steps.units, []
    model = StreamedModel(units, lend, lambda unit, gradients: None)
    try:
        model.step(every_token(torch.zeros(2, 16, dtype=torch.long)), 1)
    finally:
        model.close()


@pytest.mark.usefixtures("no_inductor")
def test_how_often_it_compiled_is_said(run_file: RunFile, known_machine: None) -> None:
    """A run says it in one line, and what it compiles before that."""
    said = Console(file=io.StringIO(), width=200)
    run = load_run(run_file({**COMPILED, **MIXED, "train.steps": 2, "tiers.resident": 0}))
    assert train(run, resume=False, console=said) == 0
    text = said.file.getvalue()  # type: ignore[attr-defined]
    assert "torch.compile: layers are compiled when they first run" in text
    assert text.index("compiling LlamaDecoderLayer, forward ...") < text.index("step 1/2")
    assert "torch.compile: compiled 2 graphs in " in text


def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Llama's MLP looks at a value, which no graph can."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    plain = LlamaMLP.forward

    def looks(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return plain(self, x)

    monkeypatch.setattr(LlamaMLP, "forward", looks)


@pytest.mark.usefixtures("known_machine", "no_inductor")
def test_a_layer_that_is_no_graph_runs_without_and_that_is_said(
    run_file: RunFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not silently: the line names it with torch's reason; the bits are those of the plain loop."""
    broken(monkeypatch)
    steps = Steps(2)
    steps.run()
    assert steps.compiler.graphs == 0
    assert "; LlamaDecoderLayer, forward is not: " in steps.compiler.line(), steps.compiler.line()
    assert "; LlamaDecoderLayer, recompute and backward is not: " in steps.compiler.line()
    assert any("runs without torch.compile" in line for line in steps.told), steps.told
    result = verify(load_run(run_file({**COMPILED, **MIXED})), 2, QUIET)
    assert result["identical"], {key: result[key] for key in ("losses", "plain_losses", "differing")}


@pytest.mark.usefixtures("no_inductor")
def test_layers_that_are_never_alike_end_the_run_with_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own limit would let them run without a graph, silently."""
    few = megatrain.compiled.settings
    monkeypatch.setattr(megatrain.compiled, "settings", lambda layers: {**few(layers), "recompile_limit": 2})
    steps = Steps(2)
    steps.run(seq_len=8)
    with pytest.raises(UserError, match=r"LlamaDecoderLayer was compiled 2 times and asks for more.*compile: false"):
        steps.run(seq_len=12)


@pytest.mark.usefixtures("no_inductor")
def test_compiling_is_not_in_the_measured_times(run_file: RunFile, monkeypatch: pytest.MonkeyPatch) -> None:
    """P5: units are timed as they will run; what compiling took is said apart."""
    monkeypatch.setattr("megatrain.prepare.io_steals", lambda *args, **kwargs: 0.0)
    prepared = prepare(load_run(run_file({**COMPILED, **MIXED})))
    assert prepared.compiler is not None and prepared.compiler.graphs == 2
    steps_s = sum(time.forward_s + time.backward_s for time in prepared.times.values())
    assert 0 < steps_s < prepared.compiler.seconds, f"{steps_s} s of {prepared.compiler.seconds} s to compile"


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(UserError) as caught:
        call()
    text = str(caught.value)
    assert text.startswith("train.compile: ") and "Fix: " in text and "train.compile: false" in text, text
    return text


def test_a_missing_compiler_is_refused_before_anything_is_written(
    run_file: RunFile, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, known_machine: None
) -> None:
    """P2: by `train`, in one line, with three ways out."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    run = load_run(run_file(COMPILED))
    with inductor.patch({"cpp.cxx": (None, "no-such-compiler")}):
        text = refusal(lambda: train(run, resume=False, console=QUIET))
    assert "needs a C++ compiler" in text and "g++" in text and "CXX=" in text, text
    assert not run.tiers.nvme[0].exists() and not run.output.dir.exists()


def test_a_folder_that_cannot_be_written_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """P2: the folder is named, and the variable that moves it."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    text = refusal(lambda: refuse_uncompilable(CPU))
    assert str(tmp_path / "file") in text and "TORCHINDUCTOR_CACHE_DIR=" in text, text


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ImportError("x.so: failed to map segment from shared object"), "noexec"),
        (OSError("x.so: failed to map segment from shared object"), "noexec"),
        (RuntimeError("something\nelse"), "a trial of torch.compile failed: RuntimeError: something else"),
    ],
    ids=["noexec", "noexec-loader", "other"],
)
def test_what_goes_wrong_in_the_trial_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: Exception, words: str
) -> None:
    """P2: the folder's file system, or whatever it is."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise error

    monkeypatch.setattr(megatrain.compiler_trial.torch, "compile", lambda *args, **kwargs: fails)
    text = refusal(lambda: refuse_uncompilable(CPU))
    assert words in text and "\n" not in text, text


def test_a_switched_off_compiler_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """P2: TORCH_COMPILE_DISABLE makes `torch.compile` a promise that nothing keeps."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(megatrain.compiler_trial.torch, "compile", lambda function, **kwargs: function)
    assert "TORCH_COMPILE_DISABLE" in refusal(lambda: refuse_uncompilable(CPU))


@pytest.mark.slow
def test_a_compiler_that_fails_is_refused_with_its_own_word(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """P2: g++ without headers, for instance."""
    compiler = tmp_path / "g++"
    fails = 'echo "x.cpp:1: fatal error: no header"; exit 1'
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *--version*) echo "g++ 12.0";; *) {fails};; esac\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    with inductor.patch({"cpp.cxx": (None, str(compiler))}):
        text = refusal(lambda: refuse_uncompilable(CPU))
    assert "the C++ compiler failed at a trial" in text and "fatal error: no header" in text, text


@pytest.mark.slow
def test_a_working_compiler_is_accepted() -> None:
    """The trial itself, with what this machine has."""
    refuse_uncompilable(CPU)
