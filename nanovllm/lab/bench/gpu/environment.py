"""Finds a Python that can run `make gpu`, installs only the packages that it lacks, and prints the
interpreter to use.

It is run as a script, by path and before anything is installed, so it needs the standard library
alone. On a GPU's machine torch is often installed already, built for its driver, and must not be
replaced."""

import importlib.util
import pathlib
import subprocess
import sys

# Names of modules, which are those of their packages, but for pyzmq. What they need themselves
# comes along.
NEEDS = (
    "torch",
    "triton",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "psutil",
    "httpx",
    "rich",
    "tqdm",
    "filelock",
    "msgspec",
    "zmq",
    "pytest",
)
ROOT = pathlib.Path(__file__).resolve().parents[4]


def main() -> int:
    """Prepare; returns the exit code."""
    missing = [
        name.replace("zmq", "pyzmq") for name in NEEDS if importlib.util.find_spec(name) is None
    ]
    python = sys.executable
    if missing:
        print(f"{python} lacks {' '.join(missing)}: installing them", file=sys.stderr)
        try:
            if sys.prefix == sys.base_prefix:
                # Not a virtual environment: make one that sees what is there.
                folder = ROOT / ".venv"
                _run(python, "-m", "venv", "--system-site-packages", str(folder))
                python = str(folder / "bin" / "python")
            _run(
                python,
                "-m",
                "pip",
                "install",
                "--quiet",
                "-c",
                str(ROOT / "constraints.txt"),
                *missing,
            )
        except subprocess.CalledProcessError:
            print(
                f"without a network, bring wheels of {' '.join(missing)} and install them",
                file=sys.stderr,
            )
            return 2
    print(python)
    return 0


def _run(*command: str) -> None:
    # Standard output is for the answer alone.
    subprocess.run(command, check=True, stdout=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
