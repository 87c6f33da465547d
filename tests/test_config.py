"""The run file: what is accepted, what is refused and in which words; sizes as people type and read them."""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.config import RunConfig, dump_run, load_run
from megatrain.errors import UserError
from megatrain.faults import known_keys
from megatrain.preflight import check_files
from megatrain.sizes import format_rate, format_seconds, format_size, parse_size


def refusal(path: Path, *overrides: str) -> list[str]:
    """The lines of the error that loading gives."""
    with pytest.raises(UserError) as caught:
        load_run(path, overrides)
    return str(caught.value).splitlines()


def test_defaults_are_the_documented_ones(run_file: Any) -> None:
    """CF-04: what is not written has one value, and it is visible."""
    run = load_run(run_file({"train": {"steps": 4, "batch": 6}, "device": ...}))
    found = (
        run.train.micro_batch,
        run.train.max_grad_norm,
        run.train.seed,
        run.train.commit_every,
        run.optimizer.lr,
        run.optimizer.betas,
        run.optimizer.eps,
        run.optimizer.weight_decay,
        run.device,
        run.tiers.host_memory,
        run.tiers.device_memory,
        run.tiers.engine,
        run.tiers.resident,
        run.tiers.serial,
        run.data.kind,
    )
    assert found == (
        6,
        None,
        0,
        None,
        3e-4,
        (0.9, 0.999),
        1e-8,
        0.01,
        "auto",
        None,
        None,
        "auto",
        "auto",
        False,
        "text",
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train.max_grad_norm": 1.0, "tiers.host_memory": "160MiB", "tiers.resident": 0.25, "tiers.serial": True},
        {"tiers.nvme": ["/mnt/a/x", "/mnt/b/x"], "optimizer.betas": [0.8, 0.95], "optimizer.eps": 1e-6},
        {"model": {"path": "/models/llama"}, "device": "cuda", "tiers.device_memory": "1e9"},
        {"data.paths": ["/data/a $$ b.txt", "~/corpus/*.md"], "model.config.label": "1e5", "model.config.x": "yes"},
    ],
)
def test_dump_loads_to_an_equal_run(run_file: Any, tmp_path: Path, changes: dict[str, Any]) -> None:
    """A run file that is written down resolved says the same run (P3: a resume reads it)."""
    run = load_run(run_file(changes))
    again = tmp_path / "again.yaml"
    again.write_text(dump_run(run))
    assert load_run(again) == run, again.read_text()


@pytest.mark.parametrize(
    ("changes", "key", "hint"),
    [
        ({"train.tiers": {"nvme": "/x"}}, "train.tiers", "top level `tiers`"),
        ({"tiers.engin": "auto"}, "tiers.engin", "`tiers.engine`"),
        ({"trian": {"steps": 3}}, "trian", "top level `train`"),
        ({"train.lr": 1e-3}, "train.lr", "`optimizer.lr`"),
        ({"lr": 1e-3}, "lr", "`optimizer.lr`"),
        ({"train.host_memory": "1GiB"}, "train.host_memory", "`tiers.host_memory`"),
        ({"output.folder": "x"}, "output.folder", "knows output.dir"),
        ({"zzz": 1}, "zzz", "the top level knows model, data"),
    ],
)
def test_unknown_key_is_named_with_its_right_place(run_file: Any, changes: dict[str, Any], key: str, hint: str) -> None:
    """CF-01: a key that is unknown, misspelt or in the wrong section is never ignored."""
    path = run_file(changes)
    lines = refusal(path)
    assert len(lines) == 1 and f"unknown key `{key}`" in lines[0] and hint in lines[0] and str(path) in lines[0], lines


def test_section_in_the_wrong_place_is_one_fault(run_file: Any) -> None:
    """CF-01: the section nested too deep is not also reported as missing from the top level."""
    lines = refusal(run_file({"tiers": ..., "train.tiers": {"nvme": "/x"}}))
    assert len(lines) == 1 and "did you mean top level `tiers`?" in lines[0], lines


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("train.steps", 0, "must be >= 1"),
        ("train.batch", -4, "-4 is not allowed: must be >= 1"),
        ("train.batch", 0, "must be >= 1"),
        ("train.batch", 2.5, "fraction"),
        ("train.batch", True, "must be a number"),
        ("train.batch", "many", "must be a number"),
        ("train.micro_batch", 0, "must be >= 1"),
        ("train.max_grad_norm", 0, "must be > 0"),
        ("train.seed", -1, "must be >= 0"),
        ("train.commit_every", 0, "must be >= 1"),
        ("data.seq_len", 1, "must be >= 2"),
        ("data.kind", "images", "'text', 'chat' or 'tokens'"),
        ("data.paths", [], "must not be empty"),
        ("optimizer.lr", -1e-3, "must be >= 0"),
        ("optimizer.lr", float("nan"), "must be a finite number"),
        ("optimizer.lr", float("inf"), "must be a finite number"),
        ("optimizer.betas", 0.9, "must be a list"),
        ("optimizer.eps", -1, "must be >= 0"),
        ("device", "gpu", "'auto', 'cpu' or 'cuda'"),
        ("tiers.host_memory", "-1GiB", "negative"),
        ("tiers.host_memory", "lots", "256MiB"),
        ("tiers.host_memory", 0, "must be > 0"),
        ("tiers.engine", "uring", "'auto', 'posix' or 'kvikio'"),
        ("tiers.resident", 1.5, "between 0 and 1"),
        ("tiers.serial", "maybe", "boolean"),
        ("output.dir", "", "must be a path"),
        ("train", 3, "it is a section with the keys steps, batch"),
    ],
)
def test_value_out_of_range_is_one_line_with_its_key(run_file: Any, key: str, value: object, words: str) -> None:
    """CF-06: every value has a range, and the refusal names key, value and range in one line."""
    path = run_file({key: value})
    lines = refusal(path)
    assert len(lines) == 1 and lines[0].startswith(f"{key}: ") and words in lines[0], lines
    assert lines[0].endswith(f"({path})"), lines


def test_second_beta_out_of_range_is_named_by_position(run_file: Any) -> None:
    """CF-06: an item of a list is named by its place."""
    lines = refusal(run_file({"optimizer.betas": [0.9, 1.0]}))
    assert lines[0].startswith("optimizer.betas.1: 1.0 is not allowed: must be < 1"), lines


@pytest.mark.parametrize(
    "key", ["data.paths", "data.seq_len", "train.steps", "train.batch", "tiers.nvme", "output.dir"]
)
def test_missing_key_is_named_with_an_example(run_file: Any, key: str) -> None:
    """CF-02: nothing is placed by a hidden default; what is needed and missing is asked for with an example."""
    lines = refusal(run_file({key: ...}))
    assert len(lines) == 1 and lines[0].startswith(f"{key}: is required. Fix: add "), lines


def test_missing_section_is_reported_by_its_keys(run_file: Any) -> None:
    """CF-02: a missing section asks for the key, not just for itself."""
    lines = refusal(run_file({"tiers": ...}))
    assert len(lines) == 1 and lines[0].startswith("tiers.nvme: is required"), lines


def test_every_fault_is_listed_at_once(run_file: Any) -> None:
    """CF-05: one line a fault, all of them."""
    lines = refusal(run_file({"train.batch": -1, "device": "tpu", "foo": 1}))
    assert len(lines) == 3, lines


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"train.batch": 8, "train.micro_batch": 3}, "batch 8 is not a multiple of micro_batch 3"),
        ({"train.batch": 2, "train.micro_batch": 4}, "batch 2 is not a multiple of micro_batch 4"),
        ({"model.path": "/models/x"}, "both are set"),
        ({"model": {}}, "neither is set"),
        ({"model.config": {"vocab_size": 3}}, "has no `model_type`"),
        ({"tiers.nvme": ["/mnt/a", "/mnt/a/"]}, "listed twice"),
        ({"tiers.nvme": ["/mnt/a", "/mnt/b", "/mnt/a/b"]}, "/mnt/a/b lies in /mnt/a"),
        ({"tiers.nvme": [f"/mnt/{n}" for n in range(37)]}, "37 folders; at most 36"),
        ({"tiers.nvme": "/mnt/a", "output.dir": "/mnt/a/out"}, "lies in the NVMe tier"),
        ({"data.paths": "$NO_SUCH_VARIABLE/x"}, "environment variable NO_SUCH_VARIABLE is not set"),
        ({"data.paths": "~nobody-of-that-name/x"}, "no home folder"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(run_file: Any, changes: dict[str, Any], words: str) -> None:
    """CF-04: settings that exclude each other, or that would do nothing, are refused with both values."""
    lines = refusal(run_file(changes))
    assert len(lines) == 1 and words in lines[0], lines


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "train:\n  steps: 3\n  steps: 4\n",
            "line 3, column 3: not valid YAML: the key 'steps' is written twice, first in line 2",
        ),
        ("train: {steps: 3\n", "line 2, column 1"),
        ("train:\n\tsteps: 3\n", "spaces, not tabs"),
        ("- a\n- b\n", "mapping of sections"),
        ("just words", "mapping of sections"),
        ("", "empty"),
        ("a: !!python/object/apply:os.system [true]\n", "line 1, column 4"),
        ("a: 1\n---\nb: 2\n", "line 2"),
        ("[" * 5000, "not"),
    ],
)
def test_yaml_fault_names_line_and_column(tmp_path: Path, text: str, words: str) -> None:
    """CF-05: a fault of syntax is found by its place; a key written twice is one."""
    path = tmp_path / "run.yaml"
    path.write_text(text)
    message = "\n".join(refusal(path))
    assert message.startswith(str(path)) and words in message, message


@pytest.mark.parametrize(("content", "words"), [(None, "no such run file"), (b"\xff\xfe\x00", "UTF-8")])
def test_unreadable_run_file_is_one_line(tmp_path: Path, content: bytes | None, words: str) -> None:
    """CF-05: a missing or binary run file."""
    path = tmp_path / "run.yaml"
    if content is not None:
        path.write_bytes(content)
    lines = refusal(path)
    assert len(lines) == 1 and words in lines[0], lines
    assert "cannot be read" in refusal(tmp_path)[0]


def test_numbers_are_read_as_people_type_them(run_file: Any, tmp_path: Path) -> None:
    """YAML takes 1e-3 for text; inside the model's own configuration too it must be a number."""
    path = run_file()
    text = path.read_text().replace("steps: 4", "steps: 1e2")
    text = text.replace("vocab_size: 256", "vocab_size: 256\n    eps: 1e-5")
    path.write_text(text + "optimizer: {lr: 1e-3, weight_decay: '0.1'}\n")
    run = load_run(path)
    assert isinstance(run.model.config, dict)
    found = (run.train.steps, run.optimizer.lr, run.optimizer.weight_decay, run.model.config["eps"])
    assert found == (100, 1e-3, 0.1, 1e-5)


def test_overrides_win_over_the_file(run_file: Any) -> None:
    """`--set` values are YAML, reach into the inline model configuration and create sections."""
    run = load_run(
        run_file(),
        [
            "train.steps=7",
            "optimizer.betas=[0.5, 0.6]",
            "model.config.num_hidden_layers=3",
            "tiers.nvme=[/mnt/a/x, /mnt/b/x]",
            "train.max_grad_norm=1e-1",
        ],
    )
    assert isinstance(run.model.config, dict)
    found = (run.train.steps, run.optimizer.betas, run.model.config["num_hidden_layers"], run.train.max_grad_norm)
    assert found == (7, (0.5, 0.6), 3, 0.1)
    assert run.tiers.nvme == (Path("/mnt/a/x"), Path("/mnt/b/x"))


@pytest.mark.parametrize(
    ("item", "words"),
    [
        ("train.steps", "a.b=value"),
        ("=3", "a.b=value"),
        ("train..steps=3", "a.b=value"),
        ("train.stepz=3", "did you mean `train.steps`? (--set)"),
        ("train.steps.x=3", "`train.steps` is the value 4"),
        ("train.steps=[", "not valid YAML"),
        ("train.steps=-1", "must be >= 1 (--set)"),
    ],
)
def test_fault_of_an_override_is_blamed_on_it(run_file: Any, item: str, words: str) -> None:
    """CF-01: an override is held to the same rules, and the message does not blame the file."""
    lines = refusal(run_file(), item)
    assert len(lines) == 1 and words in lines[0], lines


def test_paths_expand_and_become_absolute(run_file: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run file may be read from another folder later: home, variables and relative paths are resolved once."""
    monkeypatch.setenv("CORPUS", "/big/corpus")
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.chdir(tmp_path)
    run = load_run(
        run_file(
            {
                "data.paths": ["$CORPUS/a", "${CORPUS}/*.txt", "~/b.txt", "c.txt", "$PYTHON_STDLIB/json"],
                "tiers.nvme": "./n",
                "output.dir": "~/out",
                "data.tokenizer": "./bytes",
            }
        )
    )
    assert run.data.paths == (
        "/big/corpus/a",
        "/big/corpus/*.txt",
        "/home/someone/b.txt",
        str(tmp_path / "c.txt"),
        str(Path(sysconfig.get_path("stdlib")) / "json"),
    )
    assert (run.tiers.nvme, run.output.dir) == ((tmp_path / "n",), Path("/home/someone/out"))
    assert run.data.tokenizer == tmp_path / "bytes"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data.paths": "/nowhere/x.txt"}, "data.paths: /nowhere/x.txt does not exist"),
        ({"data.paths": "/nowhere/*.txt"}, "holds no text file"),
        ({"data.paths": "/dev/zero"}, "not a regular file"),
        ({"model": {"path": "/nowhere"}}, "model.path: /nowhere is not a folder"),
        ({"model": {"config": "/nowhere/config.json"}}, "model.config: /nowhere/config.json cannot be read"),
        ({"data.tokenizer": "/nowhere"}, "data.tokenizer: /nowhere is not a file"),
        ({"output.dir": "/etc/passwd"}, "/etc/passwd is a file"),
        ({"output.dir": "/etc/passwd/run"}, "/etc/passwd is a file"),
    ],
)
def test_missing_files_are_refused_before_anything_heavy(run_file: Any, changes: dict[str, Any], words: str) -> None:
    """CF-05, IO-16: the files of a run are looked for before a model is built, and nothing is written."""
    run = load_run(run_file(changes))
    with pytest.raises(UserError) as caught:
        check_files(run)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"), [("{", "not JSON"), ("[1]", "no `model_type`"), ('{"a": 1}', "no `model_type`")]
)
def test_damaged_model_configuration_is_refused(run_file: Any, tmp_path: Path, content: str, words: str) -> None:
    """CF-05: a config.json that is none."""
    (tmp_path / "config.json").write_text(content)
    for changes in (
        {"model": {"config": str(tmp_path / "config.json")}},
        {"model": {"path": str(tmp_path)}, "data.tokenizer": "bytes"},
    ):
        with pytest.raises(UserError, match=words):
            check_files(load_run(run_file(changes)))


def test_model_folder_brings_its_tokenizer(run_file: Any, tmp_path: Path) -> None:
    """A trained model is read with the tokenizer beside it unless another one is named."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    run = load_run(run_file({"model": {"path": str(tmp_path)}, "data.tokenizer": ...}))
    assert run.data.tokenizer == tmp_path
    with pytest.raises(UserError, match=r"data\.tokenizer"):
        check_files(run)
    (tmp_path / "tokenizer.json").write_text("{}")
    check_files(run)
    assert run.data.tokenizer_file == tmp_path / "tokenizer.json"


def test_numerics_change_with_the_numbers_only(run_file: Any, tmp_path: Path) -> None:
    """P1, CK-17, CK-21: where state lives, how long and where files lie do not decide a number; the rest does."""
    base = load_run(run_file()).numerics()
    assert json.loads(json.dumps(base)) == base
    same = [
        {"train.steps": 9},
        {"train.commit_every": 1},
        {"train.keep": 3, "train.keep_every": 100},
        {"tiers.nvme": "/mnt/y"},
        {"output.dir": "/mnt/z"},
        {"tiers.host_memory": "1GiB"},
        {"tiers.serial": True},
        {"tiers.resident": 0.5},
        {"tiers.engine": "posix"},
    ]
    other = [
        {"train.batch": 8},
        {"train.micro_batch": 1},
        {"train.seed": 1},
        {"train.max_grad_norm": 1.0},
        {"train.compile": True},
        {"optimizer.lr": 1e-3},
        {"optimizer.betas": [0.9, 0.95]},
        {"optimizer.eps": 1e-6},
        {"optimizer.warmup_steps": 1},
        {"optimizer.schedule": "linear"},
        {"data.seq_len": 8},
        {"optimizer.weight_decay": 0},
        {"model.config.num_hidden_layers": 3},
    ]
    for changes in same:
        assert load_run(run_file(changes)).numerics() == base, changes
    for changes in other:
        assert load_run(run_file(changes)).numerics() != base, changes
    (tmp_path / "config.json").write_text(json.dumps(base["model"]["config"]))
    from_file = load_run(run_file({"model": {"config": str(tmp_path / "config.json")}})).numerics()
    assert from_file == base


def test_reading_a_run_file_imports_nothing_heavy() -> None:
    """IO-16, EN-06: a refusal comes within a second, and without torch being importable."""
    code = (
        "import sys, megatrain.cli; "
        "print([m for m in ('torch', 'transformers', 'zarr', 'tokenizers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", done.stdout


def test_run_is_frozen(run_file: Any) -> None:
    """A run does not change after it was accepted."""
    run = load_run(run_file())
    with pytest.raises(ValueError, match="frozen"):
        run.train.steps = 5  # type: ignore[misc]


def test_demo_run_file_is_valid() -> None:
    """The run file of `make demo` loads, and the files it names exist."""
    check_files(load_run(Path(__file__).parent.parent / "tools" / "demo.yaml"))


def test_known_keys_are_the_documented_ones() -> None:
    """The names of the run file are a promise to everyone who has written one."""
    sections = {
        "model": "config path freeze resize_vocabulary pad_to_multiple_of",
        "data": "kind paths datasets split dtype tokenizer chat_template train_on seq_len packing validation "
        "validation_max",
        "train": "steps batch micro_batch loss_chunk compile max_grad_norm precision seed commit_every eval_every keep "
        "keep_every update_on",
        "optimizer": "lr betas eps weight_decay no_decay schedule warmup_steps schedule_steps min_lr",
        "device": "",
        "tiers": "host_memory device_memory nvme engine direct_reads resident late_updates serial hardware",
        "output": "dir",
    }
    wanted = [key for name, keys in sections.items() for key in (name, *(f"{name}.{k}" for k in keys.split()))]
    assert sorted(known_keys(RunConfig)) == sorted(wanted)


@pytest.mark.parametrize(
    ("typed", "nbytes"),
    [
        ("256MiB", 256 << 20),
        ("0.5GiB", 1 << 29),
        ("1e8", 10**8),
        ("10 GB", 10**10),
        ("1.5e3 kb", 1_500_000),
        ("32G", 32 * 10**9),
        (" 1_000 B ", 1000),
        (5, 5),
        (1e8, 10**8),
        (0, 0),
        (".5KiB", 512),
        ("2tib", 2 << 40),
    ],
)
def test_sizes_are_read_as_people_type_them(typed: object, nbytes: int) -> None:
    """A bare letter is decimal: the smaller reading never takes more than was meant (P2)."""
    assert parse_size(typed) == nbytes


@pytest.mark.parametrize(
    "typed",
    [
        "-1",
        -1,
        "-0.5",
        float("nan"),
        float("inf"),
        "nan",
        "",
        "12x",
        "GiB",
        True,
        None,
        [1],
        "1e999",
        "1 2",
        "1GiB2",
        "0x10",
    ],
)
def test_what_is_no_size_is_refused_with_an_example(typed: object) -> None:
    """CF-06: negative, infinite or meaningless sizes."""
    with pytest.raises(ValueError, match="256MiB"):
        parse_size(typed)


@given(st.integers(min_value=0, max_value=2**62))
def test_a_size_in_bytes_is_kept_to_the_byte(nbytes: int) -> None:
    """P2: budgets are exact."""
    assert (parse_size(nbytes), parse_size(str(nbytes)), parse_size(f"{nbytes} B")) == (nbytes,) * 3


@given(st.integers(min_value=0, max_value=2**60))
def test_a_printed_size_is_within_rounding(nbytes: int) -> None:
    """What is printed can be typed, and is right to the digits shown."""
    shown = format_size(nbytes)
    unit_bytes = 1024 ** "BKMGT".index(shown.split()[1][0])
    assert abs(parse_size(shown) - nbytes) <= 1 + 0.005 * unit_bytes, (shown, nbytes)


def test_times_and_rates_are_readable() -> None:
    """The forms that reports use."""
    found = [format_seconds(s) for s in (2e-5, 0.0123, 4.2, 185, 7620, 273600, float("inf"))]
    assert found == ["20 us", "12.3 ms", "4.20 s", "3 min 05 s", "2 h 07 min", "3 d 04 h", "unknown"]
    assert [format_rate(r) for r in (12, 1.8e9, 2.5e12)] == ["12 B/s", "1.80 GB/s", "2.50 TB/s"]
    sizes = [format_size(n) for n in (0, 512, 1536, 1610612736, -2048)]
    assert sizes == ["0 B", "512 B", "1.50 KiB", "1.50 GiB", "-2.00 KiB"]
