"""Text from a trained run, streamed through the tiers like training.

Scope: opening the committed weights, one forward a token, drawing the next token.
Not here: the forward (`stream.py`). There is no key-value cache: each token costs a forward over all before it.
"""

from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress
from tokenizers import Tokenizer

from megatrain.config import RUN_FILE, RunConfig, load_run
from megatrain.errors import UserError
from megatrain.prepare import forward_plan
from megatrain.run_model import run_units
from megatrain.stream import StreamedModel
from tiering.choose import choose_engine
from tiering.drives import has_state, root_first
from tiering.errors import TieringError
from tiering.manager import Manager
from tiering.plan import Plan
from tiering.schedule import Action
from tiering.store import BlockStore


def generate(
    run_dir: Path, prompt: str, *, max_new_tokens: int, temperature: float, seed: int, console: Console
) -> str:
    """The prompt and what the model of the last commit goes on with. Raises UserError or a TieringError."""
    if not (run_dir / RUN_FILE).is_file():
        raise UserError(f"{run_dir} is not a run folder: it has no {RUN_FILE}. Fix: give the output.dir of a run")
    run = load_run(run_dir / RUN_FILE)
    if not has_state(root_first(run.tiers.nvme)[0]):
        folders = ", ".join(map(str, run.tiers.nvme))
        raise UserError(f"{folders}: no state of this run. Fix: train it, or bring the folder back")
    units = run_units(run.model)
    tokens = encode(run, prompt)
    if not tokens:
        raise UserError("--prompt is empty; at least one token is needed to go on from")
    longest = getattr(units.model.config.get_text_config(), "max_position_embeddings", None)
    units.model.eval()
    generator = torch.Generator().manual_seed(seed)
    plan = forward_plan(run, units)
    with _opened(run, plan) as manager, Progress(console=console, transient=True) as progress:
        model = StreamedModel(units, manager.op, lambda unit, gradients: None)
        for number in progress.track(range(max_new_tokens), description="tokens"):
            manager.begin("forward", last=number + 1 == max_new_tokens)
            window = tokens if longest is None else tokens[-longest:]
            logits = model.logits(torch.tensor([window]))[0]
            tokens.append(_draw(logits, temperature, generator))
        manager.pipeline.drain()
        model.close()
    return decode(run, tokens)


def _opened(run: RunConfig, plan: Plan) -> Manager:
    """The tiers for reading only: training may go on elsewhere."""
    root, *others = root_first(run.tiers.nvme)
    store = BlockStore.open(root, others=others, read_only=True)
    engine, _ = choose_engine(run.tiers.engine, store.root)
    manager = Manager(plan, store, engine, _no_update, serial=False)
    manager.load()
    return manager


def _no_update(action: Action, views: object, context: object) -> None:
    raise TieringError(f"{action.name}: a forward updates nothing")


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
