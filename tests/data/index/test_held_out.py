"""`data.validation: 2%`: which samples are held back, and that nothing trains them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.packed_splits import BUDGET, SIZES, PackEncoder, pack
from support.recorded import count_steps, launch
from support.shard_fakes import chat_json, image_bytes, open_data, write_shard

from vlmpack.data.index.held_out import NEVER, OPENING, held_out, opening_digest
from vlmpack.data.index.parts import BuildSettings
from vlmpack.data.index.shard_index import IndexBuilder, open_index
from vlmpack.data.loading.ledger import Ledger
from vlmpack.data.pipeline import TrainData
from vlmpack.encode.sample import VLMSample, said
from vlmpack.errors import EmptyDataError, PacksError, RunIdentityError
from vlmpack.proof.audit import audit_run
from vlmpack.recipe.data import OnErrorSection
from vlmpack.recipe.sources import Share, Source
from vlmpack.storage.fetch import LocalFetcher
from vlmpack.training.run_dir import RunDir

COUNT = 1500
TEXTS = [f"question {number}?" for number in range(COUNT)]


def lines(records: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def asked(text: str, answer: str = "yes") -> dict[str, Any]:
    return json.loads(chat_json(text, answer))


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """COUNT questions in one file, and the first 400 in two shards, in another order."""
    folder = tmp_path_factory.mktemp("held")
    (folder / "all.jsonl").write_text(lines([asked(text) for text in TEXTS]))
    for shard in range(2):
        some = [(f"{n:04d}", {"json": chat_json(TEXTS[n], "yes")}) for n in range(shard, 400, 2)]
        write_shard(folder / f"s-{shard}.tar", some[::-1])
    return folder


def opened(folder: Path, share: str | None, key: str = "train", **changes: Any) -> TrainData:
    name = changes.pop("name", "all.jsonl")
    split = {"validation": None if share is None else Share(share), "key": f"data.{key}"}
    return open_data(str(folder / name), folder / "index", **split, **changes)


def words(data: TrainData) -> list[str]:
    """What the samples of a split ask, in index order."""
    return [sample.messages[0].text for sample in data.samples()]


def held(folder: Path, share: str = "10%", **changes: Any) -> set[str]:
    return set(words(opened(folder, share, "validation", **changes)))


@pytest.mark.cases(quick=["2%"], slow=["0.5%", "10%", "50%"])
@pytest.mark.parametrize("share", ["0.5%", "2%", "10%", "50%"])
def test_each_sample_is_on_one_side_and_the_share_is_near(texts: Path, share: str) -> None:
    train, validation = words(opened(texts, share)), words(opened(texts, share, "validation"))
    assert Counter(train) + Counter(validation) == Counter(TEXTS)
    expected = COUNT * Share(share).fraction
    assert abs(len(validation) - expected) <= 3 * np.sqrt(expected)
    assert [text for text in TEXTS if text in set(train)] == train, "the others keep their order"


def test_a_larger_share_holds_back_the_same_and_more(texts: Path) -> None:
    small, large = held(texts, "2%"), held(texts, "5%")
    assert small < large


@pytest.mark.cases(quick=["1-window"], slow=["2-*", "1-global"])
@pytest.mark.parametrize("shuffle", ["global", "window"])
@pytest.mark.parametrize("seed", [1, 2])
def test_what_is_held_back_is_never_trained(
    texts: Path, shuffle: str, seed: int, small_windows: None
) -> None:
    validation = held(texts, name="s-*.tar")
    assert len(validation) > 20
    trained: list[str] = []
    data = opened(texts, "10%", name="s-*.tar", shuffle=shuffle, seed=seed)
    for rank in range(2):
        steps = 2 * data.epoch_length().num_steps
        for step in data.batches(data.start(), rank=rank, dp=2, max_steps=steps):
            for micro in step.micro_batches:
                trained += [TEXTS[int(sample.key)] for sample in micro.samples]
    assert data.epoch_length().exact
    assert Counter(trained) == dict.fromkeys(set(TEXTS[:400]) - validation, 2)
    evaluated = opened(texts, "10%", "validation", name="s-*.tar", shuffle=shuffle, seed=seed + 5)
    batches = [evaluated.eval_batches(rank=rank, dp=2) for rank in range(2)]
    keys = [sample.key for some in batches for micro in some for sample in micro.samples]
    assert sorted(TEXTS[int(key)] for key in keys) == sorted(validation)


def test_files_and_shards_hold_back_the_same(texts: Path) -> None:
    assert held(texts, name="s-*.tar") == held(texts) & set(TEXTS[:400]) != set()


def test_figures_are_of_one_side(texts: Path) -> None:
    limit = {"seq_length": 14, "over_long": "drop", "num_probed": 1}  # of 15 to 18 bytes some
    whole = opened(texts, None, **limit).summary()
    sides = [opened(texts, "10%", key, **limit).summary() for key in ("train", "validation")]
    assert whole.num_dropped > 100
    for name in ("num_samples", "num_usable", "num_dropped", "num_tokens", "epoch_samples"):
        assert sum(getattr(side, name) for side in sides) == getattr(whole, name), name
        assert all(getattr(side, name) for side in sides), name


def openings(path: Path, *, each_answer: bool = False) -> dict[str, int]:
    """What decides, by key, as the index has it."""
    settings = BuildSettings(directory=path.parent / "openings")
    [index] = open_index(
        [str(path)], IndexBuilder(LocalFetcher(), each_answer=each_answer), settings
    )
    return {row["key"]: row[OPENING] for row in index.table.to_pylist()}


def turns(*said: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(said)]


def test_what_asks_the_same_stays_together(tmp_path: Path) -> None:
    cat, dog = (image_bytes(30, 20, seed=seed) for seed in (1, 2))
    several = {"messages": turns("hello"), "branches": ["a", "b", "c"]}
    shown = {"messages": [{"role": "user", "content": [{"type": "image"}]}]}
    shown["branches"] = [turns(f"q{number}", "yes") for number in range(3)]
    pair = {"messages": turns("which?"), "chosen": "this", "rejected": "that"}
    text = {
        "once": {"messages": turns("hello", "hi")},
        "twin": {"messages": turns("hello", "hi")},
        "more": {"messages": turns("hello", "other", "and then?", "bye")},
        "several": several,
        "pair": pair,
        "pair2": pair | {"rejected": "no"},
        "other": {"messages": turns("hello!", "hi")},
    }
    records = [(key, {"json": json.dumps(value).encode()}) for key, value in text.items()]
    records += [
        ("cat", {"json": chat_json("what?", "cat", 1), "0.png": cat}),
        ("cat2", {"json": chat_json("where?", "mat", 1), "0.png": cat}),
        ("cats", {"json": json.dumps(shown).encode(), "0.png": cat}),
        ("dog", {"json": chat_json("what?", "dog", 1), "0.png": dog}),
        ("both", {"json": chat_json("what?", "two", 2), "0.png": cat, "1.png": dog}),
    ]
    found = openings(write_shard(tmp_path / "s-0.tar", records))
    assert len(found) == 10 + 3 + 3
    names: dict[int, set[str]] = {}
    for key, opening in found.items():
        names.setdefault(opening, set()).add(key.partition("#")[0])
    assert sorted(map(sorted, names.values())) == [
        ["both"],
        ["cat", "cat2", "cats"],
        ["dog"],
        ["more", "once", "several", "twin"],
        ["other"],
        ["pair", "pair2"],
    ]
    of_answers = openings(tmp_path / "s-0.tar", each_answer=True)
    assert len({of_answers["more#0"], of_answers["more#1"], found["more"]}) == 1


def test_each_answer_keeps_a_conversation_on_one_side(tmp_path: Path) -> None:
    records = [
        (f"{n:03d}", {"json": json.dumps({"messages": turns(f"q{n}", "a", "b", "c")}).encode()})
        for n in range(60)
    ]
    path = write_shard(tmp_path / "s-0.tar", records)
    found = openings(path, each_answer=True)
    assert len(found) == 120
    chosen = {key for key, opening in found.items() if opening < 2**63 * 0.3}
    assert 10 < len(chosen) < 60
    assert {key.partition("#")[0] + "#0" for key in chosen} <= chosen
    assert {key.partition("#")[0] + "#1" for key in chosen} <= chosen


def test_the_digest_is_uniform_and_its_rule_does_not_drift() -> None:
    samples = [VLMSample(key="", url="", messages=(said("user", str(n)),)) for n in range(20_000)]
    values = np.sort([opening_digest(sample, ()) / 2**63 for sample in samples])
    assert np.abs(values - np.linspace(0, 1, values.size)).max() < 1.63 / np.sqrt(values.size)
    of_images = [opening_digest(samples[0], (n,)) / 2**63 for n in range(2000)]
    assert abs(np.mean(np.array(of_images) < 0.1) - 0.1) < 0.02
    assert opening_digest(samples[7], ()) == 2448435994527035892, (
        "a change makes every share another one"
    )


@pytest.mark.cases(quick=["7"], slow=["8"])
@pytest.mark.parametrize("seed", [7, 8])
def test_a_resume_needs_the_same_share(texts: Path, seed: int) -> None:
    data = opened(texts, "10%", seed=seed)
    state = next(data.batches(data.start(), rank=0, dp=1, max_steps=1)).state
    assert data.admit(state) == state
    for other in ("20%", None):
        with pytest.raises(RunIdentityError, match="10%"):
            opened(texts, other, seed=seed, new_era=False).admit(state)


def test_a_share_is_drawn_once_whatever_the_weights(texts: Path) -> None:
    sources = tuple(
        Source(name=f"s{n}", path=str(texts / f"s-{n}.tar"), weight=weight)
        for n, weight in ((0, 1.0), (1, 3.0))
    )
    changes = {"sources": sources, "epoch_size": 500, "name": "s-*.tar"}
    validation = words(opened(texts, "10%", "validation", **changes))
    assert sorted(validation) == sorted(held(texts, name="s-*.tar"))
    train = opened(texts, "10%", **changes)
    drawn = {
        TEXTS[int(train.ref(number).key)]
        for batch in train.planned(train.start(), 40)
        for samples in batch.bins
        for number in samples
    }
    assert len(drawn) > 200 and not drawn & set(validation)


@pytest.mark.cases(quick=["shards"], slow="*")
@pytest.mark.parametrize("kind", ["plan", "tokens", "shards"])
def test_packs_lack_what_is_held_back(texts: Path, tmp_path: Path, kind: Any) -> None:
    values: dict[str, Any] = {"name": "s-*.tar", "encoder": PackEncoder(), **SIZES}
    made = opened(texts, "10%", mode="online", budget=BUDGET, shuffle="global", **values)
    manifest = pack(made, tmp_path / "packs", kind=kind)
    validation = held(texts, name="s-*.tar")
    assert manifest.num_samples == 400 - len(validation)
    values |= {"mode": "offline", "path": str(tmp_path / "packs"), "budget": BUDGET}
    data = opened(texts, "10%", **values)
    steps = data.epoch_length().num_steps
    trained = [
        TEXTS[int(sample.key)]
        for step in data.batches(data.start(), rank=0, dp=1, max_steps=steps)
        for micro in step.micro_batches
        for sample in micro.samples
    ]
    assert Counter(trained) == Counter(set(TEXTS[:400]) - validation)
    assert data.summary().num_samples == len(trained)
    for other in ("20%", None):
        with pytest.raises(PacksError, match=r"data\.validation: 10% in the packs"):
            opened(texts, other, **values)


def test_a_run_is_proven_by_its_own_side(texts: Path, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    data = opened(texts, "10%", name="s-*.tar", ledger=Ledger(run_dir.data_errors))
    steps = data.epoch_length().num_steps + 3
    launch(run_dir, data, data.start(), stop=steps, dp=2)
    assert count_steps(run_dir) == steps
    assert audit_run(run_dir, data).num_problems == 0
    other = audit_run(run_dir, opened(texts, "20%", name="s-*.tar"))
    assert other.num_problems, "a control: with another share it is not"


@pytest.mark.parametrize("key", ["train", "validation"])
def test_no_sample_on_a_side_is_named(tmp_path: Path, key: str) -> None:
    (tmp_path / "all.jsonl").write_text(lines([asked(f"q{n}") for n in range(9)]))
    with pytest.raises(EmptyDataError, match=r"data\.validation: 0\.01% of the 9 samples .* Raise"):
        opened(tmp_path, "0.01%", key)
    same = [asked("always the same", str(n)) for n in range(40)]
    (tmp_path / "all.jsonl").write_text(lines(same))
    with pytest.raises(EmptyDataError, match="are on one side"):
        opened(tmp_path, "50%", key)


@pytest.mark.parametrize("shuffle", ["global", "window"])
def test_bad_records_are_not_held_back(tmp_path: Path, shuffle: str) -> None:
    good = [(f"{n:03d}", {"json": chat_json(f"q{n}", "a")}) for n in range(80)]
    bad = [(f"{n:03d}", {"json": b"{}"}) for n in range(80, 160)]
    write_shard(tmp_path / "s-0.tar", good + bad)
    skips: dict[str, Any] = {"on_error": OnErrorSection(schema="skip"), "name": "s-0.tar"}
    sides = [
        opened(tmp_path, "50%", key, shuffle=shuffle, **skips) for key in ("train", "validation")
    ]
    train, validation = (side.summary() for side in sides)
    assert train.num_usable + validation.num_usable == 80
    assert (train.num_bad, validation.num_bad) == ({"schema": 80}, {})
    fitted = sides[1].fitted
    assert not (fitted.eligible & fitted.table.bad).any()


def test_a_fraction_is_a_threshold_and_a_bad_record_is_above_each() -> None:
    openings = np.asarray([0, 2**62 - 1, 2**62, NEVER, 2**63 - 1])
    assert held_out(openings, 0.02).tolist() == [True, False, False, False, False]
    assert held_out(np.tile(openings, 2), 0.5).tolist() == [True, True, False, False, False] * 2
    assert held_out(openings[:0], 0.5).tolist() == []
