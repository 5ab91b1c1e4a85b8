"""Anybody's packing, judged: `vlmpack.judge(model, collate, samples)`.

A collator makes a batch of some samples, packed or padded, and a model computes it. The reference
is the same model on each sample alone, with the positions that its class counts itself. What the
batch teaches, where it puts it and what comes out are compared; each fault is named, with the first
place where it shows. No recipe, no engine and no collator of ours takes part.

reference    each sample alone: losses of its label tokens, positions, gradients
placed       where the samples' tokens lie in a batch
findings     labels, positions, pixels
computed     losses, gradients, averaging
leaks        one sample changed, the others looked at
devices      batches go where the model is, and what is compared comes back
judgement    what was found, as a table
"""

from vlmpack.proof.judge.findings import Judgement
from vlmpack.proof.judge.judge import judge

__all__ = ["Judgement", "judge"]
