"""The Megatron engine; the only place that imports megatron-core."""

import warnings

# Megatron warns at import that kernels of other packages are missing, and reads `.grad` of views;
# the engine says itself what it runs with. torch renames two collectives in 2.13.
for _category, _module in (
    (UserWarning, r"megatron\."),
    (FutureWarning, r"torch\.distributed\.c10d_logger"),
):
    warnings.filterwarnings("ignore", category=_category, module=_module)
