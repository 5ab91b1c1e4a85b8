"""`vlmpack verify`: packed equals unpacked on the user's model and samples, or where it does not.

samples    some of data.train, encoded as training encodes them
row        the recipe's collator packs them; ids, labels, positions, pixels compared directly
reference  the stock transformers class, one sample at a time: no packing anywhere
packed     the recipe's engine on the row: forward, backward, one optimizer step
compare    losses, logits, outputs of every part, gradients; leak, trained: the other checks
"""

from vlmpack.proof.measure import Check
from vlmpack.proof.verify.run import Verification, VerifyOptions, verify_recipe, verify_split

__all__ = ["Check", "Verification", "VerifyOptions", "verify_recipe", "verify_split"]
