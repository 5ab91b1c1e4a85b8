"""Images of a folder that changes while it is read: no link leads out of the root."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlmpack.data.files.images import ImageRoot
from vlmpack.errors import DataError

NAMES = ("a/b/0.png", "a/b/1.png", "a/2.png")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for place, data in (("images", b"inside"), ("outside", b"secret")):
        for name in NAMES:
            (tmp_path / place / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / place / name).write_bytes(data)
    return tmp_path / "images"


def swap(place: Path, target: Path) -> None:
    """A link comes where a file or a folder was."""
    place.rename(place.with_name(f"{place.name}-before"))
    place.symlink_to(target)


@pytest.mark.parametrize("part", ["a", "a/b", "a/b/0.png"])
def test_a_link_that_comes_later_leads_nowhere_outside(root: Path, part: str) -> None:
    images = ImageRoot(str(root))
    assert [images.load(name).data for name in NAMES] == [b"inside"] * 3
    swap(root / part, root.parent / "outside" / part)
    for name in NAMES:
        if name.startswith(part):
            with pytest.raises(DataError, match="lies outside the image root"):
                images.load(name)
        else:
            assert images.load(name).data == b"inside"


def test_a_link_to_another_folder_of_the_root_is_followed(root: Path) -> None:
    images = ImageRoot(str(root))
    assert images.load("a/b/0.png").data == b"inside"
    swap(root / "a" / "b", root / "a" / "b-before")
    (root / "a" / "b-before" / "0.png").write_bytes(b"moved")
    assert images.load("a/b/0.png").data == b"moved"


@pytest.mark.parametrize("part", ["", "a", "a/b", "a/b/0.png"])
def test_a_link_that_comes_between_the_look_and_the_opening_is_not_followed(
    root: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The look alone would take it: what it found has no link, and by then there is one."""
    true_path = ImageRoot._true_path

    def raced(self: ImageRoot, name: str) -> str:
        found = true_path(self, name)
        if not (root / part).is_symlink():
            swap(root / part, root.parent / "outside" / part)
        return found

    monkeypatch.setattr(ImageRoot, "_true_path", raced)
    images = ImageRoot(str(root))
    if part:
        with pytest.raises(DataError, match="lies outside the image root"):
            images.load("a/b/0.png")
    else:  # the root itself is where the user's name leads
        assert images.load("a/b/0.png").data == b"secret"
    assert (root / part).is_symlink(), "vacuous"


def test_no_descriptor_stays_open(root: Path) -> None:
    images = ImageRoot(str(root))
    before = sum(1 for _ in Path("/proc/self/fd").iterdir())
    for _ in range(3):
        images.load("a/b/0.png")
        for name in ("a/none.png", "none/0.png", "a/b/0.png/inside", "a", "../outside/a/2.png"):
            with pytest.raises(DataError):
                images.load(name)
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) == before


def test_an_image_that_is_a_url_is_named_without_its_secret(root: Path) -> None:
    for images in (ImageRoot(str(root)), ImageRoot("s3://bucket/images")):
        with pytest.raises(DataError, match=r"'https://host/token=\*\*\*/x\.png") as caught:
            images.load("https://host/token=canary/x.png?sig=canary")
        assert "canary" not in str(caught.value)
