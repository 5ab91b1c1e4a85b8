"""Warnings of transformers about a model folder that change ids, weights or positions. Such a
folder is refused by name, or corrected by the loading code.

A warning that is not in the table changes none of them. tests/model_folder/test_warned.py lists
every one that the installed transformers can give here.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from vlmpack.errors import ModelError

WRONG_SPLIT = "with an incorrect regex pattern"
"""It is said of a Mistral model's tokenizer; `mistral_split.py` corrects it."""

REFUSED: Mapping[str, str] = {
    r"Unrecognized keys in `rope_parameters` for 'rope_type'='default': .*'factor'": (
        "the factor of its rotary positions would be ignored; give the rope_type that has it, or "
        "leave it out"
    ),
    r"Last layer must use `full_attention`": (
        "its last layer would be another one than layer_types says; say full_attention there"
    ),
    r"Detected Mistral model with layer_types": (
        "layer_types would be ignored; leave them out where all layers are alike, else say the "
        "model_type whose layers alternate (ministral)"
    ),
    r"You are using a model of type .* to instantiate a model of type": (
        "config.json says another model_type than the class that it chooses"
    ),
}
"""The beginning of a warning that transformers does otherwise than the folder says, as a regular
expression -> why the folder is refused."""


class _Listener(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@contextmanager
def refused_warnings(folder: Path) -> Iterator[list[str]]:
    """Listen to what transformers says of a folder, whatever it prints; also what it says once in a
    process.

    Yields:
        The warnings so far.

    Raises:
        ModelError: one of `REFUSED`, when the folder is loaded.
    """
    from transformers.utils import logging as transformers_logging

    forget: Callable[[], None] = transformers_logging.warning_once.cache_clear
    logger = logging.getLogger("transformers")
    level, listener = logger.level, _Listener()
    silenced = [(each, each.level) for each in logger.handlers]
    for each, own in silenced:
        each.setLevel(max(own, level))
    logger.addHandler(listener)
    logger.setLevel(min(level, logging.WARNING))
    forget()
    try:
        yield listener.said
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)
        for each, own in silenced:
            each.setLevel(own)
    for text in listener.said:
        for pattern, why in REFUSED.items():
            if re.match(pattern, text, re.DOTALL):
                raise ModelError(f"model.path: {folder}: {why} (transformers warns: {text})")
