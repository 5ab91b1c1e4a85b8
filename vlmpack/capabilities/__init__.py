"""What can be done with which model: plain data, read without torch.

served.py: the model_types that can be trained, a line each. refused.py: those that are refused by
name or by rule. limits.py: what an engine cannot do. table.py: all of it against versions.
"""

from vlmpack.capabilities.folder import read_config, served_model_type
from vlmpack.capabilities.limits import (
    ENGINE_LIMITS,
    ENGINES,
    FEATURES,
    MCORE_FEATURES,
    NO_EXPERTS,
    NOT_ON_MCORE,
    ONLY_ON_MCORE,
    Engine,
    Feature,
    Limit,
    OnlyAttention,
)
from vlmpack.capabilities.refused import REFUSED, language_config, refusal
from vlmpack.capabilities.served import SERVED, ServedModel, model_types
from vlmpack.capabilities.table import Row, capabilities, why_not
from vlmpack.capabilities.versions import RANGES, TESTED, installed_versions, version_limit

__all__ = [
    "ENGINES",
    "ENGINE_LIMITS",
    "FEATURES",
    "MCORE_FEATURES",
    "NOT_ON_MCORE",
    "NO_EXPERTS",
    "ONLY_ON_MCORE",
    "RANGES",
    "REFUSED",
    "SERVED",
    "TESTED",
    "Engine",
    "Feature",
    "Limit",
    "OnlyAttention",
    "Row",
    "ServedModel",
    "capabilities",
    "installed_versions",
    "language_config",
    "model_types",
    "read_config",
    "refusal",
    "served_model_type",
    "version_limit",
    "why_not",
]
