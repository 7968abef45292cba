"""Reads and resamples the images once for all tests, because this takes most of the time of a tiny run."""

import functools

import pytest


@pytest.fixture(autouse=True, scope="session")
def images_once():
    try:
        from nilearn import datasets
    except ImportError:
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        for name in ("load_mni152_template", "load_mni152_gm_template", "load_mni152_wm_template"):
            patch.setattr(datasets, name, functools.cache(getattr(datasets, name)))
        yield
