"""From a conversation to an EncodedSample: ids, labels, positions and pixels of one sample, on CPU.

encoder          Encoder, a model folder's tokenizer, chat template and image rule. It gives lengths
                 without decoding a pixel
settings         what an Encoder is given beside the folder, and what an exported folder notes of it
sample           VLMSample: messages of text and images, as the data layer cooks them
objects, places  boxes and points of a record, and where its texts name them
coordinates      writes them into the texts, by the rule of the family
assemble         ids with a placeholder for each run of an image -> EncodedSample
prefixes         of samples, which a row holds once for several
chat             a conversation -> token ids, and the tokens that the assistant wrote
template         the chat template: what it is given, and the text that it makes of it
template_bounds  keeps a template from taking the machine
template_notes   what a user should know of a template
turns            which characters of a text the assistant wrote
omissions        what a template leaves out of a conversation is refused
markers          the places of images in a text, and the characters that tokens write
special_tokens   those that texts may spell; ids against the rows of the embedding
images, decode   image files -> pixels; bounds on what an image costs
fingerprint      what an encoder's output depends on, for caches and the run's identity
"""

from vlmpack.encode.decode import decode_image
from vlmpack.encode.encoder import Encoder
from vlmpack.encode.sample import ImagePart, Message, SampleLength, TextPart, VideoPart, VLMSample
from vlmpack.encode.settings import EncoderSettings

__all__ = [
    "Encoder",
    "EncoderSettings",
    "ImagePart",
    "Message",
    "SampleLength",
    "TextPart",
    "VLMSample",
    "VideoPart",
    "decode_image",
]
