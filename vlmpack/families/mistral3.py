"""Mistral Small 3.1 and later with images: Pixtral's tower, 2 x 2 patches merged into a token."""

from __future__ import annotations

from vlmpack.families.pixtral import Pixtral

FAMILY = Pixtral(name="mistral3", model_types=("mistral3",), merges=True)
