"""A run's plan for a person: `sections` as rows of text, for the terminal and for the page;
`pictures`; `page`, one HTML file with both; `as_json`, every figure."""

from vlmpack.report.forecast.as_json import as_json
from vlmpack.report.forecast.page import write_page
from vlmpack.report.forecast.section import Column, Section
from vlmpack.report.forecast.sections import sections

__all__ = ["Column", "Section", "as_json", "sections", "write_page"]
