"""A model folder is data: the one door to what it holds.

load      every loading call of transformers. No code of the folder runs, and nothing is asked.
          warned has what it only warns of, mistral_split a tokenizer that is corrected
weights   which files hold its weights. safetensors_read has where the tensors of one lie, and a box
quantised folders whose weights are codes and scales, read as dense ones
content   what its other files say, key by key
digests   a digest of every tensor, made during the load and remembered. finite finds values that
          are no numbers
"""
