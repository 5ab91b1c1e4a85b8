"""What the documentation's example of each layout says, read by hand."""

from __future__ import annotations

from collections.abc import Mapping

from support.shards import ROOT

FOLDER = ROOT / "docs/examples/data"
READ, COUNT = "Read the digits.", "How many digits are there?"
LONGEST = "Which image shows the longest row?"
SYSTEM = ("system", "Answer with digits alone.")

WANTED: Mapping[str, list[list[tuple[str, str]]]] = {
    "messages": [
        [("user", f"[098.jpg]{READ}"), ("assistant", "098")],
        [("user", f"[29772.jpg]{READ}"), ("assistant", "29772"), ("user", COUNT),
         ("assistant", "5")],
        [SYSTEM, ("user", f"[098.jpg]{READ}"), ("assistant", "098")],
    ],
    "llava": [
        [("user", f"[098.jpg]\n{READ}"), ("assistant", "098"), ("user", COUNT), ("assistant", "3")],
        [("user", f"[098.jpg]\n[29772.jpg]\n{LONGEST}"), ("assistant", "B")],
    ],
    "sharegpt": [
        [SYSTEM, ("user", f"[29772.jpg]{READ}"), ("assistant", "29772")],
        [SYSTEM, ("user", f"[098.jpg]{COUNT}"), ("assistant", "3"), ("user", READ),
         ("assistant", "098")],
    ],
    "preference": [
        [("user", f"[098.jpg]{READ}"), ("chosen", "098"), ("rejected", "089")],
        [("user", f"[29772.jpg]{READ}"), ("chosen", "29772"), ("rejected", "2972")],
    ],
    "query-response": [
        [("user", f"[098.jpg]{READ}"), ("assistant", "098")],
        [SYSTEM, ("user", f"[29772.jpg]{READ}"), ("assistant", "29772"), ("user", COUNT),
         ("assistant", "5")],
    ],
    "prompt-completion": [
        [("user", f"[098.jpg]{READ}"), ("assistant", "098")],
        [("user", f"[29772.jpg]{READ}"), ("not learnt", "29772"), ("user", COUNT),
         ("assistant", "5")],
    ],
    "alpaca": [
        [("user", f"[098.jpg]{READ}\nAnswer with digits alone."), ("assistant", "098")],
        [SYSTEM, ("user", f"[29772.jpg]{READ}"), ("assistant", "29772"), ("user", COUNT),
         ("assistant", "5")],
    ],
    "vqa": [
        [("user", f"[098.jpg]{READ}"), ("assistant", "098")],
        [("user", f"[29772.jpg]{COUNT}"), ("assistant", "5")],
        [("user", f"[098.jpg]{COUNT}"), ("assistant", "3")],
    ],
    "caption": [
        [("user", "[098.jpg]"), ("assistant", "098")],
        [("user", "[29772.jpg]"), ("assistant", "29772")],
    ],
    "cauldron": [
        [("user", f"[098.jpg]{READ}"), ("assistant", "098"), ("user", COUNT), ("assistant", "3")],
        [("user", f"[098.jpg][29772.jpg]{LONGEST}"), ("assistant", "B")],
    ],
    "rounds": [
        [SYSTEM, ("user", f"[29772.jpg]{READ}"), ("assistant", "29772"), ("user", COUNT),
         ("assistant", "5")],
        [("user", f"[098.jpg]{READ}"), ("assistant", "098")],
    ],
}  # fmt: skip
"""Layout -> who says what in each record of its example, written by hand."""
