"""Image files of a conversion: inside one root, of a known format, below the caps, whole."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

from vlmpack.data.columns.chat import ImageSource
from vlmpack.data.protocols import ImageSize
from vlmpack.data.shards.caps import SampleCaps
from vlmpack.data.shards.images import image_facts
from vlmpack.encode import decode_image
from vlmpack.errors import DataError

SUFFIXES = {"JPEG": "jpg", "PNG": "png", "WEBP": "webp"}

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
_CHOOSE_ROOT = "--images DIR names the folder that image paths start at"


@dataclass(frozen=True, slots=True)
class LoadedImage:
    """One image file.

    Args:
        suffix: of its member.
        data: the encoded file.
        size: (width, height) as it is seen.
    """

    suffix: str
    data: bytes
    size: ImageSize


@dataclass(frozen=True, slots=True)
class ImageRoot:
    """Where images may be read.

    Args:
        root: the folder; every path, its links followed, must end inside it.
        caps: size and pixel limits.
    """

    root: Path
    caps: SampleCaps = field(default_factory=SampleCaps)

    def load(self, source: ImageSource) -> LoadedImage:
        """One image, which can be decoded to its last pixel: a file that is cut has a sound header.

        Raises:
            DataError: class `integrity` for a path outside the root or a file that cannot be read,
                `decode` for what is no image, or not a whole one.
        """
        data = source if isinstance(source, bytes) else self._read(source)
        if len(data) > self.caps.max_member_bytes:
            raise _refused(
                f"the image has {len(data)} bytes; the cap is {self.caps.max_member_bytes}"
            )
        name = source if isinstance(source, str) else "in the record"
        facts = image_facts(data, name, self.caps)
        decode_image(data, repr(name), max_pixels=self.caps.max_image_pixels)
        return LoadedImage(SUFFIXES[facts.format], data, facts.size)

    def _read(self, name: str) -> bytes:
        if _URL.match(name):
            raise _refused(
                f"the image {name[:60]!r} is a URL; only files below {self.root.resolve()} are read"
            )
        root = self.root.resolve()
        try:
            path = (root / name).resolve()
            if not path.is_relative_to(root):
                raise _refused(
                    f"the image {name!r} lies outside the image root {root}; {_CHOOSE_ROOT}"
                )
            return self._read_regular(path, name)
        except (OSError, ValueError, RuntimeError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise _refused(
                f"the image {name!r} cannot be read in {root}: {reason}; {_CHOOSE_ROOT}"
            ) from None

    def _read_regular(self, path: Path, name: str) -> bytes:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise _refused(f"the image {name!r} is no regular file")
            if status.st_size > self.caps.max_member_bytes:
                raise _refused(
                    f"the image {name!r} has {status.st_size} bytes; the cap is "
                    f"{self.caps.max_member_bytes}"
                )
            with os.fdopen(descriptor, "rb", closefd=False) as stream:
                return stream.read(self.caps.max_member_bytes)
        finally:
            os.close(descriptor)


def _refused(reason: str) -> DataError:
    return DataError(reason, error_class="integrity")
