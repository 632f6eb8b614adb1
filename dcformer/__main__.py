"""Entry point of the command line, `dcformer` or `python -m dcformer`. Names the extra to install where one is missing."""

from __future__ import annotations

import sys

_EXTRA = dict.fromkeys(("accelerate", "datasets", "matplotlib", "rich", "tokenizers", "transformers", "typer"), "train")
_EXTRA |= {"orbax": "maxtext", "lm_eval": "eval", "fastapi": "serve", "openai": "serve", "uvicorn": "serve"}


def main() -> None:
    """Runs the command line on `sys.argv`.

    Raises:
        SystemExit: always; 0 when all went well, 1 for an error, 2 for wrong usage.
    """
    try:
        from dcformer.cli import run

        run()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA:
            raise
        sys.exit(f"dcformer: the command line needs {package}: pip install 'dcformer[{_EXTRA[package]}]'")


if __name__ == "__main__":
    main()
