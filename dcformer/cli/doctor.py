"""`dcformer doctor`."""

from __future__ import annotations

import typer


def doctor() -> None:
    """Show compiler, processor, devices, and which backend is taken and why."""
    from dcformer.doctor import report

    for what, how in report():
        typer.echo(f"{what}: {how}")
