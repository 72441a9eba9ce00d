"""The package's logger, ``anabranch``: silent unless the program configures logging.

    DEBUG     measured costs, drafters that were built
    INFO      what was loaded, compiled and downloaded, and which kernels run
    WARNING   the package's warnings, which are Python warnings too

A *notice* is a record of INFO about something that takes seconds; the command line shows it.
"""

from __future__ import annotations

import logging
import warnings

__all__ = ["LOGGER", "NOTICE", "notice", "warn"]

LOGGER = logging.getLogger("anabranch")
NOTICE = "anabranch_notice"  # attribute of the records of notices


def notice(sentence: str) -> None:
    """Log the start of something that takes seconds."""
    LOGGER.info(sentence, extra={NOTICE: True})


def warn(sentence: str, category: type[Warning], *, stacklevel: int = 1) -> None:
    """Warn as ``warnings.warn`` does, and log the warning."""
    LOGGER.warning(sentence)
    warnings.warn(sentence, category, stacklevel=stacklevel + 1)
