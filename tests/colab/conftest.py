"""Runs a notebook in a kernel of its own."""

import json
import sys

import jax
import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient

SECONDS = 300  # for a cell, and for the start of the kernel


@pytest.fixture
def run(tmp_path):
    """run(notebook, folder): executes it in `folder`, with configs/tiny.yaml, by this test's interpreter.

    The kernel is described by a file of its own, so that neither an installed kernel of the same name nor the
    user's start-up files take part.
    """
    spec = tmp_path / "kernels" / "quickstart-test"
    spec.mkdir(parents=True)
    kernel = {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": "the interpreter of the tests",
        "language": "python",
        "env": {
            "JAXRL_SMOKE": "1",
            "IPYTHONDIR": str(tmp_path / "ipython"),
            "TMPDIR": str(tmp_path),  # gets the run folder
            "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        },
    }
    (spec / "kernel.json").write_text(json.dumps(kernel))

    def execute(nb, folder):
        manager = AsyncKernelManager(
            kernel_name=spec.name,
            kernel_spec_manager=KernelSpecManager(kernel_dirs=[str(spec.parent)], ensure_native_kernel=False),
            connection_file=str(tmp_path / "connection.json"),
        )
        client = NotebookClient(
            nb,
            km=manager,
            timeout=SECONDS,
            startup_timeout=SECONDS,
            resources={"metadata": {"path": str(folder)}},
        )
        client.execute(cleanup_kc=True)  # else the kernel of a given manager would go on
        return nb

    return execute
