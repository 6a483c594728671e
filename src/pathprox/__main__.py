"""The command line, for `pathprox` and `python -m pathprox`."""

from __future__ import annotations

import sys


def main() -> None:
    try:
        from pathprox.cli import app
    except ModuleNotFoundError as error:
        if error.name in ("typer", "rich"):
            sys.exit(f"the command line needs {error.name}: pip install 'pathprox[experiments]'")
        raise
    app()


if __name__ == "__main__":
    main()
