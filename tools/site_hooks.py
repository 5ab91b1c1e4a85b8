"""What `make docs` does beyond mkdocs: pages link to files of the repository, which go along.

A page writes `../recipes/digits-demo.yaml`, as a reader of the clone follows it. The site has such
files below `source/`, so that `--strict` checks these links like all others.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()((?:\.\./)+[^)#\s]+)((?:#[^)]*)?\))")


def outside(page: str, target: str) -> str | None:
    """The path from the repository's root that a link leads to, where it is none of docs/."""
    path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(page), target))
    return None if path.startswith("docs/") else path


def on_files(files: Any, config: Any) -> Any:
    """Add each file outside of docs/ that a page links to."""
    from mkdocs.structure.files import File  # type: ignore[import-not-found]

    wanted = {
        path
        for page in files.documentation_pages()
        for _, target, _ in LINK.findall(page.content_string)
        if (path := outside(page.src_uri, target)) is not None
    }
    for path in sorted(wanted):
        if (ROOT / path).is_file():
            name = (
                f"source/{path}.txt" if path.endswith((".md", ".yaml", ".py")) else f"source/{path}"
            )
            files.append(File.generated(config, name, content=(ROOT / path).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Lead such links to the files that go along; a folder is text alone."""
    up = "../" * page.file.src_uri.count("/")

    def lead(found: re.Match[str]) -> str:
        path = outside(page.file.src_uri, found[2])
        if path is None:
            return found[0]
        end = ".txt" if path.endswith((".md", ".yaml", ".py")) else ""
        return f"{found[1]}{up}source/{path}{end})"

    return LINK.sub(lead, markdown)
