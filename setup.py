"""The one thing that pyproject.toml cannot say: the wheel carries recipes/ as vlmpack/recipes."""

from __future__ import annotations

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    """Copies the recipes beside the modules; an editable install finds them in the clone."""

    def run(self) -> None:
        """See setuptools."""
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib) / "vlmpack" / "recipes"
            folder.mkdir(parents=True, exist_ok=True)
            for recipe in Path("recipes").glob("*.yaml"):
                shutil.copy(recipe, folder)


setup(cmdclass={"build_py": BuildWithRecipes})
