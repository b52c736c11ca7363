"""That what is imported for good costs the garbage collector nothing more."""

import gc

import pytest

from farflung.node.loading import loading


def test_what_is_made_within_is_left_alone_and_what_comes_after_is_not() -> None:
    before = gc.get_freeze_count()
    try:
        with loading():
            assert not gc.isenabled()
            kept = [[index] for index in range(1000)]
        assert gc.isenabled() and gc.get_freeze_count() >= before + len(kept)
    finally:
        gc.unfreeze()


def test_an_import_that_fails_leaves_the_collector_as_it_was() -> None:
    before = gc.get_freeze_count()
    with pytest.raises(ImportError), loading():
        raise ImportError("no module")
    assert gc.isenabled() and gc.get_freeze_count() == before
