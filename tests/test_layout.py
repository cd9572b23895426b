"""The map in the README is what is on the disk, and a module imports only what stands above it there."""

import ast
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "aquiline"
OPENERS = {"__init__.py", "__main__.py"}
INSIDE_FUNCTIONS = {  # what may be imported there: in the one place that needs it, and late, for it is slow or optional
    "data/chat.py": {"tokenizers", "transformers"},
    "files/checkpoint.py": {"huggingface_hub"},
    "files/draft_openvino.py": {"openvino", "optimum"},
    "files/tables.py": {"datasets"},
    "files/hf_folder.py": {"transformers"},
    "model/hf_target.py": {"transformers"},
    "train/log.py": {"wandb"},
    "train/shard.py": {"torch"},
}


def readme_map() -> list[str]:
    (block,) = re.findall(r"^```text map\n(.*?)^```", (ROOT / "README.md").read_text("utf-8"), re.M | re.S)
    return re.findall(r"^(\S+\.py) +\S", block, re.M)


def imports(nodes) -> set[str]:
    """The modules these nodes import, `from aquiline.files import disk` as aquiline.files and aquiline.files.disk."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_the_map_names_every_module_once_and_no_other():
    here = {str(p.relative_to(PACKAGE)) for p in PACKAGE.rglob("*.py") if p.name not in OPENERS}
    assert sorted(readme_map()) == sorted(here)


def test_imports_go_one_way():
    place = {"aquiline." + name.removesuffix(".py").replace("/", "."): i for i, name in enumerate(readme_map())}
    for name in readme_map():
        own = "aquiline." + name.removesuffix(".py").replace("/", ".")
        for other in imports(ast.walk(ast.parse((PACKAGE / name).read_text("utf-8")))) & set(place):
            assert place[other] < place[own], f"{name} imports {other}, which stands below it in the map"


def test_imports_stand_at_the_top():
    for name in (name for name in readme_map() if not name.startswith("cli/")):
        functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
        outer = [n for n in ast.walk(ast.parse((PACKAGE / name).read_text("utf-8"))) if isinstance(n, functions)]
        late = {module.split(".")[0] for function in outer for module in imports(ast.walk(function))}
        assert late <= INSIDE_FUNCTIONS.get(name, set()), f"{name} imports {late} inside a function"


def test_package_files_are_nearly_empty():
    for path in PACKAGE.rglob("__init__.py"):
        assert len(path.read_text("utf-8").splitlines()) <= 3, path


def test_slow_packages_wait_until_they_are_needed():
    for module, late in (("aquiline.cli.main", {"torch", "numpy", "transformers"}), ("aquiline.api", {"transformers"})):
        code = f"import sys, {module}; assert not {late} & set(sys.modules), {late} & set(sys.modules)"
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
