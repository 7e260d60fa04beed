"""Decoders given hostile bytes: by Hypothesis in the test suite, by atheris for as long as wanted.

``python -m tests.fuzz NAME --seconds 600`` fuzzes one of them, guided by coverage. It needs the
extra ``fuzz``. What it finds goes into `tests/test_hostile.py`.
"""
