"""Entry point of the command ``dsafx``: says what to install where its library is missing."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line; exits and says what to install where typer is missing."""
    try:
        from ._commands import app
    except ModuleNotFoundError as error:
        if error.name != "typer":
            raise
        sys.exit("the dsafx command needs typer: pip install 'dsafx[cli]'")
    app(prog_name="dsafx")
