"""The choice of kernels by measurement: what is chosen, that it is kept, and what a wrong file of it does."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from common.base.variables import CACHE
from common.kernels.native import calibration, find
from common.kernels.native.calibration import ROWS, Product, best, choose
from common.kernels.native.find import arithmetic, describe_native, find_native

LIBRARY = Path("kvrelay-1.so")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE, str(tmp_path))
    monkeypatch.setattr(calibration, "_waited_s", lambda: 0.0)  # other tests take the cores
    return tmp_path / "native"


def times(**factors: float) -> dict[str, list[float]]:
    return {name: [factor * 1e-3] * len(ROWS) for name, factor in factors.items()}


class Candidates:
    """Products whose times are what is asked for."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self) -> Mapping[str, Product]:
        self.made += 1

        def fast(x: torch.Tensor, copy: int) -> None:
            pass

        def slow(x: torch.Tensor, copy: int) -> None:
            torch.mm(torch.ones(64, 256), torch.ones(256, 64))

        return {"slow": slow, "fast": fast}


def test_the_best_over_all_row_counts_together_is_chosen() -> None:
    choice = best({"wide": [9.0] * 3 + [1.0] * 3, "narrow": [1.0] * 3 + [4.0] * 3}, "wide")
    assert choice.kernels == "narrow"
    assert choice.times_as_long == {"wide": pytest.approx(1.5), "narrow": 1.0}
    assert str(choice) == "times measured: wide 1.5 x"


@pytest.mark.parametrize("other", ["avx512", "torch"])
def test_what_is_usual_is_chosen_unless_another_is_much_faster(other: str) -> None:
    assert best(times(**{"amx": 1.0, other: 0.9}), "amx").kernels == "amx"
    assert best(times(**{"amx": 1.0, other: 0.7}), "amx").kernels == other


def test_a_choice_is_measured_once(kept: Path) -> None:
    candidates = Candidates()
    assert [getattr(choose(LIBRARY, 2, "slow", candidates), "kernels", None) for _ in range(2)] == ["fast", "fast"]
    assert candidates.made == 1
    choose(LIBRARY, 1, "slow", candidates)
    choose(Path("kvrelay-2.so"), 2, "slow", candidates)
    assert candidates.made == 3


def test_on_a_crowded_machine_what_is_usual_is_chosen(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited = iter([1.0, 100.0])
    monkeypatch.setattr(calibration, "_waited_s", lambda: next(waited))
    assert getattr(choose(LIBRARY, 2, "slow", Candidates()), "kernels", None) == "slow"


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"kernels": "fast"}', '{"kernels": "sse9", "times_as_long": {"fast": 1}}']
)
def test_a_file_that_says_nothing_is_replaced(kept: Path, text: str) -> None:
    candidates = Candidates()
    choose(LIBRARY, 2, "slow", candidates)
    (file,) = kept.glob("choice-*")
    file.write_text(text)
    assert getattr(choose(LIBRARY, 2, "slow", candidates), "kernels", None) == "fast"
    assert candidates.made == 2
    assert file.read_text().startswith('{"kernels": "fast"')


def test_of_processes_that_start_together_one_measures(kept: Path) -> None:
    candidates = Candidates()
    threads = [threading.Thread(target=choose, args=(LIBRARY, 2, "slow", candidates)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert candidates.made == 1


def test_without_a_place_to_keep_it_nothing_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE, str(tmp_path / "file"))
    candidates = Candidates()
    assert choose(LIBRARY, 2, "slow", candidates) is None
    assert not candidates.made


def test_while_another_process_measures_for_too_long_nothing_is_chosen(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "_LOCK_TIMEOUT_S", 0.0)
    kept.mkdir()
    with calibration.locked(kept / "lock-choice", 0.0):
        assert choose(LIBRARY, 2, "slow", Candidates()) is None


def test_a_single_candidate_is_not_measured(kept: Path) -> None:
    def fails(x: torch.Tensor, copy: int) -> None:
        raise AssertionError

    choice = choose(LIBRARY, 2, "avx2", lambda: {"avx2": fails})
    assert choice is not None
    assert choice.kernels == "avx2"


def test_a_real_choice_says_what_it_was_measured_against() -> None:
    native = find_native()
    if native is None:
        pytest.skip("no native kernels")
    chosen = native.variant
    others = len(find._candidates(native)) - 1  # pyright: ignore[reportPrivateUsage]
    native.select(chosen)
    assert ("times measured: " in describe_native()) == (others > 0)
    assert arithmetic() in ("", "bf16", "amx")


def test_onednns_products_are_left_out_where_it_refuses_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on processors with AVX2 only."""

    def refuses(*_: object) -> None:
        raise RuntimeError("no bfloat16")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuses)
    assert find._onednn_product([torch.zeros(4, 4).bfloat16()]) is None  # pyright: ignore[reportPrivateUsage]
