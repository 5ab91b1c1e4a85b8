"""Patterns become a list of shards, or one error that names the recipe's key."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import quote

import pytest

from vlmpack.errors import RecipeError
from vlmpack.storage.sources import expand_shards


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    for name in ("x-000.tar", "x-001.tar", "x-010.tar", "y a#1.tar"):
        (tmp_path / name).write_bytes(b"")
    return tmp_path


def names(found: tuple[str, ...]) -> list[str]:
    return [Path(path).name for path in found]


def test_plain_brace_glob_and_file_urls(shards: Path) -> None:
    expand = lambda pattern: names(expand_shards([str(pattern)], key="data.train"))  # noqa: E731
    assert expand(shards / "x-000.tar") == ["x-000.tar"]
    assert expand(shards / "x-{000..001}.tar") == ["x-000.tar", "x-001.tar"]
    assert expand(shards / "x-{001,010,000}.tar") == ["x-001.tar", "x-010.tar", "x-000.tar"]
    assert expand(shards / "x-0{0..1}{0..0}.tar") == ["x-000.tar", "x-010.tar"]
    assert expand(shards / "x-*.tar") == ["x-000.tar", "x-001.tar", "x-010.tar"]
    assert expand(f"file://{shards}/x-00*.tar") == ["x-000.tar", "x-001.tar"]
    assert expand(f"file://{shards}/y%20a%231.tar") == ["y a#1.tar"]


@pytest.mark.parametrize(
    "name",
    ["x[01].tar", "x{0,1}.tar", "x{0}.tar", "x{3..1}.tar", "x*.tar", "x?.tar", "x[.tar", "x}{.tar"],
)
def test_a_file_that_is_there_wins_over_its_pattern(tmp_path: Path, name: str) -> None:
    for other in ("x0.tar", "x1.tar", "xx.tar"):
        (tmp_path / other).write_bytes(b"")
    (tmp_path / name).write_bytes(b"")
    assert names(expand_shards([str(tmp_path / name)], key="k")) == [name]
    assert names(expand_shards([f"file://{tmp_path}/{quote(name)}"], key="k")) == [name]
    (tmp_path / name).unlink()
    try:
        assert name not in names(expand_shards([str(tmp_path / name)], key="k"))
    except RecipeError as error:
        assert any(word in str(error) for word in ("missing", "matches no file", "braces", "range"))


@pytest.mark.parametrize("folder", ["run[1]", "run{1}", "run{1,2}", "run*"])
def test_a_folder_that_is_there_wins_over_its_pattern(tmp_path: Path, folder: str) -> None:
    for place in (folder, "run1", "run2", f"deep/{folder}", "deep/run1"):
        (tmp_path / place).mkdir(parents=True)
        for number in range(2):
            (tmp_path / place / f"x-{number}.tar").write_bytes(b"")

    def found(pattern: str) -> list[str]:
        paths = expand_shards([str(tmp_path / pattern)], key="k")
        return [str(Path(path).relative_to(tmp_path)) for path in paths]

    for pattern in (f"{folder}/*-[01].tar", f"{folder}/x-{{0..1}}.tar"):
        assert found(pattern) == [f"{folder}/x-0.tar", f"{folder}/x-1.tar"]
        assert found(f"deep/{pattern}") == [f"deep/{folder}/x-0.tar", f"deep/{folder}/x-1.tar"]
    if "{" not in folder:  # braces do not nest
        assert found(f"{{.,deep}}/{folder}/*-0.tar") == [
            f"{folder}/x-0.tar",
            f"deep/{folder}/x-0.tar",
        ]
    assert len(found("run[12]/*.tar")) == 4, "a pattern that nothing has for a name stays one"


def test_relative_paths_become_absolute(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shards)
    assert expand_shards(["x-000.tar"], key="k") == (str(shards / "x-000.tar"),)


def test_a_pipe_is_named_and_not_called_missing(tmp_path: Path) -> None:
    pipe = tmp_path / "a.jsonl"
    with pytest.raises(RecipeError, match="matches no file"):
        expand_shards([str(pipe)], key="data.train")
    os.mkfifo(pipe)
    reason = "a.jsonl' is a pipe, a socket or a device; expected a regular file"
    with pytest.raises(RecipeError, match=reason):
        expand_shards([str(pipe)], key="data.train")


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("x-{0..3}.tar", r"data.train: 'x-\{0..3\}.tar' matches no file"),
        ("nothing-*.tar", "data.train: 'nothing-.*' matches no file"),
        ("x-{000..002}.tar", "2 files, but these are missing: 'x-002.tar'"),
        ("pipe:cat x-000.tar", "never run"),
        ("pipe:curl http://a/b.tar", "never run"),
        ("ftp://host/x.tar", "scheme 'ftp:'"),
        ("s3://bucket/", "names no shard"),
        ("s3://x.tar", "names no shard"),
        ("s3:///", "names no shard"),
        ("s3:///abs/x-*.tar", "needs a name before the first '/'; expected s3://NAME/abs/x-"),
        ("s3://buck*/x.tar", "glob in the name of the bucket"),
        ("https://host/x-*.tar", "cannot be listed; write the shards out"),
        ("hf://datasets/a/b/x-?.tar", "cannot be listed; write the shards out"),
        ("FILE://other/x.tar", "names the host 'other'"),
        ("x-{3..1}.tar", "empty range"),
        ("x-{abc}.tar", "neither a range nor a list"),
        ("x-{0..99999999}.tar", "at most"),
        (".", "is a folder"),
    ],
)
def test_bad_patterns(
    shards: Path, monkeypatch: pytest.MonkeyPatch, pattern: str, reason: str
) -> None:
    monkeypatch.chdir(shards)
    with pytest.raises(RecipeError, match=reason):
        expand_shards([pattern], key="data.train")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("train.jsonl.gz", "is compressed, and compressed shards are not read"),
        ("train.tar.gz", "is compressed, and compressed shards are not read"),
        ("TRAIN.TXT", "is no tar shard, and no file of records"),
        ("train.yaml", "is no tar shard"),
        ("7.png", "is an image; name the file of records"),
        ("7.JPEG", "is an image; name the file of records"),
    ],
)
def test_files_that_are_no_shards_are_named_before_any_is_opened(
    shards: Path, name: str, reason: str
) -> None:
    (shards / name).write_bytes(b"")
    for pattern in (name, "*[!r]", "{x-000.tar," + name + "}"):
        with pytest.raises(RecipeError, match=f"data.train: '.*{name}' {reason}"):
            expand_shards([str(shards / pattern)], key="data.train")
    address = f"https://host/{name}?${{env:SIGNATURE}}"
    with pytest.raises(RecipeError, match=rf"{re.escape(address)}' {reason}"):
        expand_shards([address], key="data.train")
    assert expand_shards(["https://host/x.tar?file=x.jsonl"], key="k")


def test_all_problems_at_once(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shards)
    with pytest.raises(RecipeError) as caught:
        expand_shards(["a.tar", "ftp://b/c.tar", "x-000.tar", "./x-000.tar"], key="data.train")
    assert len(caught.value.problems) == 3
    assert "named twice" in caught.value.problems[2]


def test_no_pattern_is_an_error() -> None:
    with pytest.raises(RecipeError, match="names no shard"):
        expand_shards([], key="data.train")


def test_addresses_keep_their_order_and_their_references() -> None:
    assert expand_shards(
        ["s3://b/x-{00..01}.tar", "https://${env:U}:${env:P}@h/{a,b}.tar?${env:SIG}"], key="k"
    ) == (
        "s3://b/x-00.tar",
        "s3://b/x-01.tar",
        "https://${env:U}:${env:P}@h/a.tar?${env:SIG}",
        "https://${env:U}:${env:P}@h/b.tar?${env:SIG}",
    )


@pytest.mark.parametrize(
    "address",
    [
        "https://user:canary@host/x.tar",
        "s3://canary:canary@bucket/x.tar",
        "https://host/x.tar?X-Amz-Signature=canary&b=1",
        "https://host/x.tar?sig=canary",
        "https://host/{a,b}.tar?access_token=canary",
    ],
)
def test_an_address_with_a_secret_is_refused_without_quoting_it(address: str) -> None:
    with pytest.raises(RecipeError, match=r"\$\{env:NAME\}") as caught:
        expand_shards([address], key="data.train")
    assert "canary" not in str(caught.value)
