from __future__ import annotations

import gc
import os
import signal
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any
from unittest import mock

# programs that tests start share the cores with other tests, so they compute on one thread, too
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
import typer.main
import typer.testing
from hypothesis import HealthCheck, settings

from anabranch.bench import machine
from anabranch.control import costs, profiles
from sampled import left_out
from toy_text import ToyFolders, save_toys
from verbs import Anabranch

# The same examples in every run, which a slow machine does not end; `pytest --hypothesis-profile search` draws others.
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("search"), derandomize=True, database=None)
settings.load_profile("same")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Let a test's random tensors not depend on the tests that ran before it in its process."""
    torch.default_generator.manual_seed(0)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a process of pytest-xdist whether the run is one of all tests."""
    node.workerinput["all_tests"] = _all_tests(node.config)


def _all_tests(config: pytest.Config) -> bool:
    of_worker: dict[str, bool] = getattr(config, "workerinput", {})
    return of_worker.get("all_tests", config.args_source is pytest.Config.ArgsSource.TESTPATHS)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a run of all tests, mark most cases of each parametrised test as thorough; one of named files has all."""
    if not _all_tests(config):
        return
    cases = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not item.get_closest_marker("thorough"):
            cases[item.parent, item.originalname].append(item)
    for of_test in cases.values():
        for item in left_out(of_test, lambda item: item.name):
            item.add_marker("thorough")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Look for no garbage while tests are collected, which leaves next to none: an eighth of that time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Leave out of garbage collection all that was imported: millions of objects, a tenth of the time of the tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """Toy tensors are faster on one thread, and equal runs give equal bits. For all of a run: fixtures count too."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def restored_threads() -> Iterator[int]:
    """The number of torch's threads, restored after the test."""
    threads = torch.get_num_threads()
    yield threads
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="session")
def _passes_cost_the_same() -> Iterator[None]:
    """``auto`` depends on the time that passes take; in tests it is the same in every run, and nothing is kept."""
    measured = costs.PassCosts(costs.StepCosts((1, 24), (1.0, 1.5)))
    keep = profiles._keep_costs

    def keep_elsewhere(*record: Any) -> None:
        if "ANABRANCH_HOME" in os.environ:  # never in the user's own cache folder
            keep(*record)

    patched = mock.patch.object(profiles, "_keep_costs", keep_elsewhere)
    timed = mock.patch.object(profiles, "plain_ms", return_value=1.0)
    with mock.patch.object(costs, "measure_passes", return_value=measured), timed, patched:
        yield


@pytest.fixture(autouse=True, scope="session")
def _memory_is_measured_quickly() -> Iterator[None]:
    """``info`` reads 512 MiB or more to measure the memory's speed: seconds, most of them for the system's pages."""
    quick = mock.patch.dict(machine.LEAST, cpu=2**20)
    with quick, mock.patch.object(machine, "last_level_cache", return_value=2**17):
        yield


@pytest.fixture(autouse=True, scope="session")
def _commands_are_made_once() -> Iterator[None]:
    """Typer makes all commands of a program from their signatures at every call, which takes longer than most tests."""
    made = cache(typer.main.get_command)
    with mock.patch("typer.main.get_command", made), mock.patch("typer.testing._get_command", made):
        yield


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c_arrives() -> None:
    """A run in the background ignores SIGINT, and so would every child of it: tests of Ctrl-C need it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def toys(tmp_path_factory: pytest.TempPathFactory) -> ToyFolders:
    """Folders of a toy model and its adapter."""
    return save_toys(tmp_path_factory.mktemp("toys"))


@pytest.fixture
def anabranch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Anabranch:
    """The program, run in this process."""
    return Anabranch(capsys, monkeypatch)
