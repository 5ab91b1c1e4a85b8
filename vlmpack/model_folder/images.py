"""What makes pixels of images: one backend, whatever is installed.

transformers has two of most image processors, on torchvision and on PIL with numpy, and takes the
first where torchvision is installed. Their pixels differ by up to 6e-4, so a run would change with
its environment. Here it is always the second, which needs nothing that is not installed anyway.
"""

from __future__ import annotations

from functools import cache

from vlmpack.capabilities.versions import installed_versions

IMAGE_BACKEND = "pil"


def made_with() -> str:
    """What made lengths and pixels: `images by pil, transformers 5.24.0`."""
    return f"images by {IMAGE_BACKEND}, transformers {transformers_version()}"


@cache
def transformers_version() -> str:
    """That which is installed; looked up once, since every shard's index is named with it."""
    return str(installed_versions()["transformers"])
