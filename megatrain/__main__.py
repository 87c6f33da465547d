"""`python -m megatrain`: the same as the `megatrain` command.

Scope: the call of `main`. Not here: the commands (`megatrain/cli.py`).
"""

from megatrain.cli import main

if __name__ == "__main__":
    main()
