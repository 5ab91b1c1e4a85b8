"""Special tokens that texts may spell, and ids that the embedding has no row for.

    "<|box_start|>(5,5),(90,90)<|box_end|>"     a model's answer: prompted and learnt
    <|im_start|>, <|image_pad|>, <|endoftext|>  what holds a conversation together: never

A tokenizer may have more tokens than the embedding has rows. An id beyond them is no index. One
engine fails at its first step, and the other reads a zero where ranks split the rows.

    written by the chat template, or for images   the folder is refused
    in a sample                                   the sample is refused
    nowhere                                       a note
    the pad token                                 another token fills gaps (`Encoder.pad_token_id`)
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any, Protocol

from vlmpack.capabilities.folder import read_config
from vlmpack.errors import ModelError, schema_error
from vlmpack.families.base import NO_TOKEN, ImageRule
from vlmpack.model_folder.load import load_config
from vlmpack.model_folder.weights import first
from vlmpack.whole_file import regular_text

logger = logging.getLogger("vlmpack")

REMEDY = "use the tokenizer of this model, or give the model rows first (resize_token_embeddings)"

_ENDS = ("_token_id", "_token_index")


def embedding_rows(folder: Path) -> int | None:
    """Rows of the embedding by config.json; None where it does not say.

    Every launch compares them with the headers of the weights.

    Raises:
        ModelError, OSError, ValueError, KeyError: as `load_config`.
    """
    rows = getattr(load_config(folder).get_text_config(), "vocab_size", None)
    return rows if isinstance(rows, int) else None


def refuse_beyond(tokenizer: Any, ids: list[int], rows: int | None) -> None:
    """Raise DataError (schema) where a text has an id behind the rows."""
    if rows is not None and ids and max(ids) >= rows:
        raise schema_error(
            f"the text has tokens that the model has no embedding for, behind its {rows:,} rows: "
            f"{_named(tokenizer, ids, rows)}. Leave them out, or {REMEDY}"
        )


class Chat(Protocol):
    """The part of a `ChatEncoder` that is asked here."""

    @property
    def tokenizer(self) -> Any:
        """transformers'."""

    @property
    def rows(self) -> int | None:
        """The number of rows of the model's embedding; None where it is not known."""

    def own_ids(self, *images: str) -> set[int]:
        """Ids that any conversation may have, some images included."""


def check_ids(
    folder: Path, chat: Chat, images: Sequence[str], *, placeholder_id: int, video_id: int
) -> None:
    """Compare a tokenizer with the rows of the embedding and with config.json.

    Raises:
        ModelError: an id of the template or of images is behind the rows, or config.json names
            another id for a placeholder.
    """
    tokenizer, rows = chat.tokenizer, chat.rows
    shown = {"image_token_id": placeholder_id, "video_token_id": video_id}
    _refuse_other_ids(folder, tokenizer, shown | _around(tokenizer))
    if rows is None:
        return
    used = chat.own_ids(*images) | {*shown.values()}
    if lost := [each for each in used if each >= rows]:
        raise ModelError(
            f"model.path: {folder} has an embedding of {rows:,} rows, and its chat template or "
            f"its images use tokens behind them: {_named(tokenizer, lost, rows)}; {REMEDY}"
        )
    behind = [each for each in tokenizer.get_vocab().values() if each >= rows]
    notes = [f"tokens {_named(tokenizer, behind, rows)}"] if behind else []
    notes += [f"{key}: {each}" for key, each in ids_of(folder) if each >= rows]
    if notes:
        logger.warning(
            "note: %s names ids behind the %s rows of its embedding: %s; nothing may use them",
            folder,
            f"{rows:,}",
            first(notes),
        )


def _refuse_other_ids(folder: Path, tokenizer: Any, shown: Mapping[str, int]) -> None:
    """Raise ModelError where config.json names another id than the tokenizer."""
    config = load_config(folder)
    for name, own in shown.items():
        said = getattr(config, name, None)
        if isinstance(said, int) and own != NO_TOKEN and said != own:
            token = tokenizer.convert_ids_to_tokens(own)
            raise ModelError(
                f"model.path: {folder / 'config.json'} says {name}: {said}, but its tokenizer has "
                f"{token!r} as {own}, and samples are written with that. Set {name}: {own} there, "
                "or use the tokenizer of this model"
            )


def _around(tokenizer: Any) -> dict[str, int]:
    """Ids of the tokens around images that config.json of some families names."""
    known = tokenizer.get_added_vocab()
    return {
        f"{name}_token_id": known[f"<|{name}|>"]
        for name in ("vision_start", "vision_end")
        if f"<|{name}|>" in known
    }


def ids_of(folder: Path) -> Iterator[tuple[str, int]]:
    """Ids that config.json and generation_config.json name."""
    yield from _ids_in("config.json", read_config(folder))
    path = folder / "generation_config.json"
    try:
        yield from _ids_in(path.name, json.loads(regular_text(path)))
    except (OSError, ValueError, RecursionError):
        return  # transformers does without it


def _ids_in(where: str, content: object) -> Iterator[tuple[str, int]]:
    for key, value in content.items() if isinstance(content, Mapping) else ():
        if isinstance(value, Mapping):
            yield from _ids_in(f"{where}: {key}", value)
        elif key.endswith(_ENDS):
            values = value if isinstance(value, list) else [value]
            yield from ((f"{where}: {key}", each) for each in values if isinstance(each, int))


def _named(tokenizer: Any, ids: Iterable[int], rows: int) -> str:
    """`'<box>' (id 576), '</box>' (id 577)`."""
    behind = sorted({each for each in ids if each >= rows})
    tokens = tokenizer.convert_ids_to_tokens(behind)
    return first(f"{token!r} (id {each})" for token, each in zip(tokens, behind, strict=True))


def special_tokens(tokenizer: Any) -> set[str]:
    """The special tokens of a tokenizer."""
    added = tokenizer.added_tokens_decoder.values()
    return {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)


def structure(
    tokenizer: Any, texts: Mapping[str, str], markers: Collection[str] = ()
) -> dict[str, str]:
    """Special token -> why no text may spell it.

    These tokens write a template or an image, or are named by the tokenizer or the model's
    configuration.

    Args:
        texts: the texts by their origin.
        markers: of images and videos.
    """
    tokens = dict.fromkeys(markers, "the place of an image")
    for token in special_tokens(tokenizer):
        for source, text in texts.items():
            if token in text:
                tokens.setdefault(token, f"part of {source}")
    for name, token in tokenizer.special_tokens_map.items():
        if isinstance(token, str):
            tokens.setdefault(token, f"the tokenizer's {name}")
    for name, number in ids_of(Path(tokenizer.name_or_path)):
        tokens.setdefault(str(tokenizer.convert_ids_to_tokens(number)), f"named by {name}")
    return tokens


def image_texts(rule: ImageRule) -> tuple[str, ...]:
    """What a family's rule writes images of a few sizes as: whole ones and those that are cut."""
    texts = set()
    for width, height in product((64, 640, 3000), repeat=2):
        with suppress(ValueError):  # a size that the family refuses
            texts.add(rule.layout(width, height).text)
    return tuple(sorted(texts))


def refuse_structure(
    named: Sequence[str], *, known: Collection[str], kept: Mapping[str, str], where: str
) -> None:
    """Raise ModelError where a named token is none that texts may spell."""
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
