"""A run's plan for a person: `sections` as rows of text, for the terminal and for the page;
`pictures`; `page`, one HTML file with both; `as_json`, every figure."""

from vlmpack.report.plan.as_json import as_json
from vlmpack.report.plan.page import write_page
from vlmpack.report.plan.section import Column, Section
from vlmpack.report.plan.sections import sections

__all__ = ["Column", "Section", "as_json", "sections", "write_page"]
