"""A model folder is data: the one door to what it holds.

images    what makes pixels of images
load      every loading call of transformers: no code of the folder runs, and nothing is asked;
          warned (what it only warns of), mistral_split (a tokenizer that is corrected)
weights   which files hold its weights; safetensors_header: where the tensors of one lie, and
          safetensors_read: a box of one
content   what its other files say, key by key
digests   a digest of every tensor; made beside the load (hashing), and remembered
"""
