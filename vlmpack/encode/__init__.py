"""From a conversation to an EncodedSample: ids, labels, positions and pixels of one sample, on CPU.

encoder        Encoder: a model folder's tokenizer, chat template and image rule; lengths without
               decoding a pixel; `assemble` puts a sample together
sample         VLMSample: messages of text and images, as the data layer cooks them
tokenizer      a folder's tokenizer, with the chat template of its processor
chat           the chat template rendered (`template`, `content`) and tokenized, with what is learnt
               of it (`turns`, `changes`, `token_places`, `literals`, `image_text`); `expressed`:
               what a template leaves out is refused; `template_bounds`, `template_growth` and
               `template_sizes` keep a template from taking the machine;
               `clock`: a template that writes the day; `variables`: what a template gets in all
               conversations; `thoughts`: one that leaves thoughts out; `template_notes`: what a
               user should know of one; `special_tokens`: those that texts may spell
prefixes       of samples, which a row holds once for several
decode         image bytes -> pixels
fingerprint    what an encoder's output depends on, for caches and the run's identity
budget         bounds on what an image costs: refused, and written into an exported folder
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
