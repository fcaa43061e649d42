"""Where compiled CUDA sources come from."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.fake_nvcc import make_empty_home, put_nvcc

from common.kernels.cuda_source import PAGES, QUANTIZED, CudaSource, compiled, main

COPY_ITSELF = 'while [ "$1" != -o ]; do shift; done; read -r line < "$0"; echo "$line" > "$2"'


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_empty_home(tmp_path, monkeypatch)


@pytest.mark.parametrize("source", [PAGES, QUANTIZED], ids=lambda source: source.path.name)
def test_library_is_compiled_once_and_nothing_is_left_beside_it(home: Path, source: CudaSource) -> None:
    put_nvcc(home, COPY_ITSELF)
    path = compiled(source)
    assert [p for p in home.rglob("*") if p.is_file()] == [path]
    put_nvcc(home, "exit 1")
    assert compiled(source) == path


def test_libraries_compiled_ahead_need_no_compiler(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put_nvcc(home, COPY_ITSELF)
    folder = home.parent / "kernels"
    monkeypatch.setattr(sys, "argv", ["cuda_source", str(folder)])
    main()
    put_nvcc(home, "exit 1")
    monkeypatch.syspath_prepend(str(folder))
    assert capsys.readouterr().out.split() == [str(compiled(source)) for source in (PAGES, QUANTIZED)]


def test_nvcc_is_asked_for_gpus_that_can_run_the_source_and_for_later_ones(tmp_path: Path) -> None:
    source = CudaSource(tmp_path, oldest=80)
    assert source.architectures == ["compute_80,code=sm_80", "compute_90,code=sm_90", "compute_90,code=compute_90"]
