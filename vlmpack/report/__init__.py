"""Pictures and one page about a finished run, made from the files of its folder alone."""

from vlmpack.report.write import write_report

__all__ = ["write_report"]
