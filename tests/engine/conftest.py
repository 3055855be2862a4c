"""One engine for all tests that leave it idle."""

import pytest

from recorder import programs_kept
from traffic import assert_idle, small_engine


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory):
    with programs_kept(tmp_path_factory.getbasetemp() / "programs"):
        yield


@pytest.fixture(scope="session")
def warm(tmp_path_factory):
    with programs_kept(tmp_path_factory.getbasetemp() / "programs"):
        engine = small_engine()
        engine.warm_up(progress=False)
    return engine


@pytest.fixture
def engine(warm):
    yield warm
    assert_idle(warm)
