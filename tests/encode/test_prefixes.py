"""A cut is behind the images and before every label; equal digests are equal beginnings."""

from __future__ import annotations

import json
import pickle
import shutil
from dataclasses import replace
from itertools import accumulate

import pytest
import torch
from support.answers import asks, dropping_folder, replies
from support.pairs import cooked_pair, raw_pairs
from support.shards import TINY_MODEL, RawSample, with_answer

from vlmpack.data.shards.samples import cook_texts
from vlmpack.encode import Encoder
from vlmpack.encode.assemble import Tokens
from vlmpack.encode.prefixes import image_digest, prefixes_of
from vlmpack.errors import PackingError
from vlmpack.families.base import ImageLayout
from vlmpack.packing import IGNORE_INDEX, pack_batch_sequences
from vlmpack.packing.pairs import sequences_of


@pytest.fixture(scope="module")
def cutting():
    return Encoder(TINY_MODEL).replace(share_prefix=True)


@pytest.fixture(scope="module")
def cutting_pairs():
    return Encoder(TINY_MODEL).replace(pairs=True, share_prefix=True)


def asked(raw: RawSample, text: str) -> RawSample:
    """Another question about the same images."""
    turns = [{**turn, "content": list(turn["content"])} for turn in raw.messages]
    turns[0]["content"].append({"type": "text", "text": text})
    return with_answer(RawSample(text, turns, raw.images), text)


def test_pairs_are_cut_behind_their_images_and_before_the_first_label(cutting_pairs):
    for chosen, rejected in raw_pairs():
        pair = cutting_pairs.encode(cooked_pair(chosen, rejected))
        parts = sequences_of(pair)
        lengths = [prefix.length for prefix in pair.prefixes]
        first = min(int((part.labels != IGNORE_INDEX).nonzero()[0, 0]) for part in parts)
        assert lengths[-1] == first, "the token that predicts the first one stands in each"
        heads = [part.input_ids[:first].tolist() for part in parts]
        assert heads[0] == heads[1]
        if pair.media is None:
            assert len(lengths) == 1
        else:
            assert lengths[0] == int(parts[0].media_positions[-1]) + 1


def test_questions_about_one_image_begin_alike(cutting):
    raw = raw_pairs()[2][0]
    one, other = (cutting.encode(asked(raw, text).cooked()) for text in ("how", "where to"))
    assert len(one.prefixes) == 1
    assert one.prefixes == other.prefixes
    head = one.prefixes[0].length
    assert torch.equal(one.input_ids[:head], other.input_ids[:head])
    assert torch.equal(one.position_ids[:, :head], other.position_ids[:, :head])
    assert int(one.media_positions[-1]) == head - 1
    assert (one.labels[:head] == IGNORE_INDEX).all()
    assert (other.input_ids[head:] != IGNORE_INDEX).all()
    elsewhere = cutting.encode(raw_pairs()[5][0].cooked())
    assert elsewhere.prefixes[0].digest != one.prefixes[0].digest


def test_branches_of_an_image_behind_other_turns_are_cut_behind_it(cutting):
    raw = raw_pairs()[2][0]
    picture = {"role": "user", "content": [{"type": "image"}]}
    before = [{"role": "system", "content": "Be brief."}, picture]
    branches = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": "a"}]
        for text in ("how", "where to")
    ]
    record = json.dumps({"messages": before, "branches": branches}).encode()
    texts = cook_texts("k", "s.tar", record, ("json", "0.png"))
    assert [text.sample.num_common for text in texts] == [1, 1], "the system's turn alone is whole"
    found = [cutting.encode(replace(t.sample, images=raw.images[:1])) for t in texts]
    (prefix,) = found[0].prefixes
    assert found[1].prefixes == (prefix,)
    assert prefix.length == int(found[0].media_positions[-1]) + 1


BEFORE = [
    {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Look."}]},
    {"role": "assistant", "content": "Yes"},
]


def branches_of(texts):
    """The samples of one record whose branches ask these after an answer of the assistant."""
    branches = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": "a"}] for text in texts
    ]
    record = json.dumps({"messages": BEFORE, "branches": branches}).encode()
    image = raw_pairs()[2][0].images[:1]
    cooked = cook_texts("k", "s.tar", record, ("json", "0.png"))
    return [replace(text.sample, images=image) for text in cooked]


def test_branches_share_their_turns_however_they_begin(cutting):
    found = [cutting.encode(one) for one in branches_of(["how", ".5 or 5?", "...", " .", "!", "a"])]
    behind_image, behind_turns = found[0].prefixes
    assert behind_turns.length > behind_image.length
    assert {one.prefixes for one in found} == {(behind_image, behind_turns)}
    ends = found[0].input_ids[: behind_turns.length]
    assert cutting.tokenizer.decode(ends).endswith("<|im_start|>user\n")


@pytest.fixture
def joining(tmp_path):
    """A model folder whose tokenizer makes one token of two line breaks."""
    folder = tmp_path / "joining"
    shutil.copytree(TINY_MODEL, folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    break_ = "\u010a"
    model = tokenizer["model"]
    assert [break_, break_] not in model["merges"]
    model["merges"].append([break_, break_])
    model["vocab"][break_ * 2] = 1 + max(
        *model["vocab"].values(), *(token["id"] for token in tokenizer["added_tokens"])
    )
    path.write_text(json.dumps(tokenizer))
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["vocab_size"] += 1  # no weights are loaded here
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_token_across_a_fork_is_the_sample_s_own(joining):
    """The line break before a branch and the one that it begins with are one token: nothing of it
    is cut, and each sample of the row has the ids that it has alone."""
    samples = branches_of(["how", "\nhow", "\nwhere", "who"])
    encoder = Encoder(joining)
    found = [encoder.replace(share_prefix=True).encode(one) for one in samples]
    alone = [encoder.encode(one).input_ids for one in samples]
    joined = encoder.tokenizer("\n\n").input_ids
    assert len(joined) == 1
    assert [joined[0] in ids.tolist() for ids in alone] == [False, True, True, False]
    lengths = [one.prefixes[-1].length for one in found]
    assert lengths == [lengths[0], lengths[0] - 1, lengths[0] - 1, lengths[0]]
    row = pack_batch_sequences(found, pad_token_id=encoder.pad_token_id, share_prefix=True)
    assert row.num_shared_tokens > 0
    ends = [*accumulate(row.segment_lengths)]
    parts = [
        row.input_ids[0, end - length : end]
        for end, length in zip(ends, row.segment_lengths, strict=True)
    ]
    for path, ids in zip(row.segments_of_sequences, alone, strict=True):
        assert torch.equal(torch.cat([parts[place] for place in path]), ids)
    inside_the_token = (found[1].prefixes[0], found[0].prefixes[-1])
    wrong = replace(found[1], prefixes=inside_the_token)
    with pytest.raises(PackingError, match="but other tokens, positions or images in it"):
        pack_batch_sequences(
            [found[0], wrong], pad_token_id=encoder.pad_token_id, share_prefix=True
        )


def test_each_answer_goes_on_from_the_question_before_it(tmp_path):
    """Thoughts of earlier turns are dropped; what is left is shared, and lengths know it."""
    encoder = Encoder(dropping_folder(TINY_MODEL, tmp_path / "m")).replace(
        learn="each_answer", share_prefix=True
    )
    turns = []
    for number in range(3):
        turns += [asks(f"{number}?", image=not number), replies("hm", f"it is {number}")]
    image = raw_pairs()[2][0].images[:1]
    document = json.dumps({"messages": turns}).encode()
    texts = cook_texts("k", "s.tar", document, ("json", "0.png"), each_answer=True)
    samples = [replace(text.sample, images=image) for text in texts]
    first, second, third = (encoder.encode(one) for one in samples)
    sizes = raw_pairs()[2][0].sizes[:1]
    for sample, encoded in zip(samples, (first, second, third), strict=True):
        assert encoder.prefixes(sample, sizes, [image_digest(image[0])]) == encoded.prefixes
        ends = encoded.prefixes[-1].length
        assert (encoded.labels[:ends] == IGNORE_INDEX).all()
    behind_image, question = first.prefixes
    assert (
        second.prefixes[:2] == (behind_image, question) and third.prefixes[1] == second.prefixes[2]
    )
    assert len(second.prefixes) == 3 and len(third.prefixes) == 2, (
        "nothing goes on from the last one"
    )
    row = pack_batch_sequences(
        [first, second, third], pad_token_id=encoder.pad_token_id, share_prefix=True
    )
    assert row.prefix_tree.parents == (-1, 0, 0, 2, 2)
    assert row.num_shared_tokens == question.length + second.prefixes[2].length


def test_a_sibling_that_the_template_refuses_leaves_the_other_cuts(tmp_path):
    folder = dropping_folder(TINY_MODEL, tmp_path / "m")
    path = folder / "chat_template.jinja"
    refuse = "{% if messages[-1].content in ('.', '!') or messages[-1].content[0].text == '.' %}"
    path.write_text(refuse + "{{ raise_exception('no') }}{% endif %}" + path.read_text())
    encoder = Encoder(folder).replace(learn="each_answer", share_prefix=True)
    turns = [asks("a"), replies("x", "A"), asks("b"), replies("y", "B"), asks("c")]
    turns.append(replies("z", "C"))
    document = json.dumps({"messages": turns}).encode()
    texts = cook_texts("k", "s.tar", document, ("json",), each_answer=True)
    assert [len(encoder.encode(text.sample).prefixes) for text in texts] == [1, 1, 0]


def test_no_cut_without_images_nor_behind_a_label(cutting):
    text = raw_pairs()[1][0]
    assert cutting.encode(text.cooked()).prefixes == ()
    image = ImageLayout(grid=(1, 4, 4), text="<i>", runs=(4,))
    late = Tokens([5, 6, 7, 9, 8, 2], [False, True, True, False, False, True], 9)
    assert prefixes_of([late], [image], [b"d"], [(8, 8)]) == ()
    early = late._replace(supervised=[False, False, False, False, False, True])
    assert [prefix.length for prefix in prefixes_of([early], [image], [b"d"], [(8, 8)])] == [7]


def test_digests_are_of_tokens_images_and_their_sizes():
    image = ImageLayout(grid=(1, 4, 4), text="<i>", runs=(4,))
    taught = [False, False, False, False, True]

    def digest(ids=(5, 9, 6, 7, 8), data=b"d", size=(8, 8)):
        tokens = Tokens(list(ids), taught, 9)
        (prefix,) = prefixes_of([tokens], [image], [image_digest(data)], [size])
        return prefix.digest

    assert digest() == digest(ids=(5, 9, 6, 6, 8)), "what is behind the cut has no part"
    assert len({digest(), digest(ids=(4, 9, 6, 7, 8)), digest(data=b"e"), digest(size=(8, 9))}) == 4


def test_an_image_of_an_answer_leaves_nothing_to_share():
    image = ImageLayout(grid=(1, 4, 4), text="<i>", runs=(4,))
    both = [Tokens([5, 6, last, 9], [False, False, False, True], 9) for last in (7, 8)]
    assert prefixes_of(both, [image], [b"d"], [(8, 8)]) == ()


def test_cuts_are_made_on_demand_in_workers_too(cutting_pairs):
    pair = cooked_pair(*raw_pairs()[0])
    plain = Encoder(TINY_MODEL).replace(pairs=True)
    assert plain.encode(pair).prefixes == ()
    there = pickle.loads(pickle.dumps(cutting_pairs))
    assert there.encode(pair).prefixes == cutting_pairs.encode(pair).prefixes != ()
    assert there.fingerprint == plain.fingerprint, "ids are the same"
    bare = replace(cutting_pairs.encode(pair), prefixes=())
    assert torch.equal(bare.input_ids, plain.encode(pair).input_ids)
