"""Process-wide settings, each in a process of its own."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "None"),
        ({"JAX_NUM_CPU_DEVICES": "8"}, "32"),
        ({"XLA_FLAGS": "--xla_cpu_max_isa=AVX2 --xla_force_host_platform_device_count=4"}, "16"),
        ({"JAX_NUM_CPU_DEVICES": "8", "NPROC": "9"}, "9"),
    ],
)
def test_virtual_devices_get_threads(environment, expected):
    code = (
        "import os; from jaxrl_llm.runtime import virtual_devices_need_threads as give; give(); "
        "print(os.environ.get('NPROC'))"
    )
    clean = {k: v for k, v in os.environ.items() if k not in {"NPROC", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES"}}
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == expected
