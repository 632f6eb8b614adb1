"""The CPU kernel in a small C++ program under address, undefined-behaviour and thread sanitizers."""

import subprocess
from pathlib import Path

import pytest
import torch

from dcformer.ops.mixers.cpu import build

HERE = Path(__file__).parent / "cpp"


@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_sanitizers_find_nothing(sanitizer, tmp_path):
    cxx = build.compiler()
    if cxx is None:
        pytest.skip("no C++ compiler")
    checked = [f"-fsanitize={sanitizer}", "-fno-sanitize-recover=all"]
    (tmp_path / "empty.cpp").write_text("int main() {}")
    if subprocess.run([cxx, *checked, "empty.cpp"], cwd=tmp_path, capture_output=True).returncode != 0:
        pytest.skip(f"{cxx} has no sanitizers")
    torch_folder = Path(torch.__file__).parent
    kernel = Path(build.__file__).parent
    includes = [HERE, kernel, torch_folder / "include"]
    command = [
        cxx,
        "-std=c++20",
        "-O0",
        "-g",
        "-w",
        *checked,
        "-DCPU_CAPABILITY=DEFAULT",
        *(f"-I{folder}" for folder in includes),
    ]
    libraries = [f"-L{torch_folder / 'lib'}", "-lc10", f"-Wl,-rpath,{torch_folder / 'lib'}", "-pthread"]
    sources = [str(kernel / "forward.cpp"), str(kernel / "backward.cpp"), str(HERE / "driver.cpp")]
    subprocess.run([*command, *sources, "-o", str(tmp_path / "driver"), *libraries], check=True)
    result = subprocess.run([tmp_path / "driver"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
