"""Text behind a video of Qwen2-VL and Qwen2.5-VL: in training, in `generate`, in `verify`."""

from __future__ import annotations

import random

import pytest
import torch
from support.families import tiny_family_folder
from support.shards import TINY_MODEL
from support.stock import load_stock
from support.verified import Subject, failed
from support.videos import Shot, Told

from vlmpack.encode import Encoder
from vlmpack.evaluation.generation import answer_questions
from vlmpack.evaluation.predictions import Question
from vlmpack.families.base import stock_arguments
from vlmpack.families.qwen_video import behind_videos
from vlmpack.families.qwen_vl import QwenVL
from vlmpack.proof.stock import counted_positions

SIZE = (112, 112)
LONG = Told("long", (Shot(SIZE, 16, fps=1.0), "What is the last digit shown?"), "Seven.")
SHORT = Told("text", ("No picture, but enough words to be longer than a few.",), "Right.")
BOTH = Told(
    "both",
    (SIZE, "a", Shot(SIZE, 20, fps=0.7), "b", Shot(SIZE, 6, fps=8.0, seed=2), SIZE, "c"),
    "abcdef",
)


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen2_vl"])
def folder(request, tmp_path_factory):
    if request.param == "qwen2_5_vl":
        return TINY_MODEL
    return tiny_family_folder(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def encoder(folder):
    return Encoder(folder)


@pytest.fixture(scope="module")
def model(folder):
    return load_stock(folder).eval()


def by_the_paper(encoder, sample):
    """(3, s) token by token, as transformers 4.57 counts: no formula of ours."""
    rate = encoder.family.tokens_per_second
    shown = zip(sample.media.grid_thw, sample.media.seconds or (None,) * 9, strict=False)
    ids, found, begin = sample.input_ids.tolist(), [], 0
    while len(found) < len(ids):
        if ids[len(found)] not in encoder.placeholder_ids:
            new = [(begin, begin, begin)]
        else:
            (t, h, w), seconds = next(shown)
            step = 1 if seconds is None or rate is None else seconds * rate
            new = [
                (begin + int(time * step), begin + y, begin + x)
                for time in range(t)
                for y in range(h // 2)
                for x in range(w // 2)
            ]
        found += new
        begin = max(max(each) for each in new) + 1
    return torch.tensor(found).T


def stock_positions(model, encoder, sample):
    """(3, s) by `get_rope_index` of the installed class."""
    given = stock_arguments(encoder.family, sample, **encoder.placeholders)
    return counted_positions(model.model, given), given["mm_token_type_ids"]


def test_text_goes_on_behind_all_axes_of_a_video(encoder, model):
    sample = encoder.encode(LONG.cooked())
    assert torch.equal(sample.position_ids, by_the_paper(encoder, sample))
    video = sample.input_ids == encoder.video_id
    behind = sample.position_ids[:, int(video.nonzero()[-1]) + 1]
    assert behind.tolist() == [int(sample.position_ids[:, video].max()) + 1] * 3
    stock, kinds = stock_positions(model, encoder, sample)
    assert torch.equal(behind_videos(stock[:, None], kinds)[:, 0], sample.position_ids)
    # What is moved: text inside the video's time.
    inside = stock[0, int(video.nonzero()[-1]) + 1 :]
    assert int(inside[0]) < int(stock[0, video].max()), "transformers counts as the paper now"
    if encoder.family.tokens_per_second is not None:
        begin = int(stock[0, video].min())
        assert (int(inside[0]) - begin, int(behind[0]) - begin) == (4, 29)


@pytest.mark.slow
def test_positions_of_random_rows_are_the_papers_and_those_of_the_class_moved(encoder, model):
    draw, moved = random.Random(0), 0
    for number in range(24):
        asked = []
        for _ in range(draw.randint(1, 3)):
            size = (28 * draw.randint(2, 5), 28 * draw.randint(2, 5))
            shot = Shot(size, draw.randint(1, 14), fps=draw.choice((0.3, 1.0, 2.0, 29.97)))
            asked += [draw.choice((size, shot)), "words " * draw.randint(1, 3)]
        sample = encoder.encode(Told(str(number), tuple(asked), "abc").cooked())
        assert torch.equal(sample.position_ids, by_the_paper(encoder, sample))
        stock, kinds = stock_positions(model, encoder, sample)
        assert torch.equal(behind_videos(stock[:, None], kinds)[:, 0], sample.position_ids)
        moved += not torch.equal(stock, sample.position_ids)
    assert 4 < moved < 24


def test_rows_of_a_padded_batch_are_moved_alone():
    """Padding at the left, a row without a video, and one that ends in its video."""
    kinds = torch.tensor([[0, 0, 2, 2, 0, 0], [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 2, 2]])
    positions = torch.tensor([[[0, 0, 1, 6, 2, 3], [0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 9]]]).expand(
        3, -1, -1
    )
    moved = behind_videos(positions, kinds)
    assert moved[0].tolist() == [[0, 0, 1, 6, 7, 8], [0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 9]]


@pytest.mark.cases(slow=("qwen2_5_vl-padded", "qwen2_vl-padded"))
@pytest.mark.parametrize("told", [(LONG,), (BOTH, SHORT, LONG)], ids=["alone", "padded"])
def test_generate_puts_the_next_token_where_training_does(encoder, folder, model, told):
    """Positions of the prompt and of the first new tokens; also in a batch padded at the left."""
    seen = []
    hook = model.model.language_model.register_forward_pre_hook(
        lambda _, args, given: seen.append(given["position_ids"][-3:]), with_kwargs=True
    )
    questions = [Question.from_sample(each.cooked()) for each in told]
    try:
        answers = answer_questions(model, encoder, questions, batch_size=4, max_new_tokens=3)
    finally:
        hook.remove()
    samples = {each.key: encoder.encode(each.cooked()) for each in told}
    prompts = {key: int((one.labels != -100).nonzero()[0]) + 1 for key, one in samples.items()}
    by_length = sorted(told, key=lambda each: -prompts[each.key])
    width = prompts[by_length[0].key]
    for row, each in enumerate(by_length):
        prompt, trained = prompts[each.key], samples[each.key].position_ids
        assert torch.equal(seen[0][:, row, width - prompt :], trained[:, :prompt])
        for step, positions in enumerate(seen[1:]):
            assert torch.equal(positions[:, row, 0], trained[:, prompt + step])
    assert len(seen) > 1  # the trained one may end there
    assert None not in answers


@pytest.mark.cases(slow="qwen2_5_vl")
def test_verify_passes_and_names_what_it_moved(folder, monkeypatch):
    subject = Subject(folder, [LONG, SHORT])
    checks = subject.checks()
    assert failed(checks) == set()
    assert "moved behind its time (docs/video.md)" in checks["positions"].detail
    # Trained as transformers 5 counts, the same samples are found.
    own = QwenVL.positions

    def inside(self, num_tokens, starts, media, seconds=()):
        found = own(self, num_tokens, starts, media, seconds)
        for start, (t, h, w) in zip(starts, media, strict=True):
            stop = start + t * h * w // 4
            found[:, stop:] -= found[:, stop].min() - found[1, start] - max(h, w) // 2
        return found

    monkeypatch.setattr(QwenVL, "positions", inside)
    found = failed(Subject(folder, [LONG, SHORT]).checks())
    assert {"positions", "loss of each sample"} <= found
