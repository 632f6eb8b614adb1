"""The command line, one file a family of commands. Heavy imports wait until a command runs, so that `dcformer --help` is quick.

What a user did wrong ends in one line on stderr, with exit code 2 for wrong usage and 1 for the rest. Other errors keep their
traceback.
"""

from __future__ import annotations

import sys
from typing import cast

import typer

from dcformer.cli.convert import convert
from dcformer.cli.doctor import doctor
from dcformer.cli.evaluation import evaluate
from dcformer.cli.insight import analyze, explain
from dcformer.cli.serving import PASSED_ON, serve
from dcformer.cli.studies import study
from dcformer.cli.training import compare, train
from dcformer.cli.using import chat, generate

app = typer.Typer(
    help="Transformers whose attention heads are dynamically composed (DCFormer, arXiv 2405.08553).",
    pretty_exceptions_enable=False,
    add_completion=False,
)
for _command in (train, compare, generate, chat, evaluate, analyze, explain, convert, doctor):
    app.command()(_command)
app.command(context_settings=PASSED_ON)(serve)
app.add_typer(study, name="study")

# The base of all usage errors, which typer does not name: it has its own copy of click's classes, or click's, by version.
UsageError = cast("type[typer.BadParameter]", typer.BadParameter.__base__)


def run(arguments: list[str] | None = None) -> None:
    """Runs the command line.

    Args:
        arguments: without the program's name; those of the process by default.

    Raises:
        SystemExit: always; 0 when all went well, 1 for an error, 2 for wrong usage.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        code = app(arguments or ["--help"], prog_name="dcformer", standalone_mode=False)
    except UsageError as error:
        code = _complain(error.format_message(), 2)
    except (OSError, ValueError, FloatingPointError) as error:
        if not isinstance(error, OSError) and not _raised_by_us(error):
            raise
        code = _complain(str(error), 1)
    sys.exit(code)


def _complain(message: str, code: int) -> int:
    print("dcformer: " + " ".join(message.split()), file=sys.stderr)
    return code


def _raised_by_us(error: BaseException) -> bool:
    """Whether the error is one that this package raised about its input, not an accident in a library below it."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and str(frame.tb_frame.f_globals.get("__name__")).startswith("dcformer.")
