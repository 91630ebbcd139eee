"""Alias of headrace.compress.write, for one release."""

import warnings

from headrace.compress.write import Pipeline, compress, predict

__all__ = ["Pipeline", "compress", "predict"]

warnings.warn("headrace.compress.run is now headrace.compress.write", DeprecationWarning, stacklevel=2)
