"""LLaVA's class with Pixtral's tower: Pixtral 12B, a token for each patch."""

from __future__ import annotations

from vlmpack.families.pixtral import Pixtral

FAMILY = Pixtral(name="llava", model_types=("llava",), merges=False)
