"""A second oracle: ids, positions and pixels of every family against transformers 4.57.6, in a
Python of its own (`make references`), since stock transformers of the day is not the truth.

Each difference from it stands in `DIFFERENCES`, with who is right and why; families that it does
not have are in `NO_SECOND`.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from families import second_worker
from safetensors.torch import load_file, save_file
from support.families import FAMILIES, TEXT_FAMILIES, stock_rules, tiny_family_folder
from support.shards import ROOT
from support.tiny_internvl import with_videos
from support.videos import Part, Shot, Told
from torch import Tensor

from vlmpack.capabilities.served import model_types
from vlmpack.encode import Encoder
from vlmpack.model_folder.load import load_config
from vlmpack.model_folder.warned import refused_warnings
from vlmpack.packing import EncodedSample

SECOND = ROOT / ".references/second"
WANTED = ROOT / "tests/support/second_packages.txt"

SAMPLES = 40
SHARE = 6
"""Samples of each family that CI compares."""

IN_CI = (
    *("qwen2_5_vl", "qwen3_5", "internvl", "llava_onevision", "smolvlm", "mistral3", "gemma3"),
    *("llama", "gemma4_text"),
)

_WITH_GEMMA_4 = "transformers has it from 5.5 on, and publishes the only processor of it"
NO_SECOND = {
    "gemma4": _WITH_GEMMA_4,
    "gemma4-dense": _WITH_GEMMA_4,
    "gemma4-mixture": _WITH_GEMMA_4,
    "gemma4_unified": _WITH_GEMMA_4,
    "nemotron_h_omni": "its processor is code of the published folder, which is never run; "
    "tests/families/test_nemotron_omni_images.py has its rule a second time",
}
"""Family -> why nothing else than the transformers of the day says what is right."""

_OF_14 = [(112, 112), (168, 112), (112, 196)]
_OF_16 = [(128, 128), (160, 96), (96, 160)]
VIDEOS: Mapping[str, list[tuple[int, int]]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), _OF_14),
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _OF_16),
    "internvl": [(32, 32)],
}
"""Families whose videos it has -> sizes of frames that no processor resizes."""

TEXTS = (
    "What is shown?",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "数字は何ですか。",
    "  two  spaces\n\nand lines\t",
    "it's 12,345.678 eBay",
    "😀 family 👨‍👩‍👧",
    "def f(x):\n    return x**2",
    "ÀÉÎ naïve façade",
    "A" * 40,
    "русский текст",
)


def samples_of(name: str, count: int) -> list[Told]:
    """Texts, images and videos, as the family takes them."""
    draw, found = random.Random(1), []
    for number in range(count):
        kind = ("text", "image", "video")[number % 3] if name not in TEXT_FAMILIES else "text"
        asked: list[Part] = [draw.choice(TEXTS)] if kind == "text" else []
        for _ in range(draw.randint(1, 3)):
            if kind == "video" and name in VIDEOS:
                size, fps = draw.choice(VIDEOS[name]), draw.choice([3.0, 0.5, 1.0, 2.0])
                fps = 3.0 if number == 2 else fps  # patches along time 2 / 3 of a second apart
                # It takes several videos of a sample only with as many frames each.
                frames = 4 if name == "internvl" else draw.randint(2, 9)
                asked.append(Shot(size, frames, fps=fps, seed=draw.randint(0, 9)))
            elif kind != "text":
                asked.append((draw.randint(30, 180), draw.randint(30, 180)))
            asked.append(draw.choice(TEXTS))
        found.append(Told(f"s{number}", tuple(asked), draw.choice(TEXTS).strip()))
    return found


@dataclass
class Compared:
    """One family, by us and by the second oracle."""

    name: str
    folder: Path
    told: list[Told]
    theirs: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    @cached_property
    def encoder(self) -> Encoder:
        return Encoder(self.folder)

    @cached_property
    def ours(self) -> dict[str, EncodedSample]:
        return {each.key: self.encoder.encode(each.cooked()) for each in self.told}

    def cases(self) -> list[dict[str, Any]]:
        """For the worker."""
        found = []
        for each in self.told:
            case = each.case(self.folder)
            for video in case["videos"]:
                video["frames"] = [f"{self.name}.{frame}" for frame in video["frames"]]
            if self.name in TEXT_FAMILIES:
                for message in case["messages"]:
                    message["content"] = "".join(part["text"] for part in message["content"])
            rates = [video["fps"] for video in case["videos"]]
            found.append(
                case
                | {
                    "key": each.key,
                    "stills": [f"{self.name}.{still}" for still in case["stills"]],
                    "rates": rates if self.name == "qwen2_5_vl" else [],
                    "cut": self.name == "internvl" and bool(case["stills"]),
                    "nested": self.name == "llava_onevision",
                }
            )
        return found

    def pictures(self) -> dict[str, Tensor]:
        return {
            f"{self.name}.{each.key}.{name}": torch.from_numpy(np.array(image))
            for each in self.told
            for name, image in each.files().items()
        }

    def differing(self, positions: str = "positions") -> set[str]:
        """What differs in some sample.

        Args:
            positions: which of theirs.
        """
        rules, found = stock_rules(self.folder), set()
        for key, ours in self.ours.items():
            theirs = self.theirs[key]
            if ours.input_ids.tolist() != theirs["input_ids"][0].tolist():
                found.add("ids")
            if positions in theirs and not torch.equal(ours.position_ids, theirs[positions]):
                found.add("positions")
            if ours.media is None:
                continue
            wanted = {name: value for name, value in theirs.items() if name in _MEDIA}
            given = self.encoder.family.image_arguments(ours.media)
            both = given.keys() & wanted.keys()
            assert {"pixel_values", "pixel_values_videos"} & both
            seen = rules.seen(wanted) if "pixel_values" in wanted else wanted
            found |= {name for name in both if not _same(torch.as_tensor(given[name]), seen[name])}
        return found


_MEDIA = (
    *("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw"),
    *("second_per_grid_ts", "image_sizes", "batch_num_images"),
)


def _same(ours: Tensor, theirs: Tensor) -> bool:
    """Of pixels without the margin of a tile that the tower leaves out."""
    if ours.dim() > 3:
        theirs = theirs[..., : ours.shape[-2], : ours.shape[-1]]
    return ours.shape == theirs.shape and torch.equal(ours, theirs.to(ours.dtype))


Compare = Callable[[int], dict[str, Compared]]


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Compare:
    """How many samples -> family -> what both make of them. One process computes all."""
    stamp = SECOND / ".installed"
    if not stamp.exists() or stamp.read_text() != WANTED.read_text():
        pytest.skip("make references installs transformers 4: .references/second has it not")
    made: dict[int, dict[str, Compared]] = {}

    def compare(count: int) -> dict[str, Compared]:
        if count not in made:
            names = IN_CI if count == SHARE else [n for n in FAMILIES if n not in NO_SECOND]
            made[count] = _computed(names, count, tmp_path_factory.mktemp(f"second{count}"))
        return made[count]

    return compare


def _computed(names: Sequence[str], count: int, folder: Path) -> dict[str, Compared]:
    found, pictures = {}, {}
    for name in names:
        (folder / name).mkdir()
        model = tiny_family_folder(name, folder / name)
        model = with_videos(model) if name == "internvl" else model
        found[name] = Compared(name, model, samples_of(name, count))
        pictures |= found[name].pictures()
    save_file(pictures, str(folder / "pictures.safetensors"))
    (folder / "configs").mkdir()
    families = [
        {"family": name, "model": str(each.folder), "samples": each.cases()}
        for name, each in found.items()
    ]
    content = {"families": families, "configs": model_types()}
    (folder / "cases.json").write_text(json.dumps(content), encoding="utf-8")
    subprocess.run(
        [str(SECOND / "bin/python"), second_worker.__file__, str(SECOND.parent), str(folder)],
        check=True,
        timeout=600,
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
    )
    for name, each in found.items():
        each.theirs = defaultdict(dict)
        for path, value in load_file(str(folder / f"{name}.safetensors")).items():
            key, _, part = path.partition(".")
            each.theirs[key][part] = value
    return found


@dataclass(frozen=True)
class Difference:
    """A difference from the second oracle.

    Args:
        what: of `Compared.differing`.
        families: that have it.
        right: who is.
        why: and how it is known.
    """

    what: str
    families: tuple[str, ...]
    right: str
    why: str


DIFFERENCES = (
    Difference(
        "positions",
        ("qwen2_5_vl",),
        "vlmpack, transformers 5, and 4.49",
        "4.57 makes whole numbers of the seconds between patches along time before it multiplies "
        "them: 2 frames of 3 a second are 0 seconds apart. With seconds as they are, its own code "
        "gives our positions (`positions_exact`)",
    ),
)
"""Found on the samples here, and no others. `test_bounds` has one that the worker steps around."""

RUNS = [pytest.param(SHARE, marks=pytest.mark.slow), pytest.param(SAMPLES, marks=pytest.mark.soak)]


def test_each_family_has_a_second_oracle_or_a_reason_why_not() -> None:
    assert NO_SECOND.keys() < set(FAMILIES)
    others = set(FAMILIES) - NO_SECOND.keys() - set(TEXT_FAMILIES)
    assert others == second_worker.FAMILIES.keys()
    assert set(IN_CI) < set(FAMILIES) - NO_SECOND.keys()


@pytest.mark.parametrize("count", RUNS)
def test_what_differs_is_listed_with_who_is_right(compared: Compare, count: int) -> None:
    found = compared(count)
    differing = {(name, what) for name, each in found.items() for what in each.differing()}
    listed = {(name, each.what) for each in DIFFERENCES for name in each.families if name in found}
    assert differing == listed
    assert found["qwen2_5_vl"].differing("positions_exact") == set()
    kinds = {name for each in found.values() for one in each.theirs.values() for name in one}
    assert {"input_ids", "positions", "pixel_values", "pixel_values_videos"} <= kinds


@pytest.mark.parametrize("count", RUNS)
def test_bounds(compared: Compare, count: int) -> None:
    """4.57's Pillow class of Qwen-VL passes over `size` in its file and takes bounds of its own;
    its torchvision class and transformers 5 read it, so they and we are right. The worker says the
    same bounds by their older names, `min_pixels` and `max_pixels`."""
    found = compared(count)["qwen3_5"]
    grids = [one for one in found.theirs.values() if "grid_as_read" in one]
    assert grids
    assert any(not torch.equal(one["grid_as_read"], one["image_grid_thw"]) for one in grids)


@pytest.mark.slow
def test_a_fault_is_found(compared: Compare) -> None:
    """Ids, positions and pixels that are off in one number of one sample."""
    each = compared(SHARE)["qwen3_5"]
    assert each.differing() == set()
    key = next(key for key, one in each.ours.items() if one.media is not None)
    right = each.ours[key]
    assert right.media is not None
    pixels = right.media.pixel_values.clone()
    pixels[-1, -1] += 1
    ids, positions = right.input_ids.clone(), right.position_ids.clone()
    ids[-1] += 1
    positions[1, -1] += 1
    for what, wrong in {
        "ids": replace(right, input_ids=ids),
        "positions": replace(right, position_ids=positions),
        "pixel_values": replace(right, media=replace(right.media, pixel_values=pixels)),
    }.items():
        each.ours[key] = wrong
        assert each.differing() == {what}
    each.ours[key] = right


WARNED = {
    name: ["Model config: pad_token_id must be `None` or an integer within the vocabulary"]
    for name in ("idefics3", "smolvlm")
}
"""model_type -> what transformers 5 says of the config that version 4 writes of each class's
defaults, as older published folders have it. These ids pad nothing here."""


@pytest.mark.slow
def test_what_is_said_of_folders_in_the_older_form(compared: Compare) -> None:
    folder = compared(SHARE)["llama"].folder.parent
    said: dict[str, list[str]] = {}
    kinds = [kind for kind in model_types() if (folder / "configs" / kind).is_dir()]
    assert len(kinds) > 15
    for kind in kinds:
        with refused_warnings(folder / "configs" / kind) as heard:
            load_config(folder / "configs" / kind)
        if heard:
            said[kind] = sorted({text.partition(" (between")[0] for text in heard})
    assert said == WARNED
