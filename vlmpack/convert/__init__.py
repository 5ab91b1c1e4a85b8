"""Other people's formats -> WebDataset shards and their index, in one pass.

records.py reads (JSONL, LLaVA's json, parquet folders), chat.py finds turns and images in a record
(spellings.py: those of tools in other trainers' words), images.py fetches image bytes inside one
root, shards.py writes and indexes.
"""

from vlmpack.convert.convert import ConvertReport, convert
from vlmpack.convert.records import FORMATS, open_records
from vlmpack.convert.settings import ConvertSettings

__all__ = ["FORMATS", "ConvertReport", "ConvertSettings", "convert", "open_records"]
