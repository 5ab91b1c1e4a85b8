"""Doors of recipes and of public functions: YAML, overrides, arguments."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.fuzz import VALUES, Door, changed, damaged

from vlmpack import load_recipe, pack_batch_sequences, pack_padded_batch
from vlmpack.packing import EncodedSample, plan_packs
from vlmpack.packing.balance import balance

Go = Callable[[random.Random], object]

RECIPE = {
    "model": {"path": "m", "attention": "auto"},
    "data": {
        "train": [{"path": "s3://b/x-{0..3}.tar", "weight": 1.0, "name": "a"}],
        "storage": {"endpoint": "https://h:9", "credentials": {"hf_token": "${env:T}"}},
        "on_error": {"schema": "skip"},
    },
    "packing": {"mode": "online", "max_tokens": 512},
    "training": {"max_steps": 3, "global_batch_size": 2, "seq_length": 128, "micro_batch_size": 1},
    "trainable": {"language": "lora", "lora": {"rank": 4, "targets": ["q_proj"]}},
    "optim": {"lr": 1e-3, "betas": [0.9, 0.95]},
    "parallelism": {"sharding": "none"},
    "logging": {"trackers": []},
    "run_dir": "r",
}
TEXT = Path("recipes/digits-demo.yaml").read_bytes()
OVERRIDES = [
    b"training.max_steps=20", b"data.train[0].path=x.tar", b"optim.betas=[0.9,0.95]",
    b"trainable.lora={rank: 4}", b"data.on_error.schema=skip", b"run_dir=runs/a",
]  # fmt: skip
YAML_PIECES = (b"&a [*a]", b"*x", b"!!python/object:os.system x", b"? [a]: b", b"- - -", b"<<: x",
               b"{a: {a: {a", b"| \n", b"%YAML 9\n---", b"\t", b"2001-99-99", b"0b2", b"1:99:99",
               b"\xc2\x85", b"---\n---\n", b"[" * 400, b"a: &x b\nc: *x")  # fmt: skip


def _yaml(folder: Path) -> Go:
    file = folder / "r.yaml"

    def go(draw: random.Random) -> None:
        data = damaged(TEXT, draw, [TEXT])
        if draw.random() < 0.4:
            at = draw.randrange(len(data) + 1)
            data = data[:at] + draw.choice(YAML_PIECES) + data[at:]
        file.write_bytes(data)
        load_recipe(file)

    return go


def _mapping(_: Path) -> Go:
    def go(draw: random.Random) -> None:
        items = [
            damaged(draw.choice(OVERRIDES), draw, OVERRIDES).decode("utf-8", "surrogateescape")
            for _ in range(draw.randrange(3))
        ]
        value = changed(RECIPE, draw)
        load_recipe(value if isinstance(value, dict) else {"x": value}, items)

    return go


def _plan(_: Path) -> Go:
    def go(draw: random.Random) -> None:
        lengths: Any = [draw.randrange(1, 100) for _ in range(draw.randrange(12))]
        if draw.random() < 0.4:
            lengths = changed(lengths, draw)
        elif draw.random() < 0.3:
            lengths = np.array(lengths, draw.choice(["i1", "u8", "f4", "O", "S3", "?", "M8[s]"]))
        options: dict[str, Any] = {
            "second": [1] * 5, "second_budget": 9, "alignment": 4, "max_sequences": 3,
        }  # fmt: skip
        given = {name: options[name] for name in options if draw.random() < 0.3}
        if given and draw.random() < 0.6:
            given = changed(given, draw)
        capacity: Any = draw.choice((*VALUES, 128, 128, 128, 128, 128, 64))
        given = given if isinstance(given, dict) else {"second": given}
        known = {name: value for name, value in given.items() if name in options}
        plan_packs(lengths, capacity, **known)

    return go


def _tensor(draw: random.Random, good: torch.Tensor) -> Any:
    """The tensor, or another that does not fit so well."""
    if draw.random() < 0.85:
        return good
    match draw.randrange(8):
        case 0:
            return good[..., : draw.randrange(good.shape[-1] + 1)]
        case 1:
            return good.float()
        case 2 if len(good):
            return good[0]
        case 3:
            return good.reshape(-1)
        case 4:
            return good[None]
        case 5:
            return torch.full_like(good, draw.choice((-1, 0, 2**40)))
        case 6:
            return good.bool()
        case _:
            return draw.choice((None, 3, "x", [1], good.to("meta"), good.tolist()))


def _integer(draw: random.Random, good: int) -> Any:
    return good if draw.random() < 0.7 else draw.choice((*VALUES, 0, -1, 3, 7))


def _padded(_: Path) -> Go:
    def go(draw: random.Random) -> None:
        tokens = torch.arange(12).reshape(2, 6)
        mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
        labels = torch.where(mask.bool(), tokens, -100)
        loss = (mask * torch.tensor([1, 1, 1, 0, 0, 0])).float()
        positions = torch.arange(6).expand(2, 6)
        named = draw.choice(("attention_mask", "padding_mask", "lengths"))
        real = {"attention_mask": None, "padding_mask": None, "lengths": None}
        real[named] = _tensor(draw, torch.tensor([4, 6]) if named == "lengths" else mask)
        pack_padded_batch(
            _tensor(draw, tokens),
            _tensor(draw, labels),
            _tensor(draw, loss),
            position_ids=_tensor(draw, positions),
            pad_to_multiple_of=_integer(draw, 2),
            pad_token_id=_integer(draw, 0),
            **real,
        )

    return go


def _samples(_: Path) -> Go:
    def go(draw: random.Random) -> None:
        samples = []
        for number in range(draw.randrange(4)):
            ids = torch.arange(number + 3)
            labels = torch.cat([ids[1:], torch.tensor([-100])])
            samples.append(
                EncodedSample(
                    key=f"k{number}",
                    input_ids=_tensor(draw, ids),
                    labels=_tensor(draw, labels),
                    position_ids=_tensor(draw, ids[None]),
                    media=None,
                    media_positions=_tensor(draw, torch.empty(0, dtype=torch.int64)),
                )
            )
        pack_batch_sequences(
            samples,
            pad_to_multiple_of=_integer(draw, 2),
            pad_token_id=_integer(draw, 0),
            total_multiple_of=_integer(draw, 4),
        )

    return go


def _balance(_: Path) -> Go:
    def go(draw: random.Random) -> None:
        costs: Any = [draw.random() for _ in range(draw.randrange(9))]
        balance(changed(costs, draw), _integer(draw, 2))

    return go


DOORS = [
    Door("YAML", 0.5, _yaml),
    Door("recipe", 0.6, _mapping),
    Door("plan_packs", 6, _plan),
    Door("pack_padded_batch", 4, _padded),
    Door("pack_batch_sequences", 4, _samples),
    Door("balance", 2, _balance),
]
