"""Checks the compiled 3x3x3 convolution for Hopper: registers, its products, and wide loads and stores."""

import pytest

pytest.importorskip("triton")


@pytest.fixture
def launches(compiled):
    return compiled("tests.kernels.conv3d_launches", "CASES", "sm_90")


def of_convolution(launches):
    return [of for of in launches if of["kernel"] == "conv3d_kernel"]


def test_registers_and_products(launches, record_property):
    """512 threads of 128 registers fit in a multiprocessor, and few values spill."""
    assert {of["kernel"] for of in launches} == {"conv3d_kernel", "conv3d_weight_kernel"}
    for of in of_convolution(launches):
        record_property(of["case"], f"{of['registers']} registers, {of['spilled']} bytes spilled")
        assert of["registers"] == 128
        assert of["spilled"] <= 128
        assert of["matrix"] == ["wgmma.mma_async"]


def test_wide_loads_and_stores(launches):
    for of in of_convolution(launches):
        accesses = of["accesses"]
        assert set(accesses["x_ptr"]["load"]) == {"16"}
        assert set(accesses["w_ptr"]["load"]) == {"16"}
        assert set(accesses["y_ptr"]["store"]) == {"16"}
