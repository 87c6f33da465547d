"""The `megatrain` command, also as `python -m megatrain`.

Scope: what happens before the commands are even loaded. Not here: the commands (`megatrain/cli.py`).
"""

from megatrain.heap import start_again


def main() -> None:
    """Entry point of the script: runs the command of `sys.argv` and exits."""
    start_again()
    from megatrain.cli import main as run_command

    run_command()


if __name__ == "__main__":
    main()
