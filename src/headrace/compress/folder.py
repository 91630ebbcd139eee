"""Alias of headrace.compress.write, for one release."""

import warnings

from headrace.compress.write import compress as compress_folder

__all__ = ["compress_folder"]

warnings.warn("headrace.compress.folder is now headrace.compress.write", DeprecationWarning, stacklevel=2)
