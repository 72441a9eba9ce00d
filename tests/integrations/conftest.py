from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def local_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cluster of real Ray on this machine."""
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "ANABRANCH_HOME": str(tmp_path_factory.mktemp("home")),
            "RAY_AUTH_MODE": "disabled",  # a token would be written to the user's home
            "RAY_USAGE_STATS_ENABLED": "0",
        }.items():
            patch.setenv(name, value)
        ray.init(num_cpus=4, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
        yield
        ray.shutdown()
