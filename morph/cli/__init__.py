"""The `morph` command; `app` has the command table, every other module one command."""

from morph.cli.app import main

__all__ = ["main"]
