"""The C++ lines of the guide to deployed files, compiled with onnxruntime's own headers."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch

from tests import needs
from tests.docs.documents import blocks
from tests.exporters.test_deploy_targets import GUIDE, NAMES, Pictures, classify, made, pictures

MAIN = """
#include <cstdio>
#include <fstream>
#include <iterator>
int main(int, char** words) {
  Ort::Env environment;
  Ort::Session session(environment, words[1], Ort::SessionOptions{});
  std::ifstream file(words[2], std::ios::binary);
  std::vector<uint8_t> rgb{std::istreambuf_iterator<char>(file), {}};
  Ort::AllocatorWithDefaultOptions allocator;
  auto names = session.GetModelMetadata().LookupCustomMetadataMapAllocated("classes", allocator);
  std::printf("[%d, %s]", int(classify(session, rgb, 40, 30)), names.get());
}
"""


def test_the_guide_classifies_as_python_does(tmp_path: Path) -> None:
    headers = os.environ.get("EDGEFL_ONNXRUNTIME_INCLUDE")
    if not headers:
        pytest.skip("EDGEFL_ONNXRUNTIME_INCLUDE does not name the folder of onnxruntime_cxx_api.h")
    library = next(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*"))
    (tmp_path / "main.cpp").write_text(next(blocks(GUIDE, "cpp")).text + MAIN)
    (tmp_path / "libonnxruntime.so.1").symlink_to(library)  # the name that the library has for the loader
    command = [needs.require("c++"), "-std=c++17", f"-I{headers}", "main.cpp", str(library), "-o", "main"]
    subprocess.run([*command, f"-Wl,-rpath,{tmp_path}"], cwd=tmp_path, check=True)
    torch.manual_seed(5)
    file = made(Pictures().eval(), pictures(), preprocessing=True).save(tmp_path / "photos.onnx")
    rgb = np.random.default_rng(0).integers(0, 256, (30, 40, 3)).astype(np.uint8)
    (tmp_path / "rgb").write_bytes(rgb.tobytes())

    found = subprocess.check_output([tmp_path / "main", file, tmp_path / "rgb"], text=True)

    number, names = json.loads(found)
    assert (names[number], names) == (classify(file.read_bytes(), lambda recipe: rgb)[0], list(NAMES))
