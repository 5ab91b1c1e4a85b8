"""`verify` sees ids that are not those of `apply_chat_template`."""

from __future__ import annotations

from typing import Any

import pytest
from support.families import VISION_FAMILIES, tiny_family_folder
from support.images import conversation, file_of, picture
from support.shards import TINY_MODEL

from vlmpack.encode import Encoder
from vlmpack.encode.chat import ChatEncoder
from vlmpack.encode.sample import VLMSample
from vlmpack.proof.measure import Check
from vlmpack.proof.verify.answers import check_ids

PLAIN = conversation(("user", ["Is it?"]), ("assistant", ["Yes."]))
SHOWN = conversation(
    ("system", ["Be terse."]),
    ("user", [None, "Which?", None]),
    ("assistant", ["The first."]),
    ("user", ["Why?"]),
    ("assistant", ["It is red."]),
    images=tuple(file_of(picture(seed=seed)) for seed in range(2)),
)


def checked(encoder: Encoder, *samples: VLMSample) -> Check | None:
    return check_ids(encoder, [encoder.encode(sample) for sample in samples], samples)


@pytest.mark.cases(quick=("qwen2_5_vl", "gemma3"), slow=("internvl", "qwen3_5", "gemma4"))
@pytest.mark.parametrize("name", VISION_FAMILIES)
def test_conversations_have_the_ids_of_apply_chat_template(name: str, tmp_path: Any) -> None:
    encoder = Encoder(tiny_family_folder(name, tmp_path))
    spelt = conversation(("user", [encoder.chat.marker]), ("assistant", ["y"]))
    found = checked(encoder, PLAIN, SHOWN, spelt)
    assert found is not None and found.status == "pass"
    assert found.detail.startswith("2 of 3 conversations, as apply_chat_template has them from lis")


@pytest.mark.parametrize("sample", [PLAIN, SHOWN], ids=["text", "images"])
def test_another_text_fails(sample: VLMSample, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: the answer's words are altered on their way into ids."""
    tokenise = ChatEncoder._tokenise

    def altered(self: ChatEncoder, text: str, literals: bool) -> Any:
        return tokenise(self, text.replace("red", "rad").replace("Yes", "Yas"), literals)

    monkeypatch.setattr(ChatEncoder, "_tokenise", altered)
    found = checked(Encoder(TINY_MODEL), sample)
    assert found is not None and found.fails
    assert "made-up: token" in found.detail and "by apply_chat_template" in found.detail
