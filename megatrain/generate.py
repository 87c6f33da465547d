"""Text from a trained run, streamed through the tiers like training.

Scope: one forward a token, drawing the next token.
Not here: opening the committed weights (`committed.py`), the forward (`stream.py`). There is no key-value cache: each
token costs a forward over all before it.
"""

from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer

from megatrain.accelerator import forwards_note
from megatrain.committed import LOOK_S, CommitWatch, at_step, forward_tiers, run_of
from megatrain.config import RunConfig
from megatrain.errors import UserError
from megatrain.run_model import run_units
from megatrain.stream import StreamedModel


def generate(
    run_dir: Path,
    prompt: str,
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    step: int | None = None,
    console: Console,
) -> str:
    """The prompt and what the model of a commit goes on with; step: None for the last commit.

    Raises UserError or a TieringError.
    """
    run = at_step(run_of(run_dir), step)
    units = run_units(run.model)
    tokens = encode(run, prompt)
    if not tokens:
        raise UserError("--prompt is empty; at least one token is needed to go on from")
    longest = getattr(units.model.config.get_text_config(), "max_position_embeddings", None)
    units.model.eval()
    generator = torch.Generator().manual_seed(seed)
    watch = CommitWatch(run)
    if note := forwards_note(run):
        console.print(note, highlight=False)
    with forward_tiers(run, units, watch) as manager, Progress(console=console, transient=True) as progress:
        model = StreamedModel(units, manager.op, lambda unit, gradients: None)
        for number in progress.track(range(max_new_tokens), description="tokens"):
            manager.begin("forward", last=number + 1 == max_new_tokens)
            window = tokens if longest is None else tokens[-longest:]
            logits = model.logits(torch.tensor([window]))[0]
            tokens.append(_draw(logits, temperature, generator))
            watch.check(every_s=LOOK_S)
        model.close()
    return decode(run, tokens)


def _draw(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> int:
    """The next token id; temperature 0 takes the likeliest."""
    if temperature == 0:
        return int(logits.argmax())
    return int(torch.multinomial(torch.softmax(logits / temperature, dim=-1), 1, generator=generator))


def encode(run: RunConfig, text: str) -> list[int]:
    """Token ids of a text, with the run's tokenizer."""
    file = run.data.tokenizer_file
    return list(text.encode()) if file is None else list(Tokenizer.from_file(str(file)).encode(text).ids)


def decode(run: RunConfig, tokens: list[int]) -> str:
    """The text of token ids, with the run's tokenizer."""
    file = run.data.tokenizer_file
    if file is None:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")
    return str(Tokenizer.from_file(str(file)).decode(tokens))
