"""An image and its caption, without a question.

    {"image": "0.png", "text": "A handwritten seven."}
    {"image": "0.png", "caption": "A handwritten seven."}

The user shows the image and says nothing; the caption is the answer. A pair of `.jpg` and `.txt` in
a shard is read so, too (members.py).
"""

from __future__ import annotations

from vlmpack.data.columns.cells import answer_of, answered, asked, has_value
from vlmpack.data.columns.layout import Layout, Turned, known_by
from vlmpack.data.shards.turns import named_images
from vlmpack.errors import schema_error

NAME = "caption"
CAPTIONS = ("caption", "text")
IMAGES = ("image", "images")


def turned(record: Turned) -> Turned:
    """The images as the user's turn, the caption as the answer.

    Raises:
        DataError: (schema) no image, no caption, or two.
    """
    given = [name for name in CAPTIONS if has_value(record.get(name))]
    if len(given) > 1 and record[given[0]] != record[given[1]]:
        raise schema_error(
            "the record has 'caption' and 'text', and not the same ones; expected one caption: "
            "data.columns: {text: caption}, say, reads that column alone"
        )
    caption = answer_of(record, given[0] if given else CAPTIONS[0], NAME)
    count = len(named_images(record))
    if not count:
        raise schema_error("the record has a caption and no image; expected 'image' or 'images'")
    rest = {key: value for key, value in record.items() if key not in CAPTIONS}
    return {**rest, "messages": [asked([{"type": "image"}] * count), answered(caption)]}


LAYOUT = Layout(
    name=NAME,
    whose="image and text pairs",
    signatures=tuple(known_by(image, caption) for image in IMAGES for caption in CAPTIONS),
    turned=turned,
    is_made=True,
)
