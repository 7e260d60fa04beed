"""All targets, by name."""

from . import exchanges as exchanges
from . import files as files
from . import stale as stale
from . import wire as wire
from .target import TARGETS as TARGETS
