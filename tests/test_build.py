"""How the libraries are built: the kernel table, units with flags of their own, what a finished library looks like."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import flash_attn

ROOT = Path(__file__).resolve().parent.parent
TRIVIAL = ROOT / "tests" / "build"
LIBRARIES = sorted(Path(flash_attn.__file__).parent.glob("_C*.so"))


def load_setup() -> ModuleType:
    """setup.py as a module: its functions are what is tested, not copies of them."""
    spec = importlib.util.spec_from_file_location("flash_attn_setup", ROOT / "setup.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


build = load_setup()
NVCC = build.find_nvcc(os.environ)
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="nvcc is missing")


def output_of(*command: str | Path) -> str:
    return subprocess.check_output([str(word) for word in command], text=True)


# ---- The finished libraries -----------------------------------------------------------------------------------------


def test_library_is_there() -> None:
    assert "_C.so" in [path.name for path in LIBRARIES]
    assert flash_attn.is_available()


def test_version() -> None:
    assert build.package_version() == flash_attn.__version__
    assert flash_attn.__version__.startswith("2.8.3+"), "the API level of flash-attn that we speak, then our release"


def test_build_info() -> None:
    info = json.loads((Path(flash_attn.__file__).parent / "_build_info.json").read_text())
    assert info["version"] == flash_attn.__version__
    assert bool(info["gpu"]) != bool(info["gpu_kernels"]), "the kernels, or the reason why there are none"


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_library_needs_torch_and_no_python(library: Path) -> None:
    dynamic = output_of("readelf", "-d", library)
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", dynamic))
    system = r"(libstdc\+\+|libgcc_s|libc|libm|libpthread|libdl|librt|ld-linux-[\w-]+)\.so\.\d+"
    assert {name for name in needed if not re.fullmatch(system, name)} == {"libtorch.so"}
    assert "RPATH" not in dynamic and "RUNPATH" not in dynamic
    symbols = output_of("nm", "-D", library)
    assert not re.search(r"\b_?Py[A-Z_]\w*", symbols), "one library serves every Python: it uses none"
    assert not re.search(r"\b(c10|at)::", output_of("nm", "-D", "-C", "--undefined-only", library))


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_library_has_no_build_path(library: Path) -> None:
    content = library.read_bytes()
    for path in (ROOT, Path(build.torch.__file__).parent):
        assert str(path).encode() not in content


def test_abi_audit() -> None:
    """torch's own auditor: stable ABI only, Python's and torch's, and no function newer than the target version."""
    pytest.importorskip("torch_abi_audit")
    code = "import sys; from torch_abi_audit.cli import main; sys.exit(main())"
    folder = Path(flash_attn.__file__).resolve().parent
    command = [sys.executable, "-c", code, "--check", "both", "--json", str(folder)]
    answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    audit = json.loads(answer.stdout)
    found = {Path(library["path"]): library["torch"] for library in audit["extensions"] + audit["bundled_libs"]}
    assert sorted(found) == [path.resolve() for path in LIBRARIES]
    target = int(build.TORCH_TARGET_VERSION, 16)
    for library in found.values():
        assert library["stable"] and not library["unstable_symbols"] and not library["unknown_shim_symbols"]
        major, minor = map(int, library["min_torch_version"].split(".")[:2])
        assert (major, minor) <= (target >> 56, target >> 48 & 0xFF)


# ---- The kernel table -----------------------------------------------------------------------------------------------

TABLE = """
// a comment
FWD(mma_sync, sm80, bf16, 128, plain)
FWD(mma_sync, sm80, bf16, 128, biased)  // the same unit
/* BWD(mma_sync, sm80, fp16, 64, plain)
*/
BWD(wgmma, sm90, bf16, 128, plain)
"""


def test_project_table_can_be_read() -> None:
    build.read_table((ROOT / build.KERNEL_TABLE).read_text())


def test_table() -> None:
    kernels = build.read_table(TABLE)
    assert [kernel.unit for kernel in kernels] == ["fwd_mma_sync_sm80_bf16_128"] * 2 + ["bwd_wgmma_sm90_bf16_128"]
    assert kernels[1].arguments == "(mma_sync, sm80, bf16, 128, biased)"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("\nFWD(mma_sync, sm80, bf16, plain)", r"kernels\.def:2: not of the form"),
        ("/*\n*/ FWD(mma_sync, sm81, bf16, 128, plain)", r"kernels\.def:2: sm81 is none of"),
        (TABLE + "BWD(wgmma, sm90, bf16, 128, plain)", r"kernels\.def:8: listed twice"),
    ],
)
def test_bad_table(table: str, message: str) -> None:
    with pytest.raises(SystemExit, match=message):
        build.read_table(table)


@pytest.fixture
def gpu_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A tree that has a GPU binding, a machine without a GPU, and an environment that has an nvcc."""
    binding = tmp_path / build.GPU_BINDING
    binding.parent.mkdir(parents=True)
    binding.touch()
    nvcc = tmp_path / "nvcc"
    nvcc.touch(mode=0o755)
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(build, "present_archs", lambda: set())
    return {"FLASH_ATTN_NVCC": str(nvcc)}


def test_plan_says_why_there_is_no_gpu_part(gpu_tree: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    table = build.read_table(TABLE)
    assert "kernels.def is empty" in build.plan_gpu([], gpu_tree | {"FLASH_ATTN_CUDA_ARCHS": "all"}).reason
    assert "no GPU" in build.plan_gpu(table, gpu_tree).reason
    monkeypatch.setattr(build, "present_archs", lambda: {"sm80", "sm86"})
    monkeypatch.setattr(build, "find_nvcc", lambda environ: None)
    assert "nvcc was not found" in build.plan_gpu(table, gpu_tree).reason
    with pytest.raises(SystemExit, match="nvcc was not found"):  # asked for: a reason is not enough
        build.plan_gpu(table, gpu_tree | {"FLASH_ATTN_CUDA_ARCHS": "sm80"})
    (build.ROOT / build.GPU_BINDING).unlink()
    assert "no GPU binding" in build.plan_gpu(table, gpu_tree).reason


def test_plan_selects(gpu_tree: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    table = build.read_table(TABLE)

    def plan(**environ: str) -> list[str]:
        return [kernel.unit + "_" + kernel.variant for kernel in build.plan_gpu(table, gpu_tree | environ).kernels]

    sm80 = ["fwd_mma_sync_sm80_bf16_128_plain", "fwd_mma_sync_sm80_bf16_128_biased"]
    sm90 = ["bwd_wgmma_sm90_bf16_128_plain"]
    assert plan(FLASH_ATTN_CUDA_ARCHS="all") == sm80 + sm90
    assert plan(FLASH_ATTN_CUDA_ARCHS="sm90") == sm80 + sm90  # PTX for whatever comes
    assert plan(FLASH_ATTN_CUDA_ARCHS="sm80;sm90", FLASH_ATTN_KERNELS="biased BF16") == sm80[1:]
    with pytest.raises(SystemExit, match="sm75"):
        plan(FLASH_ATTN_CUDA_ARCHS="sm75")
    with pytest.raises(SystemExit, match="leaves nothing"):
        plan(FLASH_ATTN_CUDA_ARCHS="sm80", FLASH_ATTN_KERNELS="fp8")
    monkeypatch.setattr(build, "present_archs", lambda: {"sm90"})
    assert plan() == sm80 + sm90


def test_find_nvcc(tmp_path: Path) -> None:
    for name in ("first", "home/bin", "path"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "nvcc").touch(mode=0o755)
    environ = {"PATH": str(tmp_path / "path")}
    assert build.find_nvcc(environ) == str(tmp_path / "path" / "nvcc")
    environ["CUDA_HOME"] = str(tmp_path / "home")
    assert build.find_nvcc(environ) == str(tmp_path / "home" / "bin" / "nvcc")
    environ["FLASH_ATTN_NVCC"] = str(tmp_path / "first" / "nvcc")
    assert build.find_nvcc(environ) == str(tmp_path / "first" / "nvcc")


def test_present_archs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    tool = tmp_path / "nvidia-smi"
    for answer, archs in (
        ("8.6", {"sm80", "sm86"}),
        ("9.0", {"sm80", "sm90"}),
        ("7.0", set()),
        ("12.0\n7.5", {"sm75", "sm80", "sm120"}),
    ):
        tool.write_text(f"#!/bin/sh\necho '{answer}'\n")
        tool.chmod(0o755)
        assert build.present_archs() == archs


# ---- Units ----------------------------------------------------------------------------------------------------------


def cxx_unit(folder: Path, name: str, text: str, *flags: str) -> object:
    source = folder / f"{name}.cpp"
    build.write_if_changed(source, text)
    compiler = build.shlex.split(build.cpp_extension.get_cxx_compiler())
    return build.Unit(name, source, folder / f"{name}.o", (*compiler, *build.cxx_flags(""), *flags))


def test_units_have_their_own_flags_and_are_compiled_once(tmp_path: Path) -> None:
    folder = tmp_path / "a folder: with $"  # what ninja and the shell would trip over
    text = "#if VALUE != {0}\n#error\n#endif\nconst char* text = NAME;\n"
    units = [cxx_unit(folder, f"unit{i}", text.format(i), f"-DVALUE={i}", '-DNAME="a $b"') for i in range(2)]
    objects = build.compile_units(units, folder)
    assert objects == [str(folder / "unit0.o"), str(folder / "unit1.o")]
    assert b"a $b" in Path(objects[0]).read_bytes()
    stamps = [os.stat(path).st_mtime_ns for path in objects]
    units = [cxx_unit(folder, f"unit{i}", text.format(i), f"-DVALUE={i}", '-DNAME="a $b"') for i in range(2)]
    build.compile_units(units, folder)
    assert [os.stat(path).st_mtime_ns for path in objects] == stamps
    build.compile_units([units[0], cxx_unit(folder, "unit1", text.format(3), "-DVALUE=3", "-DNAME=0")], folder)
    assert [os.stat(path).st_mtime_ns != stamp for path, stamp in zip(objects, stamps, strict=True)] == [False, True]


def test_unit_that_does_not_compile(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="did not compile"):
        build.compile_units([cxx_unit(tmp_path, "wrong", "#error on purpose\n")], tmp_path)
    assert "on purpose" in capfd.readouterr().out


def test_spills_and_serialised_wgmma_are_problems() -> None:
    fine = (
        "ptxas info    : Compiling entry function '_ZN5flash4fineEv' for 'sm_90a'\n"
        "ptxas info    : Function properties for _ZN5flash4fineEv\n"
        "    16 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 1 barriers\n"
    )
    spill = fine.replace("fine", "slow").replace("0 bytes spill loads", "12 bytes spill loads")
    serialised = (
        "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to\n"
    )
    assert build.ptxas_problems(fine) == []
    (problem,) = build.ptxas_problems(fine + spill)
    assert "slow" in problem and "12 bytes spill loads" in problem
    (problem,) = build.ptxas_problems(fine + serialised)
    assert "C7510" in problem


def test_more_static_shared_memory_than_the_host_counts_with_is_a_problem() -> None:
    """Alignment of the dynamic part to 1024 bytes made 240 bytes 1024: cards with 163 or 99 KB refused launches."""
    (counted,) = re.findall(r"kStaticShared = (\d+);", (ROOT / "csrc/gpu/mma_sync/tiles.h").read_text())
    assert build.STATIC_SHARED == int(counted)
    kernel = (
        "ptxas info    : Compiling entry function '_ZN5flash8mma_sync10bwd_kernelILi128EEEvv' for 'sm_80'\n"
        "ptxas info    : Used 255 registers, used 1 barriers, {} bytes smem, 1480 bytes cmem[0]\n"
    )
    assert build.ptxas_problems(kernel.format(build.STATIC_SHARED)) == []
    (problem,) = build.ptxas_problems(kernel.format(1024))
    assert "bwd_kernel" in problem and "1024 bytes of static shared memory" in problem
    assert build.ptxas_problems(kernel.format(1024).replace("10bwd_kernel", "11sink_kernel")) == []


def trivial_units(table: str, folder: Path) -> list[object]:
    return build.gpu_units(build.read_table(table), NVCC, folder, [TRIVIAL, ROOT / "csrc"])


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm75", "sm90"])
def test_common_headers_compile_for_the_device(arch: str, tmp_path: Path) -> None:
    source = ROOT / "tests" / "build" / "common" / "common_on_device.cu"
    command = [str(NVCC), *build.nvcc_flags(arch), f"-I{ROOT / 'csrc'}", "-c", str(source), "-o", str(tmp_path / "x.o")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert not build.ptxas_problems(done.stdout + done.stderr)


@needs_nvcc
@pytest.mark.parametrize("arch", ["sm80", "sm90"])
def test_table_line_becomes_an_object(arch: str, tmp_path: Path) -> None:
    units = trivial_units(f"FWD(trivial, {arch}, fp32, 64, plain)\nFWD(trivial, {arch}, fp32, 128, plain)", tmp_path)
    assert [unit.name for unit in units] == [f"fwd_trivial_{arch}_fp32_64", f"fwd_trivial_{arch}_fp32_128"]
    for path, head_dim in zip(build.compile_units(units, tmp_path), (64, 128), strict=True):
        symbols = output_of("nm", "-C", "--defined-only", path)
        assert f" void flash::trivial::launch_fwd<{head_dim}>(float*)" in symbols
        assert str(ROOT).encode() not in Path(path).read_bytes()
    assert [flag for flag in units[0].command if "gencode" in flag] == [f"-gencode={build.GENCODES[arch]}"]


@needs_nvcc
def test_kernel_that_spills_fails_with_its_name(tmp_path: Path) -> None:
    units = trivial_units("SPILL(trivial, sm80, fp32, 128, plain)", tmp_path)
    for _ in range(2):  # a second build compiles nothing and fails all the same
        with pytest.raises(SystemExit, match=r"(?s)spill_trivial_sm80_fp32_128.*too_many_registers.*spill stores"):
            build.compile_units(units, tmp_path)


@needs_nvcc
def test_listed_kernel_that_was_not_generated_fails_with_its_name(tmp_path: Path) -> None:
    units = trivial_units("FWD(trivial, sm80, fp32, 64, plain)\nFWD(trivial, sm80, fp32, 128, plain)", tmp_path)
    objects = build.compile_units(units, tmp_path)
    library = tmp_path / "library.so"
    link = ["c++", "-shared", "-fPIC", f"-I{tmp_path}", str(TRIVIAL / "gpu" / "dispatch.cpp"), "-o", str(library)]
    subprocess.run([*link, *objects], check=True)
    build.check_symbols(library)
    subprocess.run([*link, objects[0]], check=True)
    with pytest.raises(SystemExit, match=r"flash::trivial::launch_fwd<128>"):
        build.check_symbols(library)


@needs_nvcc
def test_toolkit() -> None:
    toolkit = build.toolkit_of(NVCC)
    assert (toolkit / "include" / "cuda_runtime.h").exists()
    assert list(toolkit.glob("lib*/libcudart_static.a"))


# ---- sdist and wheel ------------------------------------------------------------------------------------------------


def call_backend(function: str, tree: Path, output: Path) -> Path:
    """What pip and `python -m build --no-isolation` do, without asking an index for anything."""
    output.mkdir()
    code = f"from setuptools.build_meta import {function}; print({function}({str(output)!r}))"
    answer = subprocess.run([sys.executable, "-c", code], cwd=tree, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return output / answer.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = tmp_path_factory.mktemp("tree")
    ignore = shutil.ignore_patterns(".git", ".venv", "build", "dist", "runs", "*.egg-info", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, tree, ignore=ignore, dirs_exist_ok=True)  # also leaves tests/build out
    shutil.copytree(TRIVIAL, tree / "tests" / "build", dirs_exist_ok=True)
    return call_backend("build_sdist", tree, tree.parent / (tree.name + "_dist"))


def test_sdist_holds_what_a_build_needs_and_nothing_built(sdist: Path) -> None:
    assert sdist.name == f"flash_attn-{flash_attn.__version__}.tar.gz"
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"setup.py", "pyproject.toml", "LICENSE", "README.md", "Makefile"}
    for folder in ("csrc", "flash_attn", "tests"):
        files = [path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file()]
        wanted |= {str(path) for path in files if "__pycache__" not in path.parts}
    built = {name for name in wanted if name.endswith((".so", "_build_info.json"))}
    assert wanted - built <= names
    assert not [name for name in names if name.endswith((".so", ".o", ".pyc", "_build_info.json"))]


def test_lint_needs_neither_torch_nor_a_build(tmp_path: Path) -> None:
    """In an environment of its own: the tools that the extra dev names, and nothing else."""
    variables = [f"VENV={tmp_path / 'venv'}", "TORCH=the-torch", f"PYTHON={sys.executable}"]
    environment = {name: value for name, value in os.environ.items() if name != "MAKEFLAGS"}  # of a make that runs this
    command = ["make", "--dry-run", "-C", str(ROOT), *variables]
    lint, test = (
        subprocess.check_output([*command, goal], env=environment, text=True, stderr=subprocess.STDOUT)
        for goal in ("lint", "test")
    )
    assert "ruff check" in lint and "pytest" in test
    for step in ("the-torch", "setup.py build_ext", "--editable"):
        assert step in test and step not in lint


@pytest.mark.full
def test_wheel_from_sdist(sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.iterdir()
    stale = tree / "build" / f"lib.linux-{os.uname().machine}-{sys.implementation.cache_tag}" / "flash_attn" / "old.py"
    stale.parent.mkdir(parents=True)
    stale.touch()
    wheel = call_backend("build_wheel", tree, tmp_path / "wheels")
    assert re.fullmatch(rf"flash_attn-{re.escape(flash_attn.__version__)}-py3-none-linux_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    assert {"flash_attn/_C.so", "flash_attn/_build_info.json", "flash_attn/__init__.py"} <= set(names)
    assert not [name for name in names if not name.startswith(("flash_attn/", "flash_attn-"))], "tests stay out"
    assert "flash_attn/old.py" not in names
    code = "import flash_attn; print(flash_attn.__file__, bool(flash_attn.is_available()))"
    answer = subprocess.check_output([sys.executable, "-c", code], cwd=tmp_path / "site", text=True)
    assert answer.split() == [str(tmp_path / "site" / "flash_attn" / "__init__.py"), "True"]
