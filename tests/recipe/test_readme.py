"""What the README quotes is what the repository holds."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_readme_quotes_the_whole_demo_recipe():
    recipe = (ROOT / "recipes" / "digits-demo.yaml").read_text()
    body = recipe[recipe.index("model:") :]
    assert body.rstrip() in (ROOT / "README.md").read_text()


def test_every_path_that_the_readme_links_to_exists():
    import re

    targets = re.findall(r"\]\(([^)#]+)\)", (ROOT / "README.md").read_text())
    assert len(targets) > 3
    missing = [name for name in targets if "://" not in name and not (ROOT / name).exists()]
    assert missing == []
