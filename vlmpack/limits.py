"""How much of anything is read: one table, so that scanning and reading have the same limits.

Exceeding a limit is a named error with the size found and allowed. A test compares this table with
docs/data.md.
"""

from __future__ import annotations

# A sample. `SampleCaps` carries those of them that a caller may change.
MAX_SAMPLE_BYTES = 512 << 20
MAX_MEMBER_BYTES = 256 << 20
MAX_JSON_BYTES = 16 << 20
MAX_MEMBERS = 4096
MAX_RECORD_KEYS = 4096
MAX_TURNS = 2048
MAX_BRANCHES = 2048
MAX_VALUE_DEPTH = 64
"""A template writes tools and arguments by recursion."""
MAX_IMAGES = 256
MAX_IMAGE_PIXELS = 50_000_000
"""The default of `data.max_image_pixels`, also where there is no recipe."""
MAX_FRAMES = 2048
MAX_CLIP_PIXELS = 2_000_000_000
"""A video's frames are decoded together."""
LONGEST_SECONDS = 1e6
"""A time beyond it is no time of a video's frame."""

# A file of samples.
MAX_GROUP_BYTES = 1 << 30
"""Each sample of a row group, or of a batch, costs all of it."""
MAX_EXTENSIONS = 4
"""Headers before a member's own: each of the four kinds once is what writers make at most."""
MAX_EXTENSION_BYTES = 1 << 20
MAX_PAX_RECORDS = 32
"""Writers make about ten, and one for each extended attribute of a file."""
MAX_NAME_BYTES = 4096
MAX_FOREIGN_BYTES = 255
"""Each of them is written out in four characters."""
MAX_EXPANDED = 1_000_000

# A recipe.
MAX_RECIPE_BYTES = 1_000_000
MAX_RECIPE_DEPTH = 16
MAX_RECIPE_PROBLEMS = 200
