"""Options of experts that move: what no rank could do is refused in one sentence before any weight is read."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.oracle import make_tiny

from common.base.errors import ConfigError
from common.config.service_configs import DecodeConfig
from common.model.config import load_model_config
from common.node.options import ExpertSettings


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("mixtral", tmp_path_factory.mktemp("models") / "mixtral")


def options(model: Path, threshold: float | None, redundant: int, tp: int) -> ExpertSettings:
    config = DecodeConfig(
        model=str(model), rebalance_experts=threshold, redundant_experts=redundant, tensor_parallel_size=tp
    )
    return ExpertSettings.of(config, load_model_config(model))


def test_experts_stay_unless_asked_and_on_one_rank(mixture: Path) -> None:
    assert options(mixture, None, 0, 2) == ExpertSettings(None, 0)
    assert options(mixture, 1.1, 2, 1) == ExpertSettings(None, 0)
    assert options(mixture, 1.1, 2, 2) == ExpertSettings(1.1, 2)


@pytest.mark.parametrize(
    ("model", "threshold", "redundant", "message"),
    [
        ("mixtral", None, 2, "--redundant-experts needs --rebalance-experts"),
        ("mixtral", 1.1, 5, "2 ranks can hold at most 4 replicas of 4 experts"),
        ("llama", 1.1, 0, "needs a native family with experts, which LlamaForCausalLM is not"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, model: str, threshold: float | None, redundant: int, message: str
) -> None:
    folder = make_tiny(model, tmp_path / model)
    with pytest.raises(ConfigError, match=message):
        options(folder, threshold, redundant, 2)


def test_experts_do_not_move_where_context_parallel_ranks_have_copies(mixture: Path) -> None:
    config = DecodeConfig(model=str(mixture), tensor_parallel_size=2, rebalance_experts=1.1, decode_context_parallel=2)
    with pytest.raises(ConfigError, match="--rebalance-experts does not work with context-parallel ranks"):
        ExpertSettings.of(config, load_model_config(mixture))
