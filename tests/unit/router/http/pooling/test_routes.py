"""The pooling calls over HTTP, with stub nodes: formats, limits, errors, the official client."""

from __future__ import annotations

import asyncio
import base64
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai import AsyncOpenAI
from support.stub_node import MAX_LEN, Stack, StubNode, make_model_folder, running_stack
from support.stub_pooling import pair_score, pooled
from tokenizers import Tokenizer, processors

from common.config.service_configs import RouterConfig
from common.control.identities import pack_ids
from common.control.messages import Task
from common.control.pooling import PoolInput, PoolRequest

WIDTH = 8
MODEL = "stub-model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer adds a beginning and an end, and types to the second text of a pair."""
    path = make_model_folder(tmp_path_factory.mktemp("pooling") / "model")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text('{"architectures": ["BertModel"], "model_type": "bert"}')
    return path


class Client:
    """Asks a router of one pooling model; `seen` are the requests that its node got."""

    def __init__(self, stack: Stack, node: StubNode, http: httpx.AsyncClient) -> None:
        self.stack, self.node, self.http = stack, node, http

    async def post(self, path: str, **body: Any) -> Any:
        answer = await self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def refused(self, path: str, **body: Any) -> dict[str, Any]:
        answer = await self.http.post(path, json=body)
        assert answer.status_code == 400, answer.text
        return answer.json()["error"]

    @property
    def seen(self) -> list[PoolRequest]:
        return [each for each in self.node.received if isinstance(each, PoolRequest)]


def play(folder: Path, scene: Callable[[Client], Awaitable[None]], task: Task = "embed", **config: Any) -> None:
    async def main() -> None:
        node = StubNode("prefill", "e0", str(folder), task=task, hidden_size=WIDTH)
        async with (
            running_stack(RouterConfig(**{"lease_s": 1.0, **config}), node) as stack,
            httpx.AsyncClient(base_url=stack.url) as http,
        ):
            await scene(Client(stack, node, http))
            await stack.settled()

    asyncio.run(asyncio.wait_for(main(), 60))


def vectors(*inputs: list[int], **options: Any) -> np.ndarray:
    request = PoolRequest(None, [PoolInput(pack_ids(ids)) for ids in inputs], **options)  # type: ignore[arg-type]
    return np.stack([np.frombuffer(each, "<f4") for each in pooled(request, "embed", WIDTH)])


def encoded(folder: Path, text: str, second: str | None = None) -> list[int]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return tokenizer.encode(text, second).ids


def test_embeddings_have_openais_shape_in_the_order_of_the_inputs(folder: Path) -> None:
    async def scene(client: Client) -> None:
        answer = await client.post("/v1/embeddings", model=MODEL, input=["the fox", "a dog"])
        expected = vectors(encoded(folder, "the fox"), encoded(folder, "a dog"))
        assert [each["index"] for each in answer["data"]] == [0, 1]
        np.testing.assert_allclose([each["embedding"] for each in answer["data"]], expected)
        count = sum(len(encoded(folder, text)) for text in ("the fox", "a dog"))
        assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count}
        assert (answer["object"], answer["model"]) == ("list", MODEL)

    play(folder, scene)


def test_texts_that_are_too_long_to_be_compared_are_refused_by_their_field(folder: Path) -> None:
    long = "fox dog " * 600

    async def scene(client: Client) -> None:
        for path, body, param in (
            ("/v1/rerank", {"query": long, "documents": ["fox"]}, "query"),
            ("/v1/rerank", {"query": "fox", "documents": [long]}, "documents"),
            ("/v1/score", {"text_1": long, "text_2": "fox"}, "text_1"),
            ("/v1/score", {"text_1": "fox", "text_2": long}, "text_2"),
            ("/v1/score", {"queries": "fox", "documents": long}, "documents"),
        ):
            error = await client.refused(path, **body)
            assert (error["code"], error["param"]) == ("context_length_exceeded", param)

    play(folder, scene)


def test_the_official_client_reads_text_and_token_ids_in_both_formats(folder: Path) -> None:
    async def scene(client: Client) -> None:
        ids = encoded(folder, "the fox")
        async with AsyncOpenAI(base_url=client.stack.url + "/v1", api_key="none", max_retries=0) as openai:
            for given in ("the fox", ids, [ids], ["the fox"]):
                plain = await openai.embeddings.create(model=MODEL, input=given, encoding_format="float")
                coded = await openai.embeddings.create(model=MODEL, input=given)  # asks for base64
                np.testing.assert_allclose(plain.data[0].embedding, vectors(ids)[0])
                np.testing.assert_allclose(coded.data[0].embedding, vectors(ids)[0])
        answer = await client.post("/v1/embeddings", input="the fox", encoding_format="base64")
        assert base64.b64decode(answer["data"][0]["embedding"]) == vectors(ids)[0].tobytes()

    play(folder, scene)


def test_dimensions_and_normalization_reach_the_node(folder: Path) -> None:
    async def scene(client: Client) -> None:
        ids = encoded(folder, "the fox")
        answer = await client.post("/v1/embeddings", input="the fox", dimensions=3, normalize=False)
        expected = vectors(ids, dimensions=3, normalize=False)[0]
        np.testing.assert_allclose(answer["data"][0]["embedding"], expected)
        error = await client.refused("/v1/embeddings", input="a", dimensions=WIDTH + 1)
        assert (error["param"], error["message"]) == ("dimensions", "dimensions=9 is more than the 8 of 'stub-model'")

    play(folder, scene)


def test_a_conversation_is_one_input(folder: Path) -> None:
    async def scene(client: Client) -> None:
        await client.post("/v1/embeddings", messages=[{"role": "user", "content": "fox"}])
        (pool_input,) = client.seen[0].inputs
        assert pool_input.token_ids.tolist() == encoded(folder, "<s><|user|>fox</s>")[1:-1]

    play(folder, scene)


def test_a_conversation_for_a_model_without_a_chat_template_is_told_what_to_send(folder: Path, tmp_path: Path) -> None:
    bare = shutil.copytree(folder, tmp_path / folder.name)
    (bare / "tokenizer_config.json").write_text("{}")

    async def scene(client: Client) -> None:
        error = await client.refused("/v1/embeddings", messages=[{"role": "user", "content": "fox"}])
        assert error["message"] == "this model has no chat template: send texts as `input`"

    play(bare, scene)


def test_what_is_too_long_is_refused_with_its_length_or_cut_where_asked(folder: Path) -> None:
    long = "fox dog " * 600

    async def scene(client: Client) -> None:
        length = len(encoded(folder, long))
        error = await client.refused("/v1/embeddings", input=["a", long])
        assert error["code"] == "context_length_exceeded"
        assert f"maximum context length is {MAX_LEN} tokens. However, input 1 has" in error["message"]
        error = await client.refused("/v1/embeddings", input=[5] * (MAX_LEN + 1))
        assert f"input 0 has {MAX_LEN + 1} tokens" in error["message"]
        for limit, side in ((-1, None), (10, None), (10, "left"), (2, None), (1, None)):
            await client.post("/v1/embeddings", input=long, truncate_prompt_tokens=limit, truncation_side=side)
            ids = client.seen[-1].inputs[0].token_ids.tolist()
            assert len(ids) == (MAX_LEN if limit == -1 else limit)
            whole = encoded(folder, long)
            kept = len(ids) - 2
            if kept > 0:
                assert ids[0] == 0
                assert ids[-1] == 1
                assert ids[1:-1] == (whole[-1 - kept : -1] if side == "left" else whole[1 : 1 + kept])
        await client.post("/v1/embeddings", input=list(range(2, 30)), truncate_prompt_tokens=4)
        assert client.seen[-1].inputs[0].token_ids.tolist() == [2, 3, 4, 5]
        assert length > MAX_LEN

    play(folder, scene)


def test_foreign_token_ids_are_refused(folder: Path) -> None:
    async def scene(client: Client) -> None:
        error = await client.refused("/v1/embeddings", input=[[1], [400]])
        assert error["message"].startswith("input 1 has token ids that are not at least 0 and below 400")

    play(folder, scene)


def test_rerank_sorts_by_the_scores_of_pairs(folder: Path) -> None:
    documents = ["dogs", {"text": "the quick fox"}, "the fox"]

    async def scene(client: Client) -> None:
        for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
            answer = await client.post(path, query="the fox", documents=documents)
            results = answer["results"]
            assert sorted(each["index"] for each in results) == [0, 1, 2]
            assert results[0]["document"] == {"text": "the fox"}
            scores = [each["relevance_score"] for each in results]
            assert scores == sorted(scores, reverse=True)
        (seen,) = {tuple(each.token_ids) for each in client.seen[0].inputs} & {
            tuple(encoded(folder, "the fox", "dogs"))
        }
        pair = PoolInput(pack_ids(list(seen)), len(encoded(folder, "the fox")))
        assert pair in client.seen[0].inputs
        assert pytest.approx(pair_score(pair)) == results[-1]["relevance_score"]
        few = await client.post("/rerank", query="fox", documents=documents, top_n=1, return_documents=False)
        assert len(few["results"]) == 1
        assert "document" not in few["results"][0]

    play(folder, scene, "score")


@pytest.mark.parametrize(
    ("fields", "activates"),
    [({}, True), ({"use_activation": False}, False), ({"softmax": False}, False), ({"activation": True}, True)],
)
def test_scores_may_be_asked_for_before_the_activation(folder: Path, fields: dict[str, bool], activates: bool) -> None:
    async def scene(client: Client) -> None:
        await client.post("/v1/score", text_1="the fox", text_2="dogs", **fields)
        await client.post("/v1/rerank", query="the fox", documents=["dogs"], **fields)
        assert {each.normalize for each in client.seen} == {activates}

    play(folder, scene, "score")


def test_an_embedding_model_scores_by_the_cosine(folder: Path) -> None:
    async def scene(client: Client) -> None:
        query, *others = (vectors(encoded(folder, text))[0] for text in ("fox", "dog", "fox", "the"))
        answer = await client.post("/v1/score", text_1="fox", text_2=["dog", "fox", "the"])
        np.testing.assert_allclose(
            [each["score"] for each in answer["data"]], [query @ each for each in others], atol=1e-6
        )
        answer = await client.post("/score", text_1=["fox", "dog"], text_2=["fox", "the"])
        expected = [1.0, others[0] @ others[2]]
        np.testing.assert_allclose([each["score"] for each in answer["data"]], expected, atol=1e-6)
        ranked = await client.post("/rerank", query="fox", documents=["dog", "fox"], max_tokens_per_doc=50)
        assert ranked["results"][0]["index"] == 1

    play(folder, scene)


def test_a_pair_that_is_too_long_is_cut_where_asked_keeping_both_texts(folder: Path) -> None:
    async def scene(client: Client) -> None:
        long = "dog " * 900
        error = await client.refused("/score", text_1="fox", text_2=[long])
        assert error["code"] == "context_length_exceeded"
        await client.post("/score", text_1="fox", text_2=[long, "a"], truncate_prompt_tokens=20)
        cut, short = client.seen[-1].inputs
        assert len(cut.token_ids) == 20
        assert cut.token_ids[: cut.second_at].tolist() == encoded(folder, "fox")
        assert short.token_ids.tolist() == encoded(folder, "fox", "a")
        await client.post("/score", text_1=long, text_2=long, truncate_prompt_tokens=21)
        (both,) = client.seen[-1].inputs
        assert (len(both.token_ids), both.second_at) == (21, 11)
        await client.post("/rerank", query="fox", documents=[long], max_tokens_per_doc=6)
        (document,) = client.seen[-1].inputs
        assert len(document.token_ids) - document.second_at == 7

    play(folder, scene, "score")


def test_pooling_gives_one_vector_per_token_or_per_input(folder: Path) -> None:
    async def scene(client: Client) -> None:
        ids = encoded(folder, "the fox")
        answer = await client.post("/pooling", input=["the fox", "a"])
        first, second = (np.array(each["data"]) for each in answer["data"])
        np.testing.assert_allclose(first, vectors(*[[token] for token in ids]), atol=1e-6)
        assert second.shape == (len(encoded(folder, "a")), WIDTH)
        whole = await client.post("/v1/pooling", input="the fox", task="embed")
        np.testing.assert_allclose(whole["data"][0]["data"], vectors(ids)[0])
        coded = await client.post("/pooling", input="the fox", encoding_format="base64")
        assert len(base64.b64decode(coded["data"][0]["data"])) == 4 * WIDTH * len(ids)
        error = await client.refused("/pooling", input="a", task="classify")
        assert error["param"] == "task"

    play(folder, scene)


def test_a_model_of_another_kind_is_refused_with_those_that_would_do(folder: Path) -> None:
    async def scene(client: Client) -> None:
        chat: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
        for path, body in (("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", chat)):
            error = await client.refused(path, **body)
            assert (error["param"], error["code"]) == ("model", "wrong_model")
            assert "'stub-model' embeds texts; this call needs one that generates text" in error["message"]
        answer = await client.http.post("/v1/embeddings", json={"model": "other", "input": "a"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")

    play(folder, scene)


def test_in_a_cluster_of_several_models_each_call_finds_its_own(folder: Path, tmp_path: Path) -> None:
    async def main() -> None:
        generates = str(make_model_folder(tmp_path / "chat"))
        nodes = [
            StubNode("prefill", "p0", generates, model_name="chat"),
            StubNode("decode", "d0", generates, model_name="chat"),
            StubNode("prefill", "e0", str(folder), task="embed", hidden_size=WIDTH, model_name="small"),
            StubNode("prefill", "e1", str(folder), task="embed", hidden_size=2 * WIDTH, model_name="large"),
            StubNode("prefill", "s0", str(folder), task="score", model_name="cross"),
        ]
        async with (
            running_stack(RouterConfig(lease_s=1.0), *nodes) as stack,
            httpx.AsyncClient(base_url=stack.url) as http,
        ):
            client = Client(stack, nodes[2], http)
            for name, width in (("small", WIDTH), ("large", 2 * WIDTH)):
                answer = await client.post("/v1/embeddings", model=name, input="the fox")
                assert (answer["model"], len(answer["data"][0]["embedding"])) == (name, width)
            assert (await client.post("/v1/rerank", query="a", documents=["b"]))["model"] == "cross"
            assert (await client.post("/v1/completions", prompt="a"))["model"] == "chat"
            error = await client.refused("/v1/embeddings", model="chat", input="a")
            assert error["message"] == (
                "the model 'chat' generates text; this call needs one that embeds texts: 'small', 'large'"
            )
            error = await client.refused("/v1/completions", model="small", prompt="a")
            assert error["message"].endswith("this call needs one that generates text: 'chat'")
            error = await client.refused("/v1/embeddings", input="a")
            assert error["code"] == "model_required"
            await stack.settled()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_headers_tell_the_attempt_the_parts_and_what_was_ignored(folder: Path) -> None:
    async def scene(client: Client) -> None:
        answer = await client.http.post(
            "/v1/embeddings", json={"input": ["a"] * 300, "request_id": "mine", "inputs": 1, "metadata": {}}
        )
        assert answer.headers["x-request-id"] == "mine"
        assert answer.headers["x-kvrelay-attempt"] == "1"
        assert answer.headers["x-kvrelay-parts"] == "3"
        assert answer.headers["x-kvrelay-ignored"] == "inputs"
        assert 'kvrelay_pooled_inputs_total{model_name="stub-model"} 300.0' in (await client.http.get("/metrics")).text

    play(folder, scene)


def test_a_router_whose_only_nodes_pool_is_ready(folder: Path) -> None:
    async def scene(client: Client) -> None:
        health = (await client.http.get("/health")).json()
        assert (health["status"], health["prefill"], health["decode"], health["pooling"]) == ("ok", 0, 0, 1)
        assert (await client.http.get("/ready")).json() == {"ready": True}
        assert [model["id"] for model in (await client.http.get("/v1/models")).json()["data"]] == [MODEL]

    play(folder, scene)


def test_a_failure_at_the_nodes_keeps_its_status(folder: Path) -> None:
    async def scene(client: Client) -> None:
        client.node.fail_with = ("engine_error", "scripted")
        answer = await client.http.post("/v1/embeddings", json={"input": "a"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_error")
        assert answer.headers["x-kvrelay-attempt"] == "2"

    play(folder, scene, max_attempts=2)


def test_a_client_that_disconnects_frees_the_nodes(folder: Path) -> None:
    async def scene(client: Client) -> None:
        client.node.gate.clear()
        asked = asyncio.create_task(client.http.post("/v1/embeddings", json={"input": "a"}))
        await client.node.until(lambda: bool(client.node.pooling))
        asked.cancel()
        await client.node.until(lambda: bool(client.node.aborts()))
        client.node.gate.set()

    play(folder, scene)


def test_ollamas_calls_embed_and_cut_what_is_too_long(folder: Path) -> None:
    async def scene(client: Client) -> None:
        ids = encoded(folder, "the fox")
        answer = await client.post("/api/embed", model=f"{MODEL}:latest", input="the fox", keep_alive="5m", options={})
        np.testing.assert_allclose(answer["embeddings"], vectors(ids))
        assert answer["prompt_eval_count"] == len(ids)
        answer = await client.post("/api/embed", input=["a", "fox " * 600], dimensions=2)
        assert [len(each) for each in answer["embeddings"]] == [2, 2]
        answered = await client.http.post("/api/embed", json={"input": "a", "truncat": True})
        assert answered.headers["x-kvrelay-ignored"] == "truncat"
        shown = await client.post("/api/show", model=MODEL)
        assert shown["capabilities"] == ["embedding"]
        assert (shown["details"]["family"], shown["model_info"]["bert.embedding_length"]) == ("bert", WIDTH)
        assert [each["name"] for each in (await client.http.get("/api/ps")).json()["models"]] == [MODEL]
        older = await client.post("/api/embeddings", model=MODEL, prompt="the fox")
        np.testing.assert_allclose(older["embedding"], vectors(ids, normalize=False)[0])
        refused = await client.http.post("/api/embed", json={"input": "fox " * 600, "truncate": False})
        assert refused.status_code == 400
        assert "maximum context length" in refused.json()["error"]

    play(folder, scene)
