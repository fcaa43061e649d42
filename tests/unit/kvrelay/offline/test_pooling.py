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
from support.tiny_encoders import make_encoder
from tokenizers import Tokenizer

from kvrelay import LLM, BadRequest, ConfigError, KvRelayError

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


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (["a", None], "input 1: must be one text"),
        (["a", {"prompt": None}], "input 1: must be one text"),
        ([1, "a"], "input 0: must be one text"),
        (["a", [1], "b", []], "input 3 is empty"),
        ([[1]] * 2100 + [[10**6]], "input 2100 has token ids"),
        (["a"] * 2100 + ["the " * 90], "However, input 2100 has"),
        ([[1], "a", "the " * 90], "However, input 2 has"),
        (["a", "a\ud800"], "input 1: must be Unicode text"),
    ],
)
def test_wrong_inputs_are_numbered_over_all(folder: Path, prompts: list[Any], message: str) -> None:
    with LLM(str(folder)) as llm, pytest.raises(BadRequest, match=message):
        llm.embed(prompts)


def test_texts_and_token_ids_may_be_mixed(folder: Path) -> None:
    ids = [token_ids(folder, text) for text in TEXTS]
    prompts: list[Any] = [TEXTS[0], ids[1], np.array(ids[2]), TEXTS[3]]
    with LLM(str(folder)) as llm:
        mixed = llm.embed(prompts)
        vectors = [each.outputs.embedding for each in llm.embed(TEXTS)]
    assert [each.prompt_token_ids for each in mixed] == ids
    np.testing.assert_allclose([each.outputs.embedding for each in mixed], vectors, atol=1e-5)


def test_any_number_of_pairs_is_scored(folder: Path) -> None:
    with LLM(str(folder)) as llm:
        one, other = (llm.score("a", text)[0].outputs.score for text in TEXTS[:2])
        found = [each.outputs.score for each in llm.score("a", [TEXTS[0]] * 2048 + [TEXTS[1]])]
        np.testing.assert_allclose([found[0], *found[2047:]], [one, one, other], atol=1e-5)
        pairs = llm.score(["a"] * 2049, [TEXTS[0]] * 2048 + [TEXTS[1]])
        np.testing.assert_allclose([each.outputs.score for each in pairs], found, atol=1e-5)
        with pytest.raises(BadRequest, match="However, input 2048 has"):
            llm.score("a", ["a"] * 2048 + ["the " * 90])
        with pytest.raises(BadRequest, match="text_1 has 2049 texts and text_2 3000"):
            llm.score(["a"] * 2049, ["a"] * 3000)
        wrong: Any = ["a"] * 2048 + [None]
        with pytest.raises(BadRequest, match=r"text_2\.2048: must be a text"):
            llm.score("a", wrong)
        with pytest.raises(BadRequest, match="text_2"):
            llm.score("a", [])
        with pytest.raises(BadRequest, match=r"text_2\.1: must be Unicode text"):
            llm.score("a", ["a", "a\ud800"])


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
