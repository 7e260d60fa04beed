"""Settings of the whole test suite: Hypothesis profiles and one torch thread."""

import os

# Before jax is imported: a mesh of several devices, all of them this CPU.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import torch
from hypothesis import HealthCheck, settings

settings.register_profile("dev", deadline=None)
settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    database=None,
    max_examples=60,
    print_blob=True,
    # How fast the machine draws is no property of the code.
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("soak", deadline=None, max_examples=5000)
settings.load_profile(
    os.environ.get("HYPOTHESIS_PROFILE") or ("ci" if os.environ.get("CI") else "dev")
)

# Simulated ranks are threads and processes; torch's own pool would fight them for the cores.
torch.set_num_threads(1)
