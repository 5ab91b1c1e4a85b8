"""`vlmpack.judge(model, collate, samples)`: checks anybody's packing.

A model computes the batch that a collator makes, and each sample alone with its class's own
positions. Labels, positions, pixels, losses and gradients of the two are compared. Each fault is
named, with its first place. None of our recipes, engines or collators takes part.

judge       what is run, in which order
alone       each sample alone, and where its tokens lie in a batch
findings    faults and judgements; labels, positions and pixels of a batch
computed    losses, gradients, averaging; one sample changed, the others compared
"""

from vlmpack.proof.judge.findings import Judgement
from vlmpack.proof.judge.judge import judge

__all__ = ["Judgement", "judge"]
