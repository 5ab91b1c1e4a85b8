"""What decides tokens and pixels: the processor's files and the rules, taken apart for messages."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vlmpack.encode.settings import EncoderSettings
from vlmpack.errors import CapabilityError, ModelError
from vlmpack.families.base import Family
from vlmpack.model_folder.content import PROCESSOR_FILES
from vlmpack.model_folder.load import made_with
from vlmpack.recipe.data import ImagesSection
from vlmpack.whole_file import regular_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderFacts:
    """The facts that decide the ids, labels, lengths, positions and pixels of an encoder.

    Args:
        settings: the encoder's; `date` only if the template reads the clock.
        image_sizes: the numbers of the image rule, some of them config.json's.
        coordinates: how the family writes objects, or the recipe; empty for no rule.
        corrected: whether the tokenizer splits texts differently than its file says.
    """

    folder: Path
    family: str
    settings: EncoderSettings
    image_sizes: str
    coordinates: str
    corrected: bool

    def fingerprint(self, version: int) -> str:
        """All of it, under a version of the shared encoding: 32 hex digits."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(f"{version}/{self.family}".encode())
        digest.update(self.settings.loss_on.encode())
        if self.settings.budget.set_values():
            digest.update(hashed(self.settings.budget).encode())
        if self.settings.date is not None:
            digest.update(self.settings.date.isoformat().encode())
        if self.settings.learn != "all_turns":
            digest.update(self.settings.learn.encode())
        if self.settings.pairs:
            digest.update(b"pairs")
        if self.settings.rollouts:
            digest.update(b"rollouts")
        if self.settings.chat_template_kwargs:
            digest.update(
                f"chat_template_kwargs {as_text(self.settings.chat_template_kwargs)}".encode()
            )
        if self.settings.special_tokens:
            digest.update(f"special_tokens {json.dumps(self.settings.special_tokens)}".encode())
        if self.settings.coordinates:
            digest.update(f"coordinates {self.settings.coordinates!r}".encode())
        if self.settings.boxes_in_text != "keep":
            digest.update(f"boxes_in_text {self.boxes_in_text}".encode())
        for name in PROCESSOR_FILES:
            path = self.folder / name
            digest.update(name.encode() + b"\0")
            digest.update(regular_bytes(path) if path.is_file() else b"-")
        digest.update(self.image_sizes.encode())
        if self.corrected:
            digest.update(b"corrected split")
        return digest.hexdigest()

    @property
    def boxes_in_text(self) -> str:
        """What becomes of boxes in texts, with the family's form of them."""
        return f"{self.settings.boxes_in_text} {digest(self.coordinates.encode())}"

    def rules(self, version: int) -> str:
        """What code decides, under a version of the shared encoding."""
        return digest(f"{version}/{self.family}/{self.settings.loss_on}".encode())

    def parts(self, version: int) -> dict[str, str]:
        """The parts of the fingerprint, by name.

        They are the rules, tokenizer, template and processor, and what made them, which may differ
        by version of transformers without another fingerprint. If set, there are also the budget,
        the date of a template that reads the clock, which answers are learnt, the template's
        variables, the special tokens of texts, and the form of coordinates.
        """
        parts = {"rules": self.rules(version), **processor_parts(self.folder)}
        parts["processor"] = digest(f"{parts['processor']} {self.image_sizes}".encode())
        if self.corrected:
            parts["tokenizer"] = digest(f"{parts['tokenizer']} corrected split".encode())
        if bounds := self.settings.budget.set_values():
            parts["images"] = ", ".join(f"{name} {value}" for name, value in bounds.items())
        if self.settings.date is not None:
            parts["date"] = self.settings.date.isoformat()
        if self.settings.learn != "all_turns":
            parts["learn"] = self.settings.learn
        if self.settings.pairs:
            parts["samples"] = "pairs"
        if self.settings.rollouts:
            parts["samples"] = "rollouts"
        if self.settings.chat_template_kwargs:
            parts["chat_template_kwargs"] = as_text(self.settings.chat_template_kwargs)
        if self.settings.special_tokens:
            parts["special_tokens"] = ", ".join(self.settings.special_tokens)
        if self.settings.coordinates:
            parts["coordinates"] = repr(self.settings.coordinates)
        if self.settings.boxes_in_text != "keep":
            parts["boxes_in_text"] = self.boxes_in_text
        return parts | {"made_with": made_with()}


def image_sizes(family: Family, folder: Path) -> str:
    """The numbers of a folder's image rule, some of them config.json's; budgets count apart."""
    try:
        rule: Any = family.image_rule(folder, ImagesSection())
    except (CapabilityError, ModelError, OSError, ValueError):
        return ""  # nothing can be encoded; an attempt raises the reason
    return "" if rule is None else repr(replace(rule, folder=Path()))


def as_text(variables: Mapping[str, Any]) -> str:
    """Variables of a template, in whatever order they were given."""
    return json.dumps(variables, sort_keys=True)


def processor_parts(folder: Path) -> dict[str, str]:
    """A digest each of a model folder's tokenizer, template and image processor.

    The template counts as one whether it is in a file of its own or in the tokenizer's.
    """
    parts = {"tokenizer": b"", "template": b"", "processor": b""}
    for name in PROCESSOR_FILES:
        path = folder / name
        data = regular_bytes(path) if path.is_file() else b"-"
        if name == "tokenizer_config.json" and path.is_file():
            data, template = _without_template(data)
            parts["template"] += template
        if name.startswith("chat_template"):
            part = "template"
        else:
            part = "processor" if "processor" in name else "tokenizer"
        parts[part] += data + b"\0"
    return {name: digest(data) for name, data in parts.items()}


def digest(data: bytes) -> str:
    """The digest that fingerprints are made of, 16 hex digits."""
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _without_template(data: bytes) -> tuple[bytes, bytes]:
    """A tokenizer_config.json without its chat template, and the template."""
    try:
        config = json.loads(data)
        template = config.pop("chat_template", None)
    except (ValueError, AttributeError):
        return data, b""
    if template is None:
        return data, b""
    return json.dumps(config, sort_keys=True).encode(), json.dumps(template).encode()


def hashed(budget: ImagesSection) -> str:
    """Bounds as fingerprints have them; lengths that are on disk were named after this text."""
    bounds = (f"{name}={getattr(budget, name)!r}" for name in type(budget).model_fields)
    return f"PixelBudget({', '.join(bounds)})"
