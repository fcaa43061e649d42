"""`LLM.embed`, `LLM.encode` and `LLM.score` with tiny encoders, against transformers."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from kvrelay import LLM, BadRequest, ConfigError, KvRelayError
from support.tiny_encoders import make_encoder
from tokenizers import Tokenizer

TEXTS = ["A man eats food.", "the quick brown fox", "a", "the woman plays the violin and sings in the rain " * 4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_encoder(tmp_path_factory.mktemp("bert"))


def token_ids(folder: Path, text: str, second: str | None = None) -> list[int]:
    return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, second).ids


def hidden(folder: Path, text: str) -> np.ndarray:
    model = transformers.AutoModel.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(torch.tensor([token_ids(folder, text)])).last_hidden_state[0].numpy()


def test_vectors_are_those_of_transformers(folder: Path) -> None:
    expected = np.stack([hidden(folder, text).mean(0) for text in TEXTS])
    with LLM(str(folder)) as llm:
        raw = llm.embed(TEXTS, normalize=False)
        np.testing.assert_allclose([each.outputs.embedding for each in raw], expected, atol=1e-5)
        assert [each.prompt_token_ids for each in raw] == [token_ids(folder, text) for text in TEXTS]
        cut = llm.embed([token_ids(folder, text) for text in TEXTS], dimensions=5)
        norm = np.linalg.norm(expected[:, :5], axis=1, keepdims=True)
        np.testing.assert_allclose([each.outputs.embedding for each in cut], expected[:, :5] / norm, atol=1e-5)
        by_token = llm.encode(TEXTS[0])[0].outputs.data
        rows = hidden(folder, TEXTS[0])
        np.testing.assert_allclose(by_token, rows / np.linalg.norm(rows, axis=1, keepdims=True), atol=1e-5)
        one, *others = (each / np.linalg.norm(each) for each in expected)
        scores = [each.outputs.score for each in llm.score(TEXTS[0], TEXTS[1:])]
        np.testing.assert_allclose(scores, [one @ each for each in others], atol=1e-5)


@pytest.mark.parametrize("family", ["Bert", "XLMRoberta"])
def test_a_cross_encoder_scores_pairs_as_in_transformers(tmp_path: Path, family: str) -> None:
    folder = make_encoder(tmp_path / "cross", family, labels=1)  # type: ignore[arg-type]
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    expected: list[float] = []
    for text in TEXTS[1:]:
        pair = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXTS[0], text)
        types = torch.tensor([pair.type_ids])
        with torch.no_grad():
            expected.append(torch.sigmoid(model(torch.tensor([pair.ids]), token_type_ids=types).logits).item())
    with LLM(str(folder)) as llm:
        scores = [each.outputs.score for each in llm.score(TEXTS[0], TEXTS[1:])]
        np.testing.assert_allclose(scores, expected, atol=1e-5)
        assert len(set(scores)) == 3
        with pytest.raises(BadRequest, match="does not embed"):
            llm.embed("a")


def test_what_does_not_fit_is_refused_before_anything_runs(folder: Path) -> None:
    with LLM(str(folder), max_model_len=16) as llm:
        with pytest.raises(BadRequest, match="However, input 1 has"):
            llm.embed(["a", "the " * 30])
        [cut] = llm.embed("the " * 30, truncate_prompt_tokens=-1)
        assert len(cut.prompt_token_ids) == 16
        with pytest.raises(BadRequest, match="does not generate text"):
            llm.generate("a")
    with pytest.raises(BadRequest, match="closed"):
        llm.embed("a")
    with pytest.raises(ConfigError, match="max_model_len 65 is more than the 64"):
        LLM(str(folder), max_model_len=65)


def test_closing_ends_a_call_on_another_thread(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(str(folder))
    pooler: Any = llm._engine._pooler  # type: ignore[attr-defined]
    compute = pooler.compute
    started, go_on = threading.Event(), threading.Event()

    def wait(batch: Any) -> list[bytes]:
        started.set()
        assert go_on.wait(10)
        return compute(batch)

    monkeypatch.setattr(pooler, "compute", wait)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(llm.embed, ["a"] * 1000)
        assert started.wait(10)
        llm.close()
        go_on.set()
        with pytest.raises(KvRelayError, match="closed during this call"):
            call.result(10)


def test_a_generating_model_is_refused() -> None:
    with LLM(kv_memory_gb=0.05) as llm, pytest.raises(BadRequest, match="the model 'demo' does not embed"):
        llm.embed("a")
