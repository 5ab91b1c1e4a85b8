"""Special tokens that texts may spell, so that they are prompted and learnt: `data.special_tokens`.

"<|box_start|>(5,5),(90,90)<|box_end|>"    an answer of a model that marks boxes
<|im_start|>, <|image_pad|>, <|endoftext|>  what holds a conversation together: never
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

from vlmpack.encode.rows import ids_of
from vlmpack.errors import ModelError
from vlmpack.families.base import ImageRule
from vlmpack.file_format import EXPORT_NOTE
from vlmpack.whole_file import read_json

NOTE = "vlmpack-special-tokens.json"
"""In an exported folder: the special tokens that texts of its training could spell."""


def special_tokens(tokenizer: Any) -> set[str]:
    """Those of a tokenizer."""
    added = tokenizer.added_tokens_decoder.values()
    return {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)


def structure(
    tokenizer: Any, texts: Mapping[str, str], markers: Collection[str] = ()
) -> dict[str, str]:
    """Special token -> why no text may spell it: what a template or an image is written with, and
    what the tokenizer or the model's configuration has a name for.

    Args:
        tokenizer: transformers'.
        texts: where a text is from -> the text.
        markers: of images and videos.
    """
    found = dict.fromkeys(markers, "the place of an image")
    for token in special_tokens(tokenizer):
        for source, text in texts.items():
            if token in text:
                found.setdefault(token, f"part of {source}")
    for name, token in tokenizer.special_tokens_map.items():
        if isinstance(token, str):
            found.setdefault(token, f"the tokenizer's {name}")
    for name, number in ids_of(Path(tokenizer.name_or_path)):
        found.setdefault(str(tokenizer.convert_ids_to_tokens(number)), f"named by {name}")
    return found


def image_texts(rule: ImageRule) -> tuple[str, ...]:
    """What a family's rule writes images of a few sizes as: whole ones and those that are cut."""
    found = set()
    for width, height in product((64, 640, 3000), repeat=2):
        with suppress(ValueError):  # a size that the family refuses
            found.add(rule.layout(width, height).text)
    return tuple(sorted(found))


def refuse_structure(
    named: Sequence[str], *, known: Collection[str], kept: Mapping[str, str], where: str
) -> None:
    """Raise ModelError where a named token is none that texts may spell.

    Args:
        named: tokens.
        known: the tokenizer's special tokens.
        kept: those that no text may spell, with the reason.
        where: the model folder, for the message.
    """
    for token in named:
        if token in kept:
            raise ModelError(
                f"data.special_tokens: {token!r} is {kept[token]}, so a text that spells it would "
                f"be read as structure; leave it out"
            )
        if token not in known:
            close = difflib.get_close_matches(token, sorted(known - kept.keys()), n=1)
            meant = f"; did you mean {close[0]!r}?" if close else "."
            raise ModelError(
                f"data.special_tokens: {token[:60]!r} is no special token of {where}{meant} "
                f"Texts may spell other tokens as they are"
            )


def write_special_tokens(folder: Path, named: Sequence[str]) -> None:
    """Say in an exported folder which special tokens its texts could spell; `vlmpack generate`
    takes them in questions, and writes them in answers.

    Args:
        folder: the export's.
        named: without any nothing is written.
    """
    if named:
        note = {
            "special_tokens": list(named),
            "meaning": "Special tokens that questions and answers could spell where this model was "
            "finetuned. Whoever reads its answers keeps them: skip_special_tokens drops them.",
        }
        text = json.dumps(EXPORT_NOTE.mark(note), indent=2, ensure_ascii=False)
        (folder / NOTE).write_text(text + "\n", encoding="utf-8")


def named_or_noted(named: Sequence[str] | None, folder: Path) -> tuple[str, ...]:
    """The tokens that are named, in order; for None those of an exported folder's note, where there
    is one that can be read."""
    try:
        if named is None:
            note: Any = read_json(folder / NOTE)
            EXPORT_NOTE.take(note, folder / NOTE, ModelError)
            named = [str(token) for token in note["special_tokens"]]
    except (OSError, ValueError, KeyError, TypeError):
        named = ()
    return tuple(sorted(set(named)))
