"""The shape of the code: who may include or import whom, how long a file may be, what may stand nowhere.

Data flows one way: interface → checks → autograd → _ops → binding → cpu | gpu/dispatch → family → tile → ptx, with
common below all. A new folder or module needs a line here: where it stands is a decision, not an accident.
"""

from __future__ import annotations

import ast
import re
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CSRC = ROOT / "csrc"
PACKAGE = ROOT / "flash_attn"

CXX_SUFFIXES = {".h", ".cpp", ".cuh", ".cu", ".def"}
CXX_FILES = sorted(path for path in CSRC.rglob("*") if path.suffix in CXX_SUFFIXES)
PYTHON_FILES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 500


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


# ---- C++ ------------------------------------------------------------------------------------------------------------

# Layer → what its files may include beside files of the same layer: other layers or single headers of them.
CXX_LAYERS: dict[str, set[str]] = {
    "common": set(),
    # Compiled with flags of their own, so they see nothing whose inline code other files share: the linker keeps one
    # copy of an inline function, and one with AVX-512 instructions would crash older machines.
    "cpu/isa": {"cpu/micro_kernels.h"},
    "cpu": {"common", "cpu/isa/isa.h"},
    "gpu/ptx": {"common/host_device.h", "common/kernel_key.h"},
    "gpu/tile": {"common", "gpu/ptx"},  # .h: for the host, too
    "gpu/passes": {"common", "gpu/ptx", "gpu/tile"},
    "gpu/mma_sync": {"common", "gpu/ptx", "gpu/tile", "gpu/passes", "gpu/families.h"},
    "gpu/wgmma": {"common", "gpu/ptx", "gpu/tile", "gpu/passes", "gpu/families.h"},
    "gpu": {
        "common",
        "gpu/mma_sync/tiles.h",
        "gpu/wgmma/tiles.h",
        "gpu/tile/block_tiles.h",
        "gpu/tile/softcap.h",
        "gpu/tile/turns.h",
        "selected_kernels.def",
    },
    "binding": {"common", "cpu", "gpu/dispatch.h"},
}
INCLUDE = re.compile(r'^\s*#\s*include\s*(["<])([^">]+)[">]', re.MULTILINE)
GENERATED = {"selected_kernels.def"}


def layer_of(path: str) -> str:
    """The innermost layer that `path` (relative to csrc/) lies in."""
    layers = [layer for layer in CXX_LAYERS if path.startswith(layer + "/")]
    return max(layers, key=len, default="")


def includes(path: Path, quote: str) -> list[str]:
    return [name for mark, name in INCLUDE.findall(path.read_text()) if mark == quote]


@pytest.mark.parametrize("path", CXX_FILES, ids=relative)
def test_include_direction(path: Path) -> None:
    name = str(path.relative_to(CSRC))
    layer = layer_of(name)
    assert layer or name == "kernels.def", f"{name} is in no layer"
    for target in includes(path, '"'):
        assert target in GENERATED or (CSRC / target).is_file(), f"{target}: write paths as seen from csrc/"
        allowed = {layer, *CXX_LAYERS.get(layer, ())}
        assert layer_of(target) in allowed or target in allowed, f"{name} ({layer}) includes {target}"
    for target in includes(path, "<"):
        foreign = re.match(r"torch/|ATen/|c10/|pybind11/|Python\.h|cutlass/|cute/", target)
        torch_in_binding = layer == "binding" and target.startswith("torch/")
        assert not foreign or torch_in_binding, f"{name} includes <{target}>"
        if layer in ("cpu", "cpu/isa"):
            assert not re.match(r"cuda|cu\w*\.h", target), f"{name} includes <{target}>"


def test_includes_have_no_cycle() -> None:
    graph = {str(path.relative_to(CSRC)): set(includes(path, '"')) for path in CXX_FILES}
    TopologicalSorter(graph).prepare()


def test_headers_are_guarded() -> None:
    headers = [path for path in CXX_FILES if path.suffix in {".h", ".cuh"}]
    assert not [relative(path) for path in headers if "#pragma once" not in path.read_text()]


def test_asm_is_in_ptx_alone() -> None:
    device = [path for path in (CSRC / "gpu").rglob("*.*") if path.parent.name != "ptx"]
    assert not [relative(path) for path in device if re.search(r"\basm\b", path.read_text(errors="ignore"))]


# ---- Python ---------------------------------------------------------------------------------------------------------

# Module or subpackage → the modules of ours that it may import.
BACKENDS = {"_ops", "reference"}
PYTHON_LAYERS: dict[str, set[str]] = {
    "problem": set(),
    "dropout": {"problem"},
    "checks": {"problem"},
    "png": set(),
    "block_patterns": {"dropout"},  # its Philox
    "block_mask": {"block_patterns", "checks", "io_model", "png", "problem"},
    "_ops": {"checks", "problem", "dropout"},
    "reference": {"block_patterns", "problem", "dropout"},
    "from_lse": {"block_mask", "checks", "problem", "reference"},
    "higher_order": {"problem", "reference"},
    "gpu": {"_ops", "reference"},
    "autograd": {"problem", "dropout", "gpu", "higher_order", *BACKENDS},
    "dispatch": {"autograd", "block_mask", "checks", "problem", "softmax_dmask", *BACKENDS},
    "interface": {"block_mask", "dispatch", "checks", "problem"},
    "baselines": {"block_mask", "dispatch", "checks", "problem", *BACKENDS},
    "bert_padding": set(),
    "softmax_dmask": {"dropout", "problem", "reference"},
    "flash_attn_interface": {"autograd", "block_mask", "checks", "dispatch", "interface", "problem", "softmax_dmask"},
    "flash_attn_triton": {"checks", "dispatch"},
    "flash_attention": {"bert_padding", "interface"},
    "flash_blocksparse_attn_interface": {"block_mask", "checks", "flash_attn_interface"},
    "flash_blocksparse_attention": {"bert_padding", "checks", "flash_attention", "flash_blocksparse_attn_interface"},
    "layers": {"checks", "problem"},
    "modules": {"baselines", "block_mask", "interface", "layers"},
    "explain": {"_ops", "block_mask", "checks", "dispatch", "reference"},
    "gpus": set(),
    "io_model": {"gpus"},
    "paper": {"baselines", "block_mask", "gpus", "interface", "io_model", "reference"},
    "__init__": {"interface", "baselines", "block_mask", "bert_padding", "dropout", "explain", "from_lse", *BACKENDS},
}
RUN_TIME_NEEDS = {"torch", "einops", "flash_attn"}
# A program of its own, which nothing imports: what its extra of pyproject.toml brings.
PAPER_NEEDS = {"matplotlib", "tqdm", "local_attention", "linformer", "performer_pytorch", "reformer_pytorch"}


def module_name(path: Path) -> str:
    """flash_attn/layers/rotary.py → layers: a subpackage stands in one place."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Absolute names of all that `path` imports, also inside functions; type checking counts like running."""
    names: set[str] = set()
    package = (PACKAGE.name, *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            # `from flash_attn import checks` imports a module, `from torch import Tensor` a name of one.
            names |= {f"{module}.{alias.name}" for alias in node.names} if module == PACKAGE.name else {module}
    return names


def own_imports(path: Path) -> set[str]:
    own = [name.split(".") for name in imports(path)]
    return {parts[1] if len(parts) > 1 else "__init__" for parts in own if parts[0] == PACKAGE.name}


@pytest.mark.parametrize("path", PYTHON_FILES, ids=relative)
def test_import_direction(path: Path) -> None:
    name = module_name(path)
    assert name in PYTHON_LAYERS, f"{name} has no line in PYTHON_LAYERS"
    wrong = own_imports(path) - PYTHON_LAYERS[name] - {name}
    assert not wrong, f"{name} imports {', '.join(sorted(wrong))}"


def test_imports_have_no_cycle() -> None:
    TopologicalSorter(PYTHON_LAYERS).prepare()


@pytest.mark.parametrize("path", PYTHON_FILES, ids=relative)
def test_run_time_needs_are_torch_and_einops(path: Path) -> None:
    known = RUN_TIME_NEEDS | (PAPER_NEEDS if module_name(path) == "paper" else set())
    foreign = {name.split(".")[0] for name in imports(path)} - set(sys.stdlib_module_names) - known
    assert not foreign, f"{relative(path)} imports {', '.join(sorted(foreign))}"


@pytest.mark.parametrize("path", PYTHON_FILES, ids=relative)
def test_no_keyword_catch_all(path: Path) -> None:
    """A misspelt option must be an error."""
    functions = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    assert not [function.name for function in functions if function.args.kwarg is not None]


# ---- All files ------------------------------------------------------------------------------------------------------

SUFFIXES = {".py", ".md", ".toml", ".in", ".txt", *CXX_SUFFIXES}
SKIPPED = {"build", "dist", "runs"}


def all_files() -> list[Path]:
    """Every text file of the project, without what builds and tools leave behind."""
    files = [path for path in ROOT.iterdir() if path.is_file() and (path.suffix in SUFFIXES or path.name == "Makefile")]
    files.append(ROOT / ".ci" / "run")
    for folder in ROOT.iterdir():
        if (
            folder.is_dir()
            and folder.name not in SKIPPED
            and not folder.name.startswith(".")
            and "egg" not in folder.name
        ):
            files += [path for path in folder.rglob("*") if path.suffix in SUFFIXES]
    return sorted(path for path in files if path.is_file())


@pytest.mark.parametrize("path", all_files(), ids=relative)
def test_file_can_be_read_by_a_stranger(path: Path) -> None:
    text = path.read_text()
    # No path of the machine that it was written on. Split here, so that this line is not a finding itself.
    for home in ("/ro" + "ot/", "/wo" + "rk/", "/ho" + "me/", "/Us" + "ers/", "/tm" + "p/"):
        assert home not in text, home
    if path.suffix in {".py", *CXX_SUFFIXES}:
        lines = text.count("\n")
        assert lines <= MAX_LINES, f"{lines} lines: split it along the reason to change"
        assert not re.search(r"\b(TODO|FIXME|XXX)\b(?!\(#\d+\))", text.replace("(TODO|FIXME|XXX)", ""))


def test_every_instruction_set_has_its_flags() -> None:
    """setup.py's table and the folder name the same files."""
    tree = ast.parse((ROOT / "setup.py").read_text())
    (table,) = [n.value for n in tree.body if isinstance(n, ast.AnnAssign) and ast.unparse(n.target) == "ISA_UNITS"]
    assert isinstance(table, ast.Dict)
    assert {ast.literal_eval(name) for name in table.keys if name is not None} == {
        path.stem for path in (CSRC / "cpu" / "isa").glob("*.cpp")
    }
