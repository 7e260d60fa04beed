"""Wrong arguments are refused where they are written, with what was given and what may be."""

import re

import pytest

import gradtx as gx

HUGE = 10**400


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: gx.quantize(4.0), ValueError, "quantize(bits=4.0): expected 1, 2, 4 or 8"),
        (
            lambda: gx.quantize(8, stochastic="no"),
            TypeError,
            "quantize(stochastic='no'): expected True or False",
        ),
        (
            lambda: gx.quantize(8, feedback=0),
            TypeError,
            "quantize(feedback=0): expected True or False",
        ),
        (
            lambda: gx.cast("float16", feedback="no"),
            TypeError,
            "cast(feedback='no'): expected True or False",
        ),
        (
            lambda: gx.cast(["float16"]),
            ValueError,
            "cast(['float16']): expected one of 'float16', 'bfloat16'",
        ),
        (
            lambda: gx.ternary(feedback=None),
            TypeError,
            "ternary(feedback=None): expected True or False",
        ),
        (lambda: gx.ternary(clip=HUGE), ValueError, "ternary(clip=10000"),
        (
            lambda: gx.momentum_correction(0.9, clip=HUGE),
            ValueError,
            "momentum_correction(clip=10000",
        ),
        (
            lambda: gx.dynamic_loss_scale(growth_interval=2**40),
            ValueError,
            "dynamic_loss_scale(growth_interval=1099511627776): expected less than 2**31",
        ),
    ],
)
def test_wrong_argument_is_refused(call, error, text):
    with pytest.raises(error, match=f"^{re.escape(text)}"):
        call()
