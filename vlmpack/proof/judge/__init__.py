"""Anybody's packing, judged: `vlmpack.judge(model, collate, samples)`.

A collator makes a batch of some samples, packed or padded, and a model computes it. The same model
also computes each sample alone, with the positions that its class counts itself. Labels, positions,
pixels, losses and gradients of the two are compared. Each fault is named, with the first place
where it shows. No recipe, no engine and no collator of ours takes part.

judge       what is run, in which order
alone       each sample alone, and where its tokens lie in a batch
findings    faults and judgements; labels, positions and pixels of a batch
computed    losses, gradients, averaging; one sample changed, the others looked at
"""

from vlmpack.proof.judge.findings import Judgement
from vlmpack.proof.judge.judge import judge

__all__ = ["Judgement", "judge"]
