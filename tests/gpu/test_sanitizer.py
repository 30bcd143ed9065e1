"""The small cases of the kernels again, with every access to memory checked by
compute-sanitizer."""

from __future__ import annotations

import os
import pathlib
import shutil
import site
import subprocess
import sys

import pytest

from tests.gpu.setting import DRY_RUN


def find_sanitizer() -> str | None:
    """compute-sanitizer on PATH, in the CUDA toolkit, or in one of NVIDIA's Python packages."""
    if found := shutil.which("compute-sanitizer"):
        return found
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    paths = [pathlib.Path(home) / "bin" / "compute-sanitizer" for home in homes if home]
    for folder in site.getsitepackages():
        paths += pathlib.Path(folder, "nvidia").glob("**/compute-sanitizer")
    return next((str(path) for path in paths if path.is_file() and os.access(path, os.X_OK)), None)


@pytest.mark.skipif(DRY_RUN, reason="a dry run launches nothing on a GPU")
def test_memcheck() -> None:
    tool = find_sanitizer()
    if tool is None:
        pytest.skip("compute-sanitizer is not on PATH, nor in the CUDA toolkit")
    folder = pathlib.Path(__file__).parent
    command = [tool, "--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", "99"]
    command += [
        sys.executable,
        "-m",
        "pytest",
        "-c",
        os.devnull,
        "--confcutdir",
        str(folder),
        "-p",
        "no:cacheprovider",
    ]
    command += [str(folder / "test_kernels.py"), "-k", "small"]
    # Each tensor gets memory of its own, so that a read past its end does not hit its neighbour.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    done = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if "Device not supported" in done.stdout:
        pytest.skip("compute-sanitizer does not support this device")
    lines = [
        line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line or "Invalid" in line
    ]
    assert done.returncode == 0 and "passed" in done.stdout, (
        f"exit code {done.returncode}; {'; '.join(lines[:3])}"
    )
