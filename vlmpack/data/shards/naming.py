"""Which names of members and which keys of records are read, and how much a sample may hold.

WebDataset's rule names members. The key of a member is its path up to the first dot of its base
name. The field is the rest in lower case. So `a/007.Left.JPG` has the key `a/007` and the field
`left.jpg`. And `v1.5_img.jpg` has the key `v1`, which is rarely what was meant. The messages of the
schemas say so.
Names and caps hold before anything is decoded or kept in memory.

No key of a record, of a turn or of a part of its content is ignored in silence. A key that we do
not read is refused by name in a turn or a part. In a record it is refused if other trainers give it
a meaning or it is a misspelling of ours, since its content would be lost. Other keys of a record (a
source, a score) are counted. A key with null counts as missing, since Arrow gives each struct the
keys of all.

JSON is parsed here too, since an object with the same key twice is refused. Python would silently
keep the last value.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from typing import Any, NamedTuple

from vlmpack.addresses import IMAGE_SUFFIXES
from vlmpack.encode.sample import Shown, VideoPart, num_files
from vlmpack.errors import schema_error
from vlmpack.limits import (
    MAX_FRAMES,
    MAX_IMAGE_PIXELS,
    MAX_IMAGES,
    MAX_JSON_BYTES,
    MAX_MEMBER_BYTES,
    MAX_MEMBERS,
    MAX_RECORD_KEYS,
    MAX_SAMPLE_BYTES,
)
from vlmpack.words import counted, some_of

_META = re.compile(r"__[^/]*__($|/)")

_PICKLES = frozenset({"pyd", "pkl", "pickle", "pck", "joblib", "dill", "pth", "pt", "ckpt", "npz"})
_AUXILIARY = frozenset({"gif", "bmp", "tif", "tiff"})
JSON_FIELD = "json"


class MemberName(NamedTuple):
    """A member's place in the data set."""

    key: str
    field: str


def split_name(name: str) -> MemberName | None:
    """Key and field, or None for names that webdataset passes over: names without a dot, names that
    begin with one (`.DS_Store`, `._1.jpg`), and its own `__meta__` members."""
    if name.startswith("__") and _META.match(name):
        return None
    dot = name.find(".", name.rfind("/") + 1)
    if dot < 1 or name[dot - 1] == "/":
        return None
    return MemberName(name[:dot], name[dot + 1 :].lower())


def is_image(field: str) -> bool:
    """Whether a field holds an image, by its last suffix."""
    return field.rpartition(".")[2] in IMAGE_SUFFIXES


def may_stand_aside(field: str) -> bool:
    """Whether an image that no turn shows may serve another purpose, as previews and masks do."""
    return field.rpartition(".")[2] in _AUXILIARY


def refusal(field: str, data: bytes) -> str | None:
    """Why a member is refused before it is read: pickles run code when they are opened.

    Nothing here unpickles. Shards with pickles are refused so that no later tool opens them
    unnoticed.
    """
    suffix = field.rpartition(".")[2]
    if suffix in _PICKLES:
        return f"a '.{suffix}' member may hold a pickle, which runs code when it is opened"
    if suffix == "npy" and b"|O" in data[:256]:
        return "the '.npy' member holds Python objects (a pickle)"
    return None


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleCaps:
    """Limits of one sample. A sample above them is an error, never a crash."""

    max_member_bytes: int = MAX_MEMBER_BYTES
    """One file of a sample, in bytes."""
    max_image_pixels: int = MAX_IMAGE_PIXELS
    """Width times height of one image, from its header."""
    max_images: int = MAX_IMAGES
    """Images of one sample, frames of videos not counted."""
    max_frames: int = MAX_FRAMES
    """Frames of the videos of one sample."""
    max_json_bytes: int = MAX_JSON_BYTES
    """The conversation; parsed, it takes up to 27 times the memory."""
    max_members: int = MAX_MEMBERS
    """Files of one sample."""
    max_sample_bytes: int = MAX_SAMPLE_BYTES
    """All of them, headers included."""

    def check_images(self, shown: Sequence[Shown]) -> None:
        """Raise DataError (schema) for a sample with too many images or frames."""
        frames = num_files([part for part in shown if isinstance(part, VideoPart)])
        stills = num_files(shown) - frames
        for count, what, most in (
            (stills, "images", self.max_images),
            (frames, "frames of videos", self.max_frames),
        ):
            if count > most:
                raise schema_error(f"{count} {what}; at most {most} are allowed")


MAX_KEYS = 100
"""Unknown keys that are counted by name: a record may use its keys as data."""
MAX_KEY_LENGTH = 60
MAX_SHOWN = 12
OTHER_KEYS = "..."
SIMILAR = 0.8

PAIR_KEYS = ("chosen", "rejected")
"""The two answers to a record's turns, of which one is preferred."""

BRANCHES = "branches"
"""Several samples of one record, behind the turns that they have in common."""

_CONTENT_KEYS = frozenset(
    {
        *("messages", "conversations", "system", "image", "images"),
        *("tools", "chat_template_kwargs", "rollout", BRANCHES, *PAIR_KEYS),
    }
)
"""Keys whose misspelling changes a sample: `imgae` would leave only its text."""

RECORD_KEYS = _CONTENT_KEYS | {"objects", "task", "id", "__key__"}
"""Keys of a record that are read, or name it."""

_ONE_ANSWER = (
    "an answer with a reward has a 'rollout' here, which objective.name: policy learns from; else "
    "keep the answer to learn in the turns"
)
_TWO_ANSWERS = (
    "a pair is the turns of its prompt with 'chosen' and 'rejected' beside them; vlmpack data "
    "convert writes it so"
)
_TOOLS = "tools are 'tools' here, calls the 'tool_calls' of an assistant's turn"
_KWARGS = "it goes into 'chat_template_kwargs', as {{'{}': ...}}"
_FLAG = "it is a key of a turn here: put it into the assistant's turn that it is meant for"
_TOKENS = "tokens and masks are made here, from the turns: leave such columns out"
_IN_ORDER = "turns are written out in one list: put them before the others"

MEANT_ELSEWHERE: Mapping[str, str] = {
    "functions": _TOOLS,
    "rejected_response": _TWO_ANSWERS,
    "rejected_messages": _TWO_ANSWERS,
    "rejected_images": "both answers of a pair are about the same images here",
    "kto_tag": _ONE_ANSWER,
    "margin": "pairs have no margins of their own here: leave them out",
    "enable_thinking": _KWARGS.format("enable_thinking"),
    "reasoning_effort": _KWARGS.format("reasoning_effort"),
    "chat_template": "a template of another kind goes into the model folder",
    "system_prompt": "did you mean 'system'?",
    "history": _IN_ORDER,
    "loss": _FLAG,
    "train": _FLAG,
    "weight": _FLAG,
    "loss_scale": "the parts of an answer have no weights here",
    "channel": "losses are not kept apart by channel here: 'task' groups evaluation figures",
    "input_ids": _TOKENS,
    "assistant_masks": _TOKENS,
    "completion_mask": _TOKENS,
}
"""Keys of a record that others read (ms-swift, LLaMA-Factory, TRL, OpenAI), and why they are
refused."""

_SHOWN = "an image is a part of the content, {'type': 'image'}, or <image> where it marks one"

_MEANT_IN_TURNS: Mapping[str, str] = {
    "function_call": "calls are a list here, 'tool_calls'",
    "tool_plan": "thoughts are 'reasoning_content' here",
    "loss_scale": "the parts of an answer have no weights here",
    "image": _SHOWN,
    "images": _SHOWN,
    "mask": "did you mean 'loss' (false: not learnt)?",
    "learn": "did you mean 'loss'?",
    "min_pixels": "images.min_pixels of the recipe bounds images",
    "max_pixels": "images.max_pixels of the recipe bounds images",
}


def is_missing(value: object) -> bool:
    """Whether a key's value is null, or empty at every level."""
    if isinstance(value, str):  # most are, and each record asks of all its keys
        return value == ""
    pending = [value]  # no recursion: a record may be nested as deeply as JSON is read
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending += item.values()
        elif item is not None and item not in ("", []):
            return False
    return True


def names_no_image(value: object) -> bool:
    """Whether a value where images are named says that there is none: nothing, or a list of
    nothing."""
    return all(map(is_missing, value)) if isinstance(value, list) else is_missing(value)


def refuse_many_keys(keys: Collection[str], shard: str | None = None) -> None:
    """Raise DataError (schema) for more keys of a record, or columns of a table, than are read."""
    if len(keys) > MAX_RECORD_KEYS:
        raise schema_error(
            f"{len(keys):,} keys or columns; at most {MAX_RECORD_KEYS:,} are read: keep data in a "
            "list, or in an object below one key",
            shard=shard,
        )


def unknown_record_keys(record: Mapping[str, object]) -> tuple[str, ...]:
    """The keys of a record that are not read and mean nothing that we know.

    Raises:
        DataError: (schema) a key that other trainers give a meaning, or a misspelt one of ours.
    """
    if record.keys() <= RECORD_KEYS:
        return ()
    unknown = [key for key in record if key not in RECORD_KEYS and not is_missing(record[key])]
    for key in unknown:
        if key in MEANT_ELSEWHERE:
            raise schema_error(f"the record has {key!r}: {MEANT_ELSEWHERE[key]}")
        if key == "label" and isinstance(record[key], bool):
            raise schema_error(f"the record has 'label', a yes or no: {_ONE_ANSWER}")
        if (meant := misspelt(key)) is not None:
            raise schema_error(
                f"the record has the key {key!r}, which would be lost: did you mean {meant!r}? "
                "If not, give it a name that is less alike"
            )
    return tuple(sorted(unknown))


def misspelt(key: str) -> str | None:
    """The key of turns or images that an unknown key or column nearly is."""
    return _near(key, _CONTENT_KEYS)


def refuse_unknown(item: Mapping[str, object], known: frozenset[str], where: str) -> None:
    """Raise DataError (schema) where a turn or a part has a key that is not read."""
    if item.keys() <= known:
        return
    for key in item:
        if key in known or is_missing(item[key]):
            continue
        hint = _MEANT_IN_TURNS.get(key) or suggestion(key, known)
        raise schema_error(f"{where} has the key {key[:60]!r}, which would be lost: {hint}")


def count_keys(tables: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Unknown keys of many records, most frequent first; those beyond MAX_KEYS as OTHER_KEYS."""
    counts: Counter[str] = Counter()
    for table in tables:
        for key, count in table.items():
            counts[key[:MAX_KEY_LENGTH]] += count
    others = counts.pop(OTHER_KEYS, 0)
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    others += sum(count for _, count in ordered[MAX_KEYS:])
    return dict(ordered[:MAX_KEYS]) | ({OTHER_KEYS: others} if others else {})


def describe_keys(counts: Mapping[str, int]) -> str:
    """Unknown keys of records in words: the first of them, with their records."""
    words = []
    for key, count in counts.items():
        close = _near(key, RECORD_KEYS)
        meant = f"; did you mean {close!r}?" if close else ""
        name = "others" if key == OTHER_KEYS else repr(key)
        words.append(f"{name} ({counted(count, 'record')}{meant})")
    return some_of(words, MAX_SHOWN)


def _near(key: str, known: frozenset[str]) -> str | None:
    """The known key of which this one is a misspelling; None for another word.

    A misspelling changes the length by one character at most, since `image_id` and
    `conversation_id` are words of their own.
    """
    if len(key) > max(map(len, known)) + 1:
        return None
    return _nearest(key.lower(), known)


@lru_cache(maxsize=4096)
def _nearest(key: str, known: frozenset[str]) -> str | None:
    alike = sorted(name for name in known if abs(len(name) - len(key)) <= 1)
    return next(iter(difflib.get_close_matches(key, alike, n=1, cutoff=SIMILAR)), None)


def suggestion(key: str, known: Collection[str]) -> str:
    """The key that was probably meant, or the known ones."""
    close = difflib.get_close_matches(key.lower(), sorted(known), n=1)
    return f"did you mean {close[0]!r}?" if close else f"expected {', '.join(sorted(known))}"


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        # A dict keeps the order of first places, so the two part at the first twin.
        twin = next(name for (name, _), own in zip_longest(pairs, values) if name != own)
        raise ValueError(f"the key {twin[:60]!r} stands twice in one object; expected once")
    return values


_DECODER = json.JSONDecoder(object_pairs_hook=_each_once)


def parse_json(text: str) -> Any:
    """The value.

    Raises:
        ValueError: no JSON, or a key twice in one object.
        RecursionError: nested too deeply.
    """
    return _DECODER.decode(text)


def as_utf8(text: str, where: str) -> bytes:
    """The bytes of a text.

    Raises:
        DataError: (schema) it has none.
    """
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError:
        raise schema_error(f"{where} has half of a surrogate pair, which is no text") from None


def parsed_text(text: str, where: str, kind: str = "JSON") -> Any:
    """The value of JSON that stands in a text.

    Raises:
        DataError: (schema) it is none.
    """
    try:
        return parse_json(text)
    except (ValueError, RecursionError) as error:
        raise schema_error(f"{where} is text that is no {kind}: {error}") from None


def listed(value: object, where: str) -> object:
    """A list of files, parsed where a table's cell holds it as JSON, since no path begins so.

    Raises:
        DataError: (schema) it begins so and is no JSON.
    """
    if isinstance(value, str) and value.startswith(('["', "[{")):
        return parsed_text(value, where)
    return value


def number_text(value: object) -> object:
    """A number or boolean as its JSON text. Other values, NaN and the infinities stay as they
    are."""
    if isinstance(value, float):
        return json.dumps(value) if math.isfinite(value) else value
    return json.dumps(value) if isinstance(value, int) else value
