"""Builds flash_attn: two libraries, one rule for what goes into which.

    flash_attn/_C.so        op schemas and the CPU kernels; a C++ compiler is enough
    flash_attn/_C_cuda.so   the GPU kernels of csrc/kernels.def; needs nvcc, but neither a GPU nor a CUDA build of torch

torch's BuildExtension compiles the host code and links. Files that need flags of their own (an instruction set, a
`-gencode`) are compiled before that by a ninja file of ours, since an Extension has one list of flags for all files;
their objects join through `extra_objects`. No library holds a Python symbol, and both use torch's stable ABI, so one
wheel serves every Python and every torch from 2.10 on.

Environment:
    FLASH_ATTN_NVCC         nvcc to use; else that of CUDA_HOME, CUDA_PATH, PATH, /usr/local/cuda
    FLASH_ATTN_CUDA_ARCHS   "sm80 sm90" or "all"; else the architecture of the GPUs that are present
    FLASH_ATTN_KERNELS      words that a line of the table must contain, e.g. "sm90 bf16 128" (quick developer builds)
    FLASH_ATTN_SANITIZE     "address,undefined": instrument _C.so
    MAX_JOBS, CXX           as everywhere
"""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, setup

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError as error:
    raise SystemExit("flash_attn needs a newer setuptools: pip install 'setuptools>=77'") from error
try:
    import torch
    from torch.utils import cpp_extension
except ImportError as error:
    raise SystemExit(
        f"flash_attn is built against torch's headers, and torch cannot be imported ({error}).\n"
        "Install torch >= 2.10, then: pip install --no-build-isolation ."
    ) from error

ROOT = Path(__file__).resolve().parent
PACKAGE = "flash_attn"
NAMESPACE = "flash"  # of all C++ code
KERNEL_TABLE = Path("csrc/kernels.def")
STATIC_SHARED = 512  # kStaticShared of csrc/gpu/mma_sync/tiles.h
GPU_BINDING = Path("csrc/binding/ops_cuda.cpp")

# The oldest torch that the libraries run on; the headers refuse whatever is newer than that.
TORCH_TARGET_VERSION = "0x020a000000000000"

# csrc/cpu/isa/<name>.cpp: the machines that it is for (none named = all) and the flags that it alone is compiled with.
# -Wno: GCC 12 warns of what its own intrinsics leave undefined on purpose.
X86, AVX512 = ("x86_64",), "-mavx512f -mavx512dq -mavx512bw -mavx512vl -mfma -Wno-maybe-uninitialized"
ISA_UNITS: dict[str, tuple[tuple[str, ...], str]] = {
    "portable": ((), ""),
    "avx2": (X86, "-mavx2 -mfma"),
    "avx512": (X86, f"{AVX512} -mprefer-vector-width=512"),
    "avx512_bf16": (X86, f"{AVX512} -mavx512bf16 -Wno-uninitialized"),
    "amx": (X86, f"{AVX512} -mavx512bf16 -mamx-tile -mamx-bf16 -Wno-uninitialized"),
}

# Architecture of the table → the one -gencode of its units. 90a, not 90: wgmma and setmaxnreg exist there alone.
# Units of sm75 and sm80 carry PTX as well, which newer GPUs compile for themselves.
GENCODES = {
    "sm75": "arch=compute_75,code=[sm_75,compute_75]",
    "sm80": "arch=compute_80,code=[sm_80,compute_80]",
    "sm86": "arch=compute_86,code=sm_86",
    "sm89": "arch=compute_89,code=sm_89",
    "sm90": "arch=compute_90a,code=sm_90a",
    "sm120": "arch=compute_120,code=sm_120",
}


class BuildError(SystemExit):
    """Ends the build with a sentence instead of a traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(f"\nflash_attn: {message}\n")


def package_version() -> str:
    """`__version__` of flash_attn/__init__.py, read without importing it: torch.ops may not exist yet."""
    text = (ROOT / PACKAGE / "__init__.py").read_text()
    match = re.search(r'^__version__ = "([^"]+)"', text, re.MULTILINE)
    if match is None:
        raise BuildError(f'{PACKAGE}/__init__.py has no line `__version__ = "..."`')
    return match.group(1)


def write_if_changed(path: Path, text: str) -> None:
    """Leaves the time stamp alone where the text is the same, so that ninja compiles nothing anew."""
    if not path.exists() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


# ---- Flags ----------------------------------------------------------------------------------------------------------


def cxx_flags(sanitize: str) -> list[str]:
    """Flags of all host code. No -ffast-math: NaN, Inf and signed zero keep their meaning."""
    flags = ["-std=c++20", "-fPIC", "-fvisibility=hidden", "-fvisibility-inlines-hidden", "-Wall", "-Wextra"]
    flags += ["-fno-wrapv"]  # Python brings -fwrapv, which hides signed overflow from the sanitizer
    # Error messages show `csrc/...`, not where somebody built it.
    flags += [f"-ffile-prefix-map={ROOT}/="]
    if sanitize:
        # A finding ends the process: a test cannot pass over it.
        flags += ["-O1", "-g", "-UNDEBUG", "-fno-omit-frame-pointer"]
        flags += [f"-fsanitize={sanitize}", "-fno-sanitize-recover=all"]
    else:
        flags += ["-O3", "-g0", "-DNDEBUG"]
    return flags


def torch_flags() -> list[str]:
    """What binding/ needs on top. -isystem: warnings of torch's headers are not ours."""
    includes = cpp_extension.include_paths()
    flags = [f"-DTORCH_TARGET_VERSION={TORCH_TARGET_VERSION}"]
    flags += [f"-ffile-prefix-map={path}/=" for path in includes]
    for path in includes:
        flags += ["-isystem", path]
    return flags


def nvcc_flags(arch: str) -> list[str]:
    """Exactly one -gencode: `-arch=sm_90a` alone would also compile plain compute_90, which has no wgmma."""
    host = ["-fPIC", "-fvisibility=hidden", f"-ffile-prefix-map={ROOT}/="]
    return [
        f"-gencode={GENCODES[arch]}",
        *["-std=c++20", "-O3", "-DNDEBUG", "-Xptxas=-v,-warn-spills,-warn-lmem-usage", "-Xfatbin=-compress-all"],
        *[f"-Xcompiler={flag}" for flag in host],
    ]


# ---- Units: one file, one command -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Unit:
    """A source file that is compiled with flags of its own."""

    name: str
    source: Path
    object: Path
    command: tuple[str, ...]  # compiler and flags, without source, output and dependency file

    @property
    def log(self) -> Path:
        return self.object.with_name(self.object.name + ".log")


def ninja_text(units: Iterable[Unit]) -> str:
    """The ninja file that compiles `units`. The output goes through a log, because ptxas says things that we check."""

    def path(value: Path) -> str:
        return re.sub(r"([$ :])", r"$\1", str(value.absolute()))

    lines = [
        "ninja_required_version = 1.3",
        "rule compile",
        "  command = $compiler -MD -MF $out.d -c $in -o $out > $out.log 2>&1 || { cat $out.log; exit 1; }",
        "  description = $unit",
        "  depfile = $out.d",
        "  deps = gcc",
    ]
    for unit in units:
        lines += [f"build {path(unit.object)}: compile {path(unit.source)}", f"  unit = {unit.name}"]
        lines += ["  compiler = " + shlex.join(unit.command).replace("$", "$$")]
    return "\n".join(lines) + "\n"


def compile_units(units: Sequence[Unit], directory: Path) -> list[str]:
    """Compiles what is out of date, checks every log (also old ones: a spill stays an error), returns the objects."""
    if not units:
        return []
    write_if_changed(directory / "build.ninja", ninja_text(units))
    jobs = ["-j", os.environ["MAX_JOBS"]] if os.environ.get("MAX_JOBS") else []
    if subprocess.run(["ninja", "-C", str(directory), *jobs]).returncode != 0:
        raise BuildError(f"a unit did not compile; the command is in {directory / 'build.ninja'}")
    for unit in units:
        log = unit.log.read_text()
        print("".join(line + "\n" for line in log.splitlines() if "warning" in line.lower()), end="")
        problems = ptxas_problems(log)
        if problems:
            raise BuildError(f"{unit.name} is not fit to ship:\n  " + "\n  ".join(problems))
    return [str(unit.object) for unit in units]


def ptxas_problems(log: str) -> list[str]:
    """What no kernel may have: spills, C75xx (wgmma serialised), more static shared memory than the host counts."""
    problems, function = [], "?"
    for line in log.splitlines():
        if match := re.search(r"(?:Function properties for|Compiling entry function) '?([\w$.]+)", line):
            function = demangle(match.group(1))
        spill = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", line)
        if (spill and spill.groups() != ("0", "0")) or re.search(r"\bC75\d\d\b", line):
            problems.append(f"{function}: {line.strip()}")
        shared = re.search(r"(\d+) bytes smem", line)
        if shared and re.search(r"mma_sync::\w*wd_kernel", function) and int(shared[1]) > STATIC_SHARED:
            problems.append(f"{function}: {shared[1]} bytes of static shared memory, of {STATIC_SHARED} counted with")
    return problems


def demangle(symbol: str) -> str:
    tool = shutil.which("c++filt")
    return subprocess.check_output([tool, symbol], text=True).strip() if tool else symbol


def check_symbols(library: Path) -> None:
    """Fails with the names of functions of ours that `library` uses and no object defines. The linker lets undefined
    symbols be (torch's must be), so a kernel that is listed but was not generated would only be missed at load time."""
    undefined = subprocess.check_output(["nm", "-uC", str(library)], text=True).splitlines()
    missing = [line.split(maxsplit=1)[1] for line in undefined if re.search(rf"\b{NAMESPACE}::", line)]
    if missing:
        raise BuildError(f"{library.name} uses what no unit defines:\n  " + "\n  ".join(missing))


def isa_units(directory: Path, sanitize: str) -> list[Unit]:
    """One unit per micro-kernel file that fits this machine. They see csrc/ alone: no torch header."""
    units = []
    for source in sorted(ROOT.glob("csrc/cpu/isa/*.cpp")):
        if source.stem not in ISA_UNITS:
            raise BuildError(f"csrc/cpu/isa/{source.name} has no line in ISA_UNITS of setup.py")
        machines, flags = ISA_UNITS[source.stem]
        if not machines or platform.machine() in machines:
            compiler = shlex.split(cpp_extension.get_cxx_compiler())
            command = (*compiler, *cxx_flags(sanitize), f"-I{ROOT / 'csrc'}", *flags.split())
            units.append(Unit(f"isa {source.stem}", source, directory / f"{source.stem}.o", command))
    return units


# ---- The kernel table -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kernel:
    """A line of the table: `FWD(mma_sync, sm80, bf16, 128, plain)`."""

    op: str
    family: str
    arch: str
    dtype: str
    head_dim: str
    variant: str

    @property
    def unit(self) -> str:
        """Kernels of one name share a translation unit: the variants of one op, architecture, dtype and head dim."""
        return "_".join([self.op.lower(), self.family, self.arch, self.dtype, self.head_dim])

    @property
    def arguments(self) -> str:
        return f"({self.family}, {self.arch}, {self.dtype}, {self.head_dim}, {self.variant})"

    @property
    def words(self) -> set[str]:
        return {self.op.lower(), self.family, self.arch, self.dtype, self.head_dim, self.variant}


def read_table(text: str) -> list[Kernel]:
    """The kernels of a table: C++ comments and empty lines aside, each line is one kernel."""
    kernels = []
    text = re.sub(r"/\*.*?\*/", lambda comment: "\n" * comment.group().count("\n"), text, flags=re.DOTALL)
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split("//")[0].strip()
        if not line:
            continue
        where = f"{KERNEL_TABLE}:{number}"
        match = re.fullmatch(r"([A-Z]+)\((\w+), (\w+), (\w+), (\d+), (\w+)\)", line)
        if match is None:
            raise BuildError(f"{where}: not of the form OP(family, arch, dtype, head_dim, variant): {line}")
        kernel = Kernel(*match.groups())
        if kernel.arch not in GENCODES:
            raise BuildError(f"{where}: {kernel.arch} is none of {', '.join(GENCODES)}")
        if kernel in kernels:
            raise BuildError(f"{where}: listed twice: {line}")
        kernels.append(kernel)
    return kernels


def gpu_units(kernels: Sequence[Kernel], nvcc: str, directory: Path, includes: Sequence[Path]) -> list[Unit]:
    """Writes the translation units of `kernels` below `directory` and says how each is compiled.

    A unit includes gpu/<family>/<op>.cuh, which defines what `FLASH_ATTN_INSTANTIATE_<OP>(...)` instantiates. Beside
    them, selected_kernels.def is the part of the table that is built: what gpu/dispatch.cpp includes.
    """
    write_if_changed(directory / "selected_kernels.def", "".join(f"{k.op}{k.arguments}\n" for k in kernels))
    units = []
    for name in dict.fromkeys(kernel.unit for kernel in kernels):
        members = [kernel for kernel in kernels if kernel.unit == name]
        first = members[0]
        header = f"gpu/{first.family}/{first.op.lower()}.cuh"
        text = f'// Generated by setup.py from {KERNEL_TABLE}.\n#include "{header}"\n\n'
        text += "".join(f"FLASH_ATTN_INSTANTIATE_{kernel.op}{kernel.arguments}\n" for kernel in members)
        source = directory / f"{name}.cu"
        write_if_changed(source, text)
        command = (nvcc, *nvcc_flags(first.arch), *(f"-I{path}" for path in includes))
        units.append(Unit(name, source, directory / f"{name}.o", command))
    return units


# ---- What of the table is built here --------------------------------------------------------------------------------


@dataclass(frozen=True)
class GpuPlan:
    """Which kernels are built, or in one sentence why none is."""

    kernels: tuple[Kernel, ...] = ()
    nvcc: str = ""
    reason: str = ""


def find_nvcc(environ: Mapping[str, str]) -> str | None:
    candidates = [environ.get("FLASH_ATTN_NVCC")]
    candidates += [f"{environ[name]}/bin/nvcc" for name in ("CUDA_HOME", "CUDA_PATH") if environ.get(name)]
    candidates += [shutil.which("nvcc", path=environ.get("PATH")), "/usr/local/cuda/bin/nvcc"]
    return next((path for path in candidates if path and shutil.which(path)), None)


def toolkit_of(nvcc: str) -> Path:
    """Where nvcc's include/ and lib/ are. Asked of nvcc itself: the nvcc on PATH may be a wrapper script."""
    answer = subprocess.run([nvcc, "--dryrun", "-x", "cu", "/dev/null"], capture_output=True, text=True)
    match = re.search(r"^#\$ TOP=(.*)$", answer.stdout + answer.stderr, re.MULTILINE)
    if match is None:
        raise BuildError(f"{nvcc} --dryrun does not say where its toolkit is:\n{answer.stderr}")
    return Path(match.group(1)).resolve()


def present_archs() -> set[str]:
    """Architectures whose code runs on this machine's GPUs: same major version, minor up to theirs; or sm80's PTX."""
    tool = shutil.which("nvidia-smi")
    command = [tool, "--query-gpu=compute_cap", "--format=csv,noheader"] if tool else ["true"]
    answer = subprocess.run(command, capture_output=True, text=True).stdout
    capabilities = {int(major) * 10 + int(minor) for major, minor in re.findall(r"^(\d+)\.(\d)$", answer, re.MULTILINE)}
    numbers = {arch: int(arch.removeprefix("sm")) for arch in GENCODES}
    native = {a for a, n in numbers.items() for c in capabilities if n // 10 == c // 10 and n <= c}
    return native | ({"sm80"} if any(c >= 80 for c in capabilities) else set())


def plan_gpu(table: Sequence[Kernel], environ: Mapping[str, str]) -> GpuPlan:
    """Decides what to build. Whoever names an architecture gets it or an error; otherwise a reason is enough."""
    asked = [word for word in re.split(r"[\s,;]+", environ.get("FLASH_ATTN_CUDA_ARCHS", "")) if word]
    known = {kernel.arch for kernel in table}
    if not table:
        return GpuPlan(reason=f"this version has no GPU kernels ({KERNEL_TABLE} is empty)")
    if not (ROOT / GPU_BINDING).exists():
        return GpuPlan(reason=f"this version has no GPU binding ({GPU_BINDING} does not exist)")
    for arch in asked:
        if arch != "all" and arch not in known:
            raise BuildError(f"FLASH_ATTN_CUDA_ARCHS names {arch}; {KERNEL_TABLE} has {', '.join(sorted(known))}")
    archs = (known if "all" in asked else set(asked)) if asked else present_archs() & known
    if any(int(arch.removeprefix("sm")) >= 80 for arch in archs):
        archs |= {"sm80"} & known  # whatever newer card the library meets, it has PTX for it
    if not archs:
        return GpuPlan(reason="no GPU that kernels run on was there at build time; FLASH_ATTN_CUDA_ARCHS may name one")
    nvcc = find_nvcc(environ)
    if nvcc is None:
        reason = "nvcc was not found at build time; FLASH_ATTN_NVCC or CUDA_HOME says where it is"
        if asked:
            raise BuildError(f"FLASH_ATTN_CUDA_ARCHS is set, but {reason}")
        return GpuPlan(reason=reason)
    words = set(environ.get("FLASH_ATTN_KERNELS", "").lower().split())
    kernels = tuple(kernel for kernel in table if kernel.arch in archs and words <= kernel.words)
    if not kernels:
        raise BuildError(f"FLASH_ATTN_KERNELS={' '.join(sorted(words))!r} leaves nothing of {' '.join(sorted(archs))}")
    return GpuPlan(kernels, nvcc)


# ---- Extensions and commands ----------------------------------------------------------------------------------------


def host_sources(*patterns: str) -> list[str]:
    """Relative to the root, as setuptools wants them."""
    return sorted(str(path.relative_to(ROOT)) for pattern in patterns for path in ROOT.glob(pattern))


def extension(name: str, sources: list[str], compile_args: list[str], link_args: list[str], sanitize: str) -> Extension:
    """Not cpp_extension.CppExtension: that links libc10, libtorch_cpu and libtorch_python too.

    libtorch.so *needs* the others, so the loader finds every stable-ABI function in a CPU and in a CUDA build of
    torch. It exports nothing itself: without --no-as-needed the linker would drop it.
    """
    link = ["-Wl,--no-as-needed", "-ltorch", "-Wl,--as-needed", *([f"-fsanitize={sanitize}"] if sanitize else [])]
    return Extension(
        f"{PACKAGE}.{name}",
        sources,
        include_dirs=[str(ROOT / "csrc")],
        library_dirs=cpp_extension.library_paths(),
        extra_compile_args=[*cxx_flags(sanitize), *torch_flags(), *compile_args],
        extra_link_args=[*link, *link_args],
        language="c++",
    )


class BuildLibraries(cpp_extension.BuildExtension):
    """torch's BuildExtension, with our units before it and our checks after it."""

    plan = GpuPlan()
    sanitize = ""

    def __init__(self, *args: object) -> None:
        try:  # pip's ninja is beside the Python that runs us, which need not be on PATH
            import ninja

            os.environ["PATH"] = ninja.BIN_DIR + os.pathsep + os.environ["PATH"]
        except ImportError:
            pass  # BuildExtension looks on PATH
        # No ABI suffix: _C.so is no Python module, torch.ops.load_library loads it.
        super().__init__(*args, no_python_abi_suffix=True)

    def finalize_options(self) -> None:
        super().finalize_options()
        # The same place for every way to build (an editable install would take a new temporary folder each time), and
        # one for each torch, since ninja doesn't follow system headers.
        self.build_temp = str(ROOT / "build" / f"objects-torch{torch.__version__}")

    def run(self) -> None:
        if not self.use_ninja:
            raise BuildError("ninja was not found: pip install ninja")
        compiler = cpp_extension.get_cxx_compiler()
        if not shutil.which(shlex.split(compiler)[0]):
            raise BuildError(f"the C++ compiler {compiler!r} was not found; install g++ or set CXX")
        super().run()
        self.write_build_info()

    def build_extension(self, ext: Extension) -> None:
        shared, name = Path(self.build_temp), ext.name.split(".")[-1]
        self.build_temp = str(shared / name)  # its own folder: the two libraries compile some files with other flags
        directory = Path(self.build_temp) / "units"
        if name == "_C":
            units = isa_units(directory, self.sanitize)
        else:
            units = gpu_units(self.plan.kernels, self.plan.nvcc, directory, [ROOT / "csrc"])
            ext.include_dirs.append(str(directory))
        ext.extra_objects = compile_units(units, directory)
        super().build_extension(ext)
        check_symbols(Path(self.get_ext_fullpath(ext.name)))
        self.build_temp = str(shared)

    def write_build_info(self) -> None:
        """What is_available() tells: which kernels there are, or why there are none."""
        reason = self.plan.reason
        info = {"version": package_version(), "torch": torch.__version__, "gpu": reason or None}
        info["gpu_kernels"] = [f"{kernel.op}{kernel.arguments}" for kernel in self.plan.kernels]
        for folder in [Path(self.build_lib), *([ROOT] if self.inplace else [])]:
            (folder / PACKAGE).mkdir(parents=True, exist_ok=True)
            (folder / PACKAGE / "_build_info.json").write_text(json.dumps(info, indent=1) + "\n")
            if reason:
                (folder / PACKAGE / "_C_cuda.so").unlink(missing_ok=True)  # of an earlier build
        if reason:
            print(f"\n*** flash_attn was built WITHOUT its GPU part: {reason}.\n*** CPU tensors work.\n")


class Wheel(bdist_wheel):
    """One wheel for all Pythons (py3-none-<platform>), and of this tree only."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]

    def run(self) -> None:
        # setuptools packs whatever an earlier build left in there: modules that were renamed, for one.
        shutil.rmtree(self.get_finalized_command("build").build_lib, ignore_errors=True)
        super().run()


def main() -> None:
    os.chdir(ROOT)
    if sys.platform != "linux":
        raise BuildError(f"builds on Linux only, this is {sys.platform}")
    table = read_table((ROOT / KERNEL_TABLE).read_text())
    BuildLibraries.plan = plan = plan_gpu(table, os.environ)
    BuildLibraries.sanitize = sanitize = os.environ.get("FLASH_ATTN_SANITIZE", "")
    cpu = [path for path in host_sources("csrc/binding/*.cpp", "csrc/cpu/*.cpp") if Path(path) != GPU_BINDING]
    extensions = [extension("_C", cpu, [], [], sanitize)]
    if plan.kernels:
        toolkit = toolkit_of(plan.nvcc)
        # The static runtime: the library then needs no libcudart.so of one CUDA version on the user's machine.
        archives = [str(path) for path in sorted(toolkit.glob("lib*/libcudart_static.a"))[:1]]
        link = [*archives, "-Wl,--exclude-libs,ALL", "-lpthread", "-ldl", "-lrt"]
        gpu = [str(GPU_BINDING), *host_sources("csrc/binding/build_params.cpp", "csrc/gpu/**/*.cpp")]
        flags = ["-DUSE_CUDA", "-isystem", str(toolkit / "include")]
        extensions.append(extension("_C_cuda", gpu, flags, link, ""))
    setup(
        version=package_version(),
        ext_modules=extensions,
        cmdclass={"build_ext": BuildLibraries, "bdist_wheel": Wheel},
    )


if __name__ == "__main__":
    main()
