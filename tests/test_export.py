"""What leaves a run as a model folder is what was trained, in a form that transformers loads.

Scope: `megatrain export`: weights, files beside them, shards, dtypes, refusals, a training that goes on meanwhile.
Not here: snapshots (`test_snapshot.py`), the safetensors library.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from committed_runs import QUIET, parameters, run_in, same_bits, trained, untrained
from conftest import RunFile
from families import FAMILIES
from models import MODELS
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

import megatrain.export
import megatrain.goodbye
import megatrain.trainer
from megatrain import cli
from megatrain.committed import Committed
from megatrain.companions import byte_tokenizer
from megatrain.errors import UserError
from megatrain.evaluate import FolderWeights
from megatrain.export import export
from megatrain.loss import answering
from megatrain.model import build, find_units, model_config
from megatrain.safetensors_out import Entry, cut, write_file
from megatrain.stream import StreamedModel
from tiering.errors import DiskFullError

pytestmark = pytest.mark.usefixtures("known_machine")

GB = 10**9
IDS = torch.arange(24).view(1, 24) * 7 % 256
QUICK = ("llama", "gpt2", "gpt_neox", "mixtral", "deepseek_v3", "gemma3_text")
"""Families of the quick tests: renamed tensors, fused experts, persistent buffers, tied weights."""


@pytest.fixture(autouse=True)
def _no_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatrain.goodbye, "SAMPLE_MOST_S", 0.0)


def exported(run_dir: Path, out: Path, **options: Any) -> list[Path]:
    defaults: dict[str, Any] = {"dtype": "float32", "max_shard_bytes": 5 * GB, "force": False, "console": QUIET}
    return export(run_dir, out, **defaults | options)


def stored(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a model folder, through the safetensors library."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def streamed_logits(config: dict[str, Any], root: Path) -> torch.Tensor:
    """Logits of the last position as the tiers compute them, from the committed bytes."""
    units = find_units(build(model_config(config)))
    units.model.eval()
    weights = parameters(root)

    class Bytes:
        def fill(self, unit: Any, block: torch.Tensor) -> None:
            for place in unit.slices:
                place.of(block).copy_(weights[place.name])

    with FolderWeights(units, Bytes()).opened() as passes:  # type: ignore[arg-type]
        model = StreamedModel(units, passes.lend, lambda unit, gradients: None)
        logits = model.logits(IDS)
        model.close()
    return logits


@torch.no_grad()
def loaded_logits(model: Any) -> torch.Tensor:
    """The same of a model that transformers loaded: the head on the last position alone, as generation does."""
    output = model.base_model(input_ids=IDS, use_cache=False)
    with answering(model, type(output)(last_hidden_state=output.last_hidden_state[:, -1:])):
        return model(input_ids=IDS[:, -1:], use_cache=False).logits[:, -1]


FAMILY_CASES = [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in sorted(FAMILIES)]


@pytest.mark.filterwarnings("ignore")  # what transformers warns of when it loads is its own business
@pytest.mark.parametrize("family", FAMILY_CASES)
def test_an_exported_model_is_the_one_that_was_trained_bit_for_bit(
    run_file: RunFile, tmp_path: Path, family: str
) -> None:
    """P1: every parameter, and the logits, through `from_pretrained`; no tensor is missing or left over."""
    changes = {"model.config": FAMILIES[family], "tiers.host_memory": "32MiB"}
    try:
        run_dir = untrained(run_file, changes)
    except UserError as error:
        pytest.skip(f"refused as a run: {error}")
    exported(run_dir, tmp_path / "deep" / "model")
    model, told = AutoModelForCausalLM.from_pretrained(tmp_path / "deep" / "model", output_loading_info=True)
    faults = {key: value for key, value in told.items() if value}
    assert not faults, f"{family}: {faults}"
    named = dict(model.named_parameters())
    committed = parameters(run_in(run_dir).tiers.nvme[0])
    assert named.keys() == committed.keys(), named.keys() ^ committed.keys()
    unlike = [name for name, values in committed.items() if not same_bits(values, named[name].detach())]
    assert not unlike, f"{family}: {unlike[0]}: stored {committed[unlike[0]]}, loaded {named[unlike[0]]}"
    wanted, found = streamed_logits(FAMILIES[family], run_in(run_dir).tiers.nvme[0]), loaded_logits(model.eval())
    apart = (wanted - found).abs().max().item()
    assert same_bits(wanted, found), f"{family}: logits are up to {apart} apart"


def test_an_exported_folder_has_all_that_transformers_writes(run_file: RunFile, tmp_path: Path) -> None:
    """P1: the same tensors under the same names as `save_pretrained`, and its other files, for fused experts too."""
    run_dir = untrained(run_file, {"model.config": MODELS["mixtral"]})
    exported(run_dir, tmp_path / "ours")
    AutoModelForCausalLM.from_pretrained(tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    ours, theirs = stored(tmp_path / "ours"), stored(tmp_path / "theirs")
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    assert all(same_bits(ours[name], theirs[name]) for name in ours)
    missing = {p.name for p in (tmp_path / "theirs").iterdir()} - {p.name for p in (tmp_path / "ours").iterdir()}
    assert not missing, missing


def test_a_trained_model_is_exported_with_its_card_and_its_tokenizer(run_file: RunFile, tmp_path: Path) -> None:
    """CK-20: dtype field, card, tokenizer with the trained ids; the folder trains and evaluates again."""
    run_dir = trained(run_file, {"model.config": MODELS["llama"], "train.steps": 2, "optimizer.lr": 0.01})
    out = tmp_path / "model"
    exported(run_dir, out)
    config = json.loads((out / "config.json").read_text())
    assert (config["dtype"], config["architectures"]) == ("float32", ["LlamaForCausalLM"]), config
    assert config.get("use_cache", True) is True, config
    assert (out / "generation_config.json").is_file()
    loss = json.loads((run_dir / "log.jsonl").read_text().splitlines()[-1])["loss"]
    card = (out / "README.md").read_text()
    for words in ("2 of 2", "128 (4 sequences of 16 a step)", f"{loss:.4f}", "none: trained from scratch", "megatrain"):
        assert words in card, card
    assert str(tmp_path) not in card, card
    text = "line 3: naïve fox\n\t€"
    tokenizer = AutoTokenizer.from_pretrained(out)
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    again = {"model.config": ..., "model.path": str(out), "output.dir": str(tmp_path / "b"), "train.steps": 1}
    trained(run_file, {**again, "data.tokenizer": "bytes", "tiers.nvme": str(tmp_path / "b/nvme")})


def test_every_byte_has_its_own_token() -> None:
    """The byte tokenizer in the library's format: 256 ids, each for its byte."""
    tokenizer = byte_tokenizer()
    text = "".join(map(chr, range(0x20, 0x250))) + "\0\r\n日本"
    assert tokenizer.encode(text).ids == list(text.encode())
    assert tokenizer.get_vocab_size() == 256


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_all_tensors_and_the_config_have_the_asked_dtype(run_file: RunFile, tmp_path: Path, dtype: str) -> None:
    """CK-20, CK-03: rounded as `tensor.to` rounds; a tied head is in the file once, and tied after loading."""
    run_dir = untrained(run_file, {"model.config": MODELS["llama-tied"]})
    exported(run_dir, tmp_path / "model", dtype=dtype)
    wanted, tensors = getattr(torch, dtype), stored(tmp_path / "model")
    assert json.loads((tmp_path / "model/config.json").read_text())["dtype"] == dtype
    assert {tensor.dtype for tensor in tensors.values()} == {wanted}
    assert "lm_head.weight" not in tensors and "model.embed_tokens.weight" in tensors, sorted(tensors)
    for name, values in parameters(run_in(run_dir).tiers.nvme[0]).items():
        assert torch.equal(tensors[name].view(torch.uint8), values.to(wanted).view(torch.uint8)), name
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.dtype == wanted


def test_a_value_that_the_dtype_cannot_hold_is_refused_by_name(run_file: RunFile, tmp_path: Path) -> None:
    """Silent infinities would be a broken model; nothing is left behind."""
    run_dir = trained(run_file, {"model.config": MODELS["llama"], "train.steps": 1, "optimizer.lr": 1e6})
    with pytest.raises(UserError, match=r"holds .*float16 cannot.*--dtype bfloat16 or float32"):
        exported(run_dir, tmp_path / "out/model", dtype="float16")
    assert list((tmp_path / "out").iterdir()) == []


def test_shards_hold_all_tensors_once_and_the_index_names_them(run_file: RunFile, tmp_path: Path) -> None:
    """Files of at most the asked size, but for a tensor that is larger; from_pretrained reads them."""
    run_dir = untrained(run_file, {"model.config": MODELS["llama"]})
    files = exported(run_dir, tmp_path / "model", max_shard_bytes=20_000)
    index = json.loads((tmp_path / "model/model.safetensors.index.json").read_text())
    tensors = stored(tmp_path / "model")
    assert len(files) > 2 and {path.name for path in files} == set(index["weight_map"].values())
    assert index["weight_map"].keys() == tensors.keys() == parameters(run_in(run_dir).tiers.nvme[0]).keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in tensors.values())
    largest = max(t.nbytes for t in tensors.values())
    for path in files:
        with safe_open(path, framework="pt") as file:
            held = sum(tensors[name].nbytes for name in file.keys())  # noqa: SIM118
        assert held <= max(20_000, largest), f"{path.name}: {held} bytes"
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").num_parameters() > 0


def test_a_cut_keeps_the_order_and_the_size() -> None:
    """Exact fit, one byte more, larger than a file."""

    def entry(name: str, nbytes: int) -> Entry:
        return Entry(name=name, shape=(nbytes,), dtype=torch.uint8)

    sizes = {"a": 4, "b": 6, "c": 1, "d": 25, "e": 10}
    shards = [[e.name for e in shard] for shard in cut([entry(n, size) for n, size in sizes.items()], 10)]
    assert shards == [["a", "b"], ["c"], ["d"], ["e"]]


def test_the_library_reads_what_is_written_in_parts(tmp_path: Path) -> None:
    """Scalars, empty tensors, odd sizes, several dtypes: the format by its own reader."""
    values = {
        "s": torch.tensor(2.5),
        "e": torch.empty(0, 3),
        "h": torch.arange(7, dtype=torch.bfloat16),
        "i": torch.tensor([True, False]),
        "m": torch.randn(5, 3),
    }
    entries = [Entry(name=n, shape=tuple(v.shape), dtype=v.dtype) for n, v in values.items()]
    write_file(tmp_path / "x", entries, lambda entry: iter(values[entry.name].reshape(-1).split(2)))
    with safe_open(tmp_path / "x", framework="pt") as file:
        for name, value in values.items():
            assert torch.equal(file.get_tensor(name), value), name


def test_a_base_models_files_come_along(run_file: RunFile, tmp_path: Path) -> None:
    """Tokenizer, generation settings, licence and its name: what the base folder has."""
    base = tmp_path / "tiny-base"
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(model_config(MODELS["llama"])).save_pretrained(base)
    byte_tokenizer().save(str(base / "tokenizer.json"))
    (base / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "marked": 1}')
    (base / "chat_template.jinja").write_text("{{ messages }}")
    (base / "LICENSE").write_text("the licence")
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\nA base.\n")
    (base / "generation_config.json").write_text('{"temperature": 0.25, "do_sample": true}')
    run_dir = untrained(run_file, {"model.config": ..., "model.path": str(base), "data.tokenizer": str(base)})
    exported(run_dir, tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "LICENSE", "generation_config.json"):
        assert (tmp_path / "model" / name).read_bytes() == (base / name).read_bytes(), name
    card = (tmp_path / "model/README.md").read_text()
    assert "license: apache-2.0" in card and "`tiny-base`" in card and "see LICENSE" in card, card
    with pytest.raises(UserError, match="the model that the run started from"):
        exported(run_dir, base, force=True)


def test_an_existing_folder_is_kept_or_replaced_as_a_whole(run_file: RunFile, tmp_path: Path) -> None:
    """CK-18: refused without --force; with it the old content is gone; what is no model is never replaced."""
    run_dir = untrained(run_file, {"model.config": MODELS["llama"]})
    out = tmp_path / "model"
    out.mkdir()
    exported(run_dir, out)  # an empty folder is as good as none
    (out / "mine.txt").write_text("old")
    with pytest.raises(UserError, match="is not empty"):
        exported(run_dir, out)
    exported(run_dir, out, dtype="bfloat16", force=True)
    assert not (out / "mine.txt").exists()
    assert {tensor.dtype for tensor in stored(out).values()} == {torch.bfloat16}
    other = tmp_path / "photos"
    other.mkdir()
    (other / "a.jpg").write_text("x")
    for place, words in (
        (other, "neither a model folder nor a snapshot"),
        (other / "a.jpg", "is a file"),
        (run_dir, "holds the"),
    ):
        with pytest.raises(UserError, match=words):
            exported(run_dir, place, force=True)
    assert (other / "a.jpg").read_text() == "x"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_full_disk_is_told_before_anything_is_written(
    run_file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Free space is looked at first: the sum is in the message, and no folder was made."""
    run_dir = untrained(run_file, {"model.config": MODELS["llama"]})
    monkeypatch.setattr("megatrain.new_folder.free_bytes", lambda path: 1000)
    with pytest.raises(DiskFullError, match="1000 bytes are free"):
        exported(run_dir, tmp_path / "none/model")
    assert not (tmp_path / "none").exists()


def test_a_training_that_commits_meanwhile_spoils_the_export_and_says_so(
    run_file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I9, P3: the slots of a commit may be overwritten after the next one; then nothing is left behind."""
    changes = {"model.config": MODELS["llama"], "train.steps": 1}
    run_dir = trained(run_file, changes)
    read, seen = Committed.read, []

    def overtaken(self: Any, *args: Any) -> torch.Tensor:
        if not seen:
            seen.append(trained(run_file, {**changes, "train.steps": 2}, resume=True))
        return read(self, *args)

    monkeypatch.setattr(Committed, "read", overtaken)
    with pytest.raises(UserError, match="committed step 2 while step 1 was being read"):
        exported(run_dir, tmp_path / "out/model")
    assert list((tmp_path / "out").iterdir()) == []
    exported(run_dir, tmp_path / "out/model")  # nothing commits any more


def test_an_export_changes_nothing_of_the_run(run_file: RunFile, tmp_path: Path) -> None:
    """I9: beside a training that does not commit in between, and for the state on the drive."""
    run_dir = untrained(run_file, {"model.config": MODELS["gpt2"]})
    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in run_dir.rglob("*") if p.is_file()}
    exported(run_dir, tmp_path / "model")
    after = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in run_dir.rglob("*") if p.is_file()}
    assert before == after


def test_a_state_of_another_model_is_refused(run_file: RunFile, tmp_path: Path) -> None:
    """What lies at a tensor's place must be that tensor."""
    run_dir = untrained(run_file, {"model.config": MODELS["llama"]})
    text = (run_dir / "run.yaml").read_text()
    (run_dir / "run.yaml").write_text(text.replace("intermediate_size: 48", "intermediate_size: 40"))
    with pytest.raises(Exception, match=r"mlp\.gate_proj\.weight.*another model"):
        exported(run_dir, tmp_path / "model")


def test_memory_is_bounded_by_parts(run_file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P2: no read is larger than a part, also where tensors are, and off the page grid; the bits are the same."""
    run_dir = untrained(run_file, {"model.config": MODELS["llama"]})
    exported(run_dir, tmp_path / "whole")
    monkeypatch.setattr("megatrain.committed.PIECE_BYTES", 1000)
    sizes = []
    read = Committed.read

    def counted(self: Any, *args: Any) -> torch.Tensor:
        values = read(self, *args)
        sizes.append(values.nbytes)
        return values

    monkeypatch.setattr(Committed, "read", counted)
    exported(run_dir, tmp_path / "parts")
    assert max(sizes) <= 1000 < sum(sizes)
    name = "model.safetensors"
    assert (tmp_path / "parts" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


MEASURED = """
import resource, sys
from pathlib import Path
from rich.console import Console
from megatrain.export import export
from megatrain.snapshot import export_snapshot
peaks = []
for run in sys.argv[2:]:
    run, form = Path(run), sys.argv[1]
    if form == "zarr":
        export_snapshot(run, run / form, force=False, console=Console(quiet=True))
    else:
        export(run, run / form, dtype=form, max_shard_bytes=10**9, force=False, console=Console(quiet=True))
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
print(peaks[1] - peaks[0])
"""


@pytest.mark.slow
def test_an_export_takes_less_memory_than_one_large_tensor(run_file: RunFile, tmp_path: Path) -> None:
    """P2, CK-23: an embedding of 128 MiB leaves in parts, as float32, rounded, and with both moments.

    What it takes is the peak on top of that of a small model, which needs the same libraries.
    """
    sizes = {"small": {}, "large": {"vocab_size": 1 << 17, "hidden_size": 256}}
    for name, size in sizes.items():
        where = {"output.dir": str(tmp_path / name), "tiers.nvme": str(tmp_path / name / "nvme")}
        model = {"model.config": {**MODELS["llama-tied"], **size}, "tiers.host_memory": "320MiB"}
        untrained(run_file, {**model, **where})
    for form in ("float32", "bfloat16", "zarr"):
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, form, *(str(tmp_path / name) for name in sizes)],
            capture_output=True,
            text=True,
            cwd=Path(__file__).parent.parent,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        taken = int(done.stdout.split()[-1])
        assert taken < 112 << 20, f"{form}: {taken} bytes more than a small model, the tensor has {128 << 20}"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["export", "NOWHERE", "-o", "x"], "is not a run folder"),
        (["export", "NOWHERE"], "-o"),
        (["export", "NOWHERE", "-o", "x", "--dtype", "float8"], "float8"),
        (["export", "NOWHERE", "-o", "x", "--max-shard-size", "much"], "is not a size"),
        (["export", "NOWHERE", "-o", "x", "--format", "zarr", "--dtype", "float16"], "--dtype is for model folders"),
        (["eval", "NOWHERE", "--data", "x"], "neither a run folder"),
        (["eval", "NOWHERE"], "--data"),
        (["eval", "NOWHERE", "--data", "x", "--seq-len", "1"], "--seq-len"),
        (["import", "NOWHERE", "RUN"], "is not a snapshot"),
    ],
)
def test_wrong_input_is_one_line_and_exit_2(
    run_file: RunFile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    args: list[str],
    words: str,
) -> None:
    """CF-06: the three commands refuse as the others do, and write nothing."""
    names = {"NOWHERE": str(tmp_path / "nowhere"), "RUN": str(run_file())}
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(sys, "argv", ["megatrain", *(names.get(arg, arg) for arg in args)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    out, err = capsys.readouterr()
    assert (stopped.value.code, out) == (2, ""), err
    assert err.startswith("error: ") and words in err and err.count("\n") == 1, err
    assert sorted(tmp_path.rglob("*")) == before


def test_the_command_exports_and_says_where(
    run_file: RunFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`megatrain export RUN_DIR -o DIR --dtype bfloat16`, as typed."""
    run_dir = untrained(run_file, {"model.config": MODELS["llama"]})
    out = tmp_path / "model"
    monkeypatch.setattr(sys, "argv", ["megatrain", "export", str(run_dir), "-o", str(out), "--dtype", "bfloat16"])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    told = capsys.readouterr().out
    assert not stopped.value.code and f"{out}: step 0" in told and "one token a byte" in told, told
    assert stored(out)["lm_head.weight"].dtype == torch.bfloat16
