"""Benchmarks: suites, contenders, alternating measurement, reports.

The package itself is callable: ``anabranch.bench(model, prompts, drafters)`` is ``inprocess.bench``. A function of that
name in ``anabranch`` would be replaced by this module as soon as a part of it is imported.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class _Callable(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from anabranch.bench.inprocess import bench

        return bench(*arguments, **options)


sys.modules[__name__].__class__ = _Callable
