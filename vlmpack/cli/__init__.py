"""The command line: it wires, the library works."""

from vlmpack.cli.app import main

__all__ = ["main"]
