"""Other people's formats -> WebDataset shards and their index, in one pass.

`data.files` reads records (JSONL, LLaVA's json, parquet folders) and image bytes inside one root.
`data.columns` finds a record's turns and images. videos.py decodes its containers of videos.
convert.py writes and indexes.
"""

from vlmpack.convert.convert import ConvertReport, ConvertSettings, convert
from vlmpack.convert.videos import VideoSettings
from vlmpack.data.files.records import FORMATS, open_records

__all__ = [
    "FORMATS",
    "ConvertReport",
    "ConvertSettings",
    "VideoSettings",
    "convert",
    "open_records",
]
