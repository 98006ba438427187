"""What holds for all tests."""

import multiprocessing
from collections.abc import Iterator

import pytest
from hypothesis import settings

# The same examples on every run and machine; how fast they are depends on the machine.
settings.register_profile("same_everywhere", derandomize=True, deadline=None, database=None)
settings.load_profile("same_everywhere")


@pytest.fixture(scope="session", autouse=True)
def _no_process_is_left() -> Iterator[None]:
    yield
    left = multiprocessing.active_children()
    for process in left:
        process.kill()
    assert not left, f"tests left processes behind: {left}"
