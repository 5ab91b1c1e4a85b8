"""What a worker pays for pixels, as float32 and as levels; 16 JPEGs of 800 x 600 each time.

`stock` is the same files decoded, and given to transformers' processor together. Levels are uint8
(`data.pixels: levels`), and a device pays for the way back.
"""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import torch
from models import ROOT
from PIL import Image
from timing import medians

from vlmpack.data.loading.loader import level_scale
from vlmpack.encode import Encoder
from vlmpack.families.image_processor import image_processor
from vlmpack.packing import Media
from vlmpack.packing.media import pixels_of

IMAGES = 16


def bench_levels(rounds: int) -> dict[str, object]:
    """Bytes and milliseconds of a row, in one thread of the CPU."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measured(rounds)
    finally:
        torch.set_num_threads(threads)


def _measured(rounds: int) -> dict[str, object]:
    encoder = Encoder(ROOT / "assets" / "tiny-qwen2_5_vl")
    scale, processor = level_scale(encoder), image_processor(encoder.folder)
    files = [_jpeg(seed) for seed in range(IMAGES)]
    media = encoder.pixels(files)
    assert media is not None
    found = scale.levels_of(media.pixel_values)
    assert found is not None, "a JPEG's pixels are no levels"
    sent: Media = replace(media, pixel_values=found[0], table=found[1])
    seconds = medians(
        {
            "decode": lambda: encoder.pixels(files),
            "stock": lambda: processor(images=[_opened(f) for f in files], return_tensors="pt"),
            "levels": lambda: scale.levels_of(media.pixel_values),
            "copy_float32": media.pixel_values.clone,
            "copy_levels": found[0].clone,
            "pixels": lambda: pixels_of(sent, torch.float32),
        },
        rounds=rounds,
    )
    return {
        "levels_bytes_share": found[0].nbytes / media.pixel_values.nbytes,
        "decode_of_stock": seconds["decode"] / seconds["stock"],
        "levels_of_decode": seconds["levels"] / seconds["decode"],
        "copied_levels_of_float32": seconds["copy_levels"] / seconds["copy_float32"],
        "row_mib": media.pixel_values.nbytes / 2**20,
        **{f"{name}_ms": 1e3 * value for name, value in seconds.items()},
    }


def _opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def _jpeg(seed: int) -> bytes:
    """A photograph's detail, more or less: noise that was blurred."""
    draw = np.random.default_rng(seed)
    small = Image.fromarray(draw.integers(0, 256, (75, 100, 3), dtype=np.uint8))
    out = io.BytesIO()
    small.resize((800, 600), Image.Resampling.BICUBIC).save(out, "JPEG", quality=90)
    return out.getvalue()
