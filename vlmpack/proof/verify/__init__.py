"""`vlmpack verify`: packed equals unpacked on the user's model and samples, or where it does not.

samples    some of data.train, encoded as training encodes them, in the recipe's rows
answers    whether their ids are the chat template's, and their labels teach the answers
unpacked   the stock model, one sample at a time: no packing anywhere
packed     the recipe's engine on the rows: forward, backward, one optimizer step
compare    losses, logits and outputs of the two. gradients compares theirs, by part, with adapters
leak       one sample changed or learnt from, the others looked at
recurrent  layers that carry state. pairs compares the preference loss
numbers    both runs, and the checks of them in order
run        a recipe or an open split -> all checks. gate does so before a run's first step
"""

from vlmpack.proof.measure import Check
from vlmpack.proof.verify.run import Verification, VerifyOptions, verify_recipe, verify_split

__all__ = ["Check", "Verification", "VerifyOptions", "verify_recipe", "verify_split"]
