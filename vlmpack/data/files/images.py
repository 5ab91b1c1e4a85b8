"""Images that records name: inside one root, on a disk or in a store, within the limits.

A path starts at the root and must end inside it after its links are followed. In the Hub's cache,
whose data set folders hold links, it must end in the blobs. The index keeps a checksum of each
sample with its images, and training compares it.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from vlmpack.addresses import is_remote, redacted
from vlmpack.data.columns.chat import ImageSource
from vlmpack.data.shards.naming import SampleCaps
from vlmpack.errors import DataError, integrity_error, refuse_full_table
from vlmpack.storage.fetch import Fetcher, LocalFetcher, ShardStamp, at_once

IMAGES_AT_ONCE = 16
"""Images of a store that are asked for at the same time."""
IN_RECORD = "in the record"
MAX_FOLDERS = 4096
"""Folders whose true place is remembered."""

_FOLDER = os.O_DIRECTORY | os.O_NOFOLLOW | getattr(os, "O_PATH", 0)
"""How a folder on the way to a file is opened. O_PATH needs no right to list it."""
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
_KNOB = (
    "data.image_root of a recipe, or --images DIR of a command that has it, names the folder that "
    "image paths start at"
)


@dataclass(frozen=True, slots=True)
class LoadedImage:
    """One image file.

    Args:
        stamp: where it lies in a store, and its version there.
    """

    data: bytes
    path: str | None = None
    stamp: ShardStamp | None = None

    @property
    def name(self) -> str:
        """Its name in messages."""
        return IN_RECORD if self.path is None else self.path


@dataclass(frozen=True, slots=True)
class ImageRoot:
    """Where images may be read."""

    root: str
    caps: SampleCaps = field(default_factory=SampleCaps)
    fetcher: Fetcher = field(default_factory=LocalFetcher)
    noun: str = "image"
    _folders: dict[str, str] = field(default_factory=dict, repr=False, compare=False)

    def load_all(
        self, sources: Sequence[ImageSource], stamps: Sequence[ShardStamp] = ()
    ) -> list[LoadedImage]:
        """The images of a record, in order. Images in a store are requested together.

        Args:
            stamps: where those that are files of a store lie, in order, if that is known.

        Raises:
            DataError: class `integrity` for a path outside the root or a file that cannot be read,
                `transport` for one of a store.
        """
        if stamps:
            known = iter(stamps)
            named = [(s, None if isinstance(s, bytes) else next(known)) for s in sources]
            return at_once(lambda one: self._known(*one), named, most=IMAGES_AT_ONCE)
        if is_remote(self.root) and any(isinstance(source, str) for source in sources):
            return at_once(self.load, sources, most=IMAGES_AT_ONCE)
        return [self.load(source) for source in sources]

    def load(self, source: ImageSource) -> LoadedImage:
        """One image.

        Raises:
            DataError: as load_all.
        """
        if isinstance(source, bytes):
            self._check_size(len(source), IN_RECORD)
            return LoadedImage(source)
        if is_remote(self.root):
            return self._fetched(source, self.fetcher.head(self._address(source)))
        return LoadedImage(self._read(source), source)

    def _known(self, source: ImageSource, stamp: ShardStamp | None) -> LoadedImage:
        return self.load(source) if stamp is None else self._fetched(str(source), stamp)

    def _fetched(self, name: str, stamp: ShardStamp) -> LoadedImage:
        self._check_size(stamp.size, repr(name))
        return LoadedImage(self.fetcher.read(stamp, 0, stamp.size), name, stamp)

    def _address(self, name: str) -> str:
        root = self.root.rstrip("/") + "/"
        inside = name.removeprefix(root)
        parts = inside.split("/")
        if _URL.match(inside) or inside.startswith("/") or ".." in parts or "" in parts[:-1]:
            raise integrity_error(
                f"the image {redacted(name)[:100]!r} is no path inside {redacted(root)}; {_KNOB}"
            )
        if re.search(r"[?#\\\0]", inside):
            raise integrity_error(
                f"the image {name[:100]!r} has a character that no address has there"
            )
        return root + inside

    def open(self, name: str) -> BinaryIO:
        """A file of a root on a disk, whatever its size.

        Raises:
            DataError: class `integrity` for a path outside the root or a file that cannot be read.
        """
        if _URL.match(name):
            raise integrity_error(
                f"the {self.noun} {redacted(name)[:60]!r} is a URL; only files below "
                f"{Path(self.root).resolve()} are read"
            )
        try:
            try:
                return self._open_regular(self._true_path(name), name)
            except OSError as error:
                if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                    raise
                self._folders.clear()  # a folder has become a link: where does it lead by now?
                return self._open_regular(self._true_path(name), name)
        except (OSError, ValueError, RuntimeError) as error:
            raise self._unreadable(name, error) from None

    def _read(self, name: str) -> bytes:
        with self.open(name) as stream:
            self._check_size(os.fstat(stream.fileno()).st_size, repr(name))
            try:
                return stream.read()
            except OSError as error:
                raise self._unreadable(name, error) from None

    def _unreadable(self, name: str, error: Exception) -> DataError:
        refuse_full_table(error)
        reason = getattr(error, "strerror", None) or str(error)
        if "\\" in name:
            reason += ", and it has a '\\', as paths of Windows do: expected '/' between folders"
        return integrity_error(
            f"the {self.noun} {name!r} cannot be read in {self.root}: {reason}; {_KNOB}"
        )

    def _true_path(self, name: str) -> str:
        """The file behind a name. Folders are looked up once, a file that is a link each time."""
        folder, _, base = os.path.join(self.root, name).rpartition("/")  # noqa: PTH118
        true = self._folders.get(folder)
        if true is None or base in ("", ".", ".."):
            root = Path(self.root).resolve()
            resolved = Path(folder, base).parent.resolve() if base else Path(folder).resolve()
            if not resolved.is_relative_to(root):
                raise self._outside(name, root)
            if len(self._folders) >= MAX_FOLDERS:
                self._folders.clear()
            true = self._folders[folder] = str(resolved)
        path = f"{true}/{base}"
        if os.path.islink(path):  # noqa: PTH114
            root, end = Path(self.root).resolve(), Path(path).resolve()
            if not end.is_relative_to(root) and end.parent != _hub_blobs(root):
                raise self._outside(name, root)
            path = str(end)
        return path

    def _outside(self, name: str, root: Path) -> DataError:
        return integrity_error(
            f"the {self.noun} {name!r} lies outside the image root {root}; {_KNOB}"
        )

    def _open_regular(self, path: str, name: str) -> BinaryIO:
        descriptor = _open_true(path)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise integrity_error(f"the {self.noun} {name!r} is no regular file")
            return os.fdopen(descriptor, "rb", buffering=0)
        except BaseException:
            os.close(descriptor)
            raise

    def _check_size(self, size: int, name: str) -> None:
        if size > self.caps.max_member_bytes:
            raise integrity_error(
                f"the image {name} has {size} bytes; the cap is {self.caps.max_member_bytes}"
            )


def _open_true(path: str) -> int:
    """A descriptor of an absolute path without links. A link that appeared since is not
    followed."""
    *folders, base = path.strip("/").split("/")
    place = os.open("/", _FOLDER)
    try:
        for folder in folders:
            above, place = place, os.open(folder, _FOLDER, dir_fd=place)
            os.close(above)
        return os.open(base, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=place)
    finally:
        os.close(place)


def _hub_blobs(root: Path) -> Path | None:
    """The blobs of a snapshot in the Hub's cache: `datasets--OWNER--NAME/blobs`. None for other
    folders."""
    for folder in (root, *root.parents):
        snapshots, repository = folder.parent, folder.parent.parent
        if snapshots.name == "snapshots" and "--" in repository.name:
            return (repository / "blobs").resolve()
    return None
