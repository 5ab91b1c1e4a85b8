"""Numbers as people read them."""

from __future__ import annotations

import pytest

from vlmpack.words import duration, meant_path, shape_of, some_of, twice


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (1e-9, "0 s"),
        (2.5e-6, "0.00250 ms"),
        (0.0004, "0.400 ms"),
        (0.0123, "12.3 ms"),
        (0.012, "12.0 ms"),
        (0.1, "100 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (1, "1.00 s"),
        (1.04, "1.04 s"),
        (7.41, "7.41 s"),
        (9.994, "9.99 s"),
        (9.996, "10.0 s"),
        (45.2, "45.2 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 00 s"),
        (185, "3 min 05 s"),
        (3599.4, "59 min 59 s"),
        (3599.6, "1 h 00 min"),
        (7620, "2 h 07 min"),
        (47.99 * 3600, "47 h 59 min"),
        (47.999 * 3600, "2.0 days"),
        (76 * 3600, "3.2 days"),
    ],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_steps_that_a_plan_ranks_are_told_apart() -> None:
    """Each three digits, up to where they are minutes; none as a power of ten."""
    said = [duration(10 ** (n / 200)) for n in range(-1000, 355)]
    assert len(set(said)) == len(said)
    assert not [text for text in said if "e" in text]


def test_no_duration_is_a_thousand_milliseconds() -> None:
    near = [duration(0.9995 + n * 2**-53) for n in range(-8, 9)]
    assert near[0] == "999 ms" and near[-1] == "1.00 s"
    assert set(near) == {"999 ms", "1.00 s"}


class Asked(str):
    """A name that counts how often it is compared with another."""

    __slots__ = ()
    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Asked.compared += 1
        return str.__eq__(self, other)


def test_names_that_stand_twice_are_found_without_comparing_each_with_each() -> None:
    names = [Asked(f"k{n % 4000}") for n in range(4003)]
    Asked.compared = 0
    assert twice(names) == ["k0", "k1", "k2"]
    assert Asked.compared < 100
    assert twice(["a", "b", "a", "c", "b", "a"]) == ["a", "b"] and twice([]) == []


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("image 3 ('a.png') is cut", "image 12 ('b c.png') is cut", True),
        ("the processor's 'a' isn't there", "the processor's 'b' isn't there", True),
        ("the processor's 'a' isn't there", "the processor's 'a' isn't whole", False),
        ('the key "it\'s" is no role', 'the key "its" is no role', True),
        ("has no 'a'", "lacks 'a'", False),
    ],
)
def test_the_shape_of_a_message_has_no_numbers_and_names(one, other, alike):
    assert (shape_of(one) == shape_of(other)) is alike


def test_a_path_that_is_not_there_is_compared_with_what_is(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "assets" / "Digits").mkdir(parents=True)
    (tmp_path / "assets" / "Digits" / "train-0.tar").touch()
    said = "; did you mean 'assets/Digits/train-0.tar'?"
    for path in (
        "asets/digits/train-0.tar",
        "assets/Digits/trian-*.tar",
        "asset/Digit/train-1.tar",
    ):
        assert meant_path(path) == said, path
    assert meant_path("asset/Digits/train-*.tar") == "; did you mean 'assets/Digits/train-*.tar'?"
    for path in (
        "assets/Digits",
        "assets/Digits/*.tar",
        "assets/letters/x.tar",
        "a\0b",
        "",
        "/x/y",
    ):
        assert meant_path(path) == "", path


def test_of_many_names_the_first_are_said_and_the_rest_counted() -> None:
    assert some_of("abcd") == "a, b, c, d"
    assert some_of("abcdef") == "a, b, c, d and 2 more"
    assert some_of([1, 2, 3], limit=1) == "1 and 2 more" and some_of([]) == ""
