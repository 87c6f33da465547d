"""What a person reads when a run has ended: a sample, where everything is, what to do next.

Scope: `goodbye`, `command_name`. Not here: the run itself (`trainer.py`), how tokens are drawn (`generate.py`).
"""

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from megatrain.config import RUN_FILE, RunConfig
from megatrain.data import StepBatches
from megatrain.generate import decode, generate
from megatrain.prepare import Prepared
from tiering.drives import root_first

PROMPT_LENGTH = 24
SAMPLE_TOKENS = 96
SAMPLE_MOST_S = 15.0
"""A sample that would take longer than this is left to the user."""


def goodbye(prepared: Prepared, batches: StepBatches, console: Console) -> None:
    """A sample of what the model has learned, where everything is, and what to do next."""
    run = prepared.run
    folder = run.output.dir
    prompt = _prompt(run, batches)
    weights, hardware = sum(unit.nbytes for unit in prepared.units.stored), prepared.hardware
    # Each token reads every weight and computes with it for all tokens before (2 flops a weight of 4 bytes).
    length = PROMPT_LENGTH + SAMPLE_TOKENS / 2
    token_s = weights / hardware.read.per_s + weights / 2 * length / prepared.cpu.per_s
    if SAMPLE_TOKENS * token_s < SAMPLE_MOST_S:
        options: dict[str, Any] = {"max_new_tokens": SAMPLE_TOKENS, "temperature": 0.8, "seed": run.train.seed}
        text = generate(folder, prompt, **options, console=console)
        console.print("A sample (the prompt is from the data):", style="bold")
        console.print(text, markup=False, highlight=False)
    longer = f"train {folder / RUN_FILE} --resume --set train.steps={run.train.steps * 2}\n      {command_name()} "
    decays = run.optimizer.schedule_steps is not None  # then more steps would learn nothing
    console.print(
        f"Run folder: {folder} (log, plan, run file); state: {root_first(run.tiers.nvme)[0]} (a Zarr v3 hierarchy)\n"
        f"Next: {command_name()} {'' if decays else longer}generate {folder} --prompt {shlex.quote(prompt)}\n"
        f"      {command_name()} verify {folder / RUN_FILE} --steps 2",
        highlight=False,
        soft_wrap=True,
    )


def _prompt(run: RunConfig, batches: StepBatches) -> str:
    """The start of a line of the data. A window may begin anywhere: its first line is cut, unless there is no other."""
    texts = [decode(run, row.tolist()) for row in batches.batch_at(0).input_ids]
    whole = (line for text in texts for line in text.splitlines()[1:] if len(line.split()) > 1)
    return next(whole, texts[0])[:PROMPT_LENGTH]


def command_name() -> str:
    """What a person types to call this program from where it was called."""
    if shutil.which("megatrain"):
        return "megatrain"
    beside = Path(sys.executable).parent / "megatrain"
    return os.path.relpath(beside) if beside.is_file() else f"{sys.executable} -m megatrain"
