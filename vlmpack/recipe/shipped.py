"""The recipes that come with vlmpack: `vlmpack recipe new NAME` writes one into a folder."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path

from vlmpack.addresses import is_remote
from vlmpack.errors import VlmpackError
from vlmpack.recipe.load import load_recipe
from vlmpack.recipe.problems import key_name
from vlmpack.whole_file import regular_bytes, regular_text

_PACKAGE = Path(__file__).parents[1]


def shipped_recipes() -> Mapping[str, Path]:
    """Every shipped recipe by its name: a wheel has them inside the package, a clone beside it."""
    inside, in_clone = _PACKAGE / "recipes", _PACKAGE.parent / "recipes"
    files = (inside if inside.is_dir() else in_clone).glob("*.yaml")
    return dict(sorted((path.stem, path) for path in files))


def title(recipe: Path) -> str:
    """The first sentence of the comment that a shipped recipe begins with."""
    lines = regular_text(recipe).partition("\n#\n")[0].splitlines()
    return " ".join(line.removeprefix("# ") for line in lines).partition(". ")[0].rstrip(".")


def write_recipe(name: str, path: Path) -> Path:
    """Write the shipped recipe `name` to a file, or into a folder as NAME.yaml.

    Raises:
        VlmpackError: there is no such recipe, or a file of that name is there already.
    """
    recipes = shipped_recipes()
    if name not in recipes:
        close = difflib.get_close_matches(name.removesuffix(".yaml"), recipes, n=1)
        advice = f"did you mean {close[0]!r}?" if close else f"there are: {', '.join(recipes)}"
        raise VlmpackError(f"no recipe named {name!r} is shipped; {advice}")
    if path.is_dir():
        path = path / f"{name}.yaml"
    try:
        with path.open("xb") as stream:
            stream.write(regular_bytes(recipes[name]))
    except FileExistsError:
        raise VlmpackError(f"{path} is there already; move it away, or write elsewhere") from None
    except OSError as error:
        raise VlmpackError(f"{path} cannot be written: {error.strerror or error}") from error
    return path


def missing_paths(recipe: Path) -> list[str]:
    """What a recipe reads and the working folder does not have, each with its key."""
    loaded = load_recipe(recipe)
    read = [(("model", "path"), loaded.model.path, Path(loaded.model.path))]
    for split, sources in loaded.data.splits().items():
        for source in sources:
            if not is_remote(source.path):
                read.append((("data", split), source.path, Path(source.path).parent))
    return [f"{path} ({key_name(key)})" for key, path, folder in read if not folder.is_dir()]
