"""What a run needs of files and folders, looked for before anything heavy is imported.

Scope: `check_files`.
Not here: the sections of the run file (`config.py`), what data needs (`data/files.py`), the tier's folders (`fit.py`).
"""

import os

from megatrain.config import RunConfig
from megatrain.data.files import check_data_files
from megatrain.errors import UserError


def check_files(run: RunConfig) -> None:
    """Raises UserError for a model, data or tokenizer file that is missing, and for an output folder that is a file or
    cannot be written.
    """
    check_data_files(run.data, run.model.json_config()["model_type"])
    folder = run.output.dir
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir():
        raise UserError(f"output.dir: {folder}: {nearest} is a file, not a folder. Fix: another folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise UserError(f"output.dir: {folder}: no right to write in {nearest}. Fix: another folder")
