"""Rules about sources, splits and images; `rules.py` says what a rule is and runs them."""

from __future__ import annotations

from math import isfinite

from vlmpack.recipe.data import DataSection
from vlmpack.recipe.images import ImagesSection
from vlmpack.recipe.problems import Problem
from vlmpack.recipe.schema import EvaluationSection


def weights_are_complete(data: DataSection) -> list[Problem]:
    """Weights are shares of each other: all sources have one, or none has."""
    bare = [source.name for source in data.train if source.weight is None]
    if len(bare) in (0, len(data.train)):
        return []
    message = (
        f"{len(bare)} of {len(data.train)} sources have no weight ({', '.join(bare)}); weights "
        "are shares of the draws, so give all sources one, or none"
    )
    return [Problem(("data", "train"), message)]


def weights_are_for_training(data: DataSection) -> list[Problem]:
    """Evaluation reads each sample once."""
    return [
        Problem(
            ("data", split, index, "weight"),
            f"{source.weight:g}, but weights blend data.train only; "
            f"data.{split} is read once, sample by sample",
        )
        for split, sources in data.splits().items()
        for index, source in enumerate(sources)
        if split != "train" and source.weight is not None
    ]


def epoch_size_needs_weights(data: DataSection) -> list[Problem]:
    """Without blending, an epoch is every sample once."""
    if data.epoch_size is None or any(source.weight is not None for source in data.train):
        return []
    message = (
        f"{data.epoch_size}, but without weights in data.train an epoch is every sample once; "
        "leave it out, or give each source a weight"
    )
    return [Problem(("data", "epoch_size"), message)]


def tokens_need_weights(data: DataSection) -> list[Problem]:
    """Without blending there is nothing to count by tokens."""
    if data.weights == "samples" or any(source.weight is not None for source in data.train):
        return []
    message = (
        f"{data.weights}, but no source of data.train has a weight; leave it out, or give each "
        "source a weight"
    )
    return [Problem(("data", "weights"), message)]


def variables_are_plain(data: DataSection) -> list[Problem]:
    """A variable of the chat template is a value, or a list of some."""
    return [
        Problem(
            ("data", "chat_template_kwargs", name),
            f"{value!r}; expected true or false, a number, a text, or a list of such",
        )
        for name, value in data.chat_template_kwargs.items()
        if not all(map(_is_plain, value if isinstance(value, list) and value else [value]))
    ]


def _is_plain(value: object) -> bool:
    return isinstance(value, bool | int | str) or (isinstance(value, float) and isfinite(value))


def source_names_differ(data: DataSection) -> list[Problem]:
    """Metrics and reports tell the sources of a split apart by name."""
    problems = []
    for split, sources in data.splits().items():
        first: dict[str, int] = {}
        for index, source in enumerate(sources):
            first.setdefault(source.name, index)
        problems += [
            Problem(
                ("data", split, index, "name"),
                f"'{name}' is also the name of source {first[name] + 1}; "
                "give each source its own, for example name: "
                f"{name}-{index + 1}",
            )
            for index, name in enumerate(source.name for source in sources)
            if first[name] != index
        ]
    return problems


def evaluation_has_data(data: DataSection, evaluation: EvaluationSection) -> list[Problem]:
    """An evaluation that is asked for has a split to read."""
    problems = []
    if evaluation.interval_steps is not None and data.validation is None:
        message = (
            f"{evaluation.interval_steps}, but data.validation is not set, so there is no "
            "validation loss; add data.validation, or leave interval_steps out"
        )
        problems.append(Problem(("evaluation", "interval_steps"), message))
    if evaluation.generate and data.test is None:
        message = (
            "true, but data.test is not set, so there are no questions to answer; "
            "add data.test, or set generate to false"
        )
        problems.append(Problem(("evaluation", "generate"), message))
    return problems


def pixel_bounds_leave_room(images: ImagesSection) -> list[Problem]:
    """The smallest size is not larger than the largest."""
    low, high = images.min_pixels, images.max_pixels
    if low is None or high is None or low <= high:
        return []
    message = f"{low} is more than images.max_pixels {high}; lower it, or raise max_pixels"
    return [Problem(("images", "min_pixels"), message)]
