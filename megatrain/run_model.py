"""The model of a run, cut into units as the run trains it.

Scope: config, frozen parameters and the buffers of a model folder, together; where first weights are read from.
Not here: each of them (`model.py`, `checkpoint.py`), the plan (`prepare.py`).
"""

from megatrain.checkpoint import Checkpoint
from megatrain.config import ModelConfig
from megatrain.model import Units, build, find_units, model_config
from megatrain.model_folder import read_config


def build_units(model: ModelConfig) -> Units:
    """Units without weights; buffers as the model's own constructors compute them."""
    return find_units(build(model_config(model.json_config())), model.freeze)


def open_checkpoint(model: ModelConfig, units: Units) -> Checkpoint | None:
    """The folder that the first weights are in, if they are in one; loads its buffers into the model."""
    if model.path is None:
        return None
    if model.rows is None:
        return Checkpoint(model.path, units)
    stored = model_config(read_config("model.path", model.path)).get_text_config().vocab_size
    return Checkpoint(model.path, units, stored_rows=stored)


def run_units(model: ModelConfig) -> Units:
    """Units of a run that has begun: weights are in its state, buffers where they came from."""
    units = build_units(model)
    open_checkpoint(model, units)
    return units
