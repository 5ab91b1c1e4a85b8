"""Images written out in a conversation."""

from __future__ import annotations

from dataclasses import replace

import pytest

from vlmpack.encode.markers import write_out
from vlmpack.errors import DataError, ModelError
from vlmpack.families.qwen_vl import QWEN2_VL


def test_spans_move_with_the_images_before_them():
    text = "ask # and # say: yes, then #"
    answer = (text.index("yes"), text.index("yes") + 3)
    written = write_out(text, [answer], "#", ["<<one>>", "", "!"])
    assert written.text == "ask <<one>> and  say: yes, then !"
    assert [written.text[a:b] for a, b in written.spans] == ["yes"]
    assert [written.text[a:b] for a, b in written.images] == ["<<one>>", "", "!"]


def test_another_number_of_markers_is_a_bad_sample():
    with pytest.raises(DataError, match="made 1 image placeholders, the sample has 2 images"):
        write_out("one #", (), "#", ["a", "b"])


def test_a_tokenizer_without_the_feature_token_is_refused(encoder):
    family = replace(QWEN2_VL, around=("<|vision_start|>",))
    assert family.placeholder(encoder.tokenizer) == encoder.placeholder_id
    with pytest.raises(ModelError, match="no special token <image>, which this family writes"):
        replace(QWEN2_VL, around=("<image>",)).placeholder(encoder.tokenizer)
