"""The official `openai` client's embeddings, and rerank and score over plain HTTP."""

from __future__ import annotations

from openai import AsyncOpenAI, BadRequestError, OpenAI
from reporting import MODEL, V1, check, post, run

client = OpenAI(base_url=V1, api_key="none")
TEXTS = ["A man is eating food.", "A woman is playing the violin.", "Someone eats a meal."]


def cosine(one: list[float], other: list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))


@check("embeddings: texts, near ones are near")
def _() -> None:
    answer = client.embeddings.create(model=MODEL, input=TEXTS)
    first, second, third = (each.embedding for each in answer.data)
    assert abs(cosine(first, first) - 1) < 1e-4
    assert cosine(first, third) > cosine(first, second)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens > 0


@check("embeddings: base64 and float are the same")
def _() -> None:
    coded = client.embeddings.create(model=MODEL, input=TEXTS[0])  # the client asks for base64 and decodes it
    plain = client.embeddings.create(model=MODEL, input=TEXTS[0], encoding_format="float")
    assert coded.data[0].embedding == plain.data[0].embedding


@check("embeddings: token ids, dimensions")
def _() -> None:
    ids = [[5, 6, 7], [8, 9]]
    answer = client.embeddings.create(model=MODEL, input=ids, dimensions=32)
    assert [len(each.embedding) for each in answer.data] == [32, 32]
    assert answer.usage.prompt_tokens == 5


@check("embeddings, asynchronous, 1,000 texts")
async def _() -> None:
    texts = [f"{text} {number}" for number in range(334) for text in TEXTS][:1000]
    answer = await AsyncOpenAI(base_url=V1, api_key="none").embeddings.create(model=MODEL, input=texts)
    assert [each.index for each in answer.data] == list(range(1000))


@check("an error by its class")
def _() -> None:
    refused = None
    try:
        client.embeddings.create(model=MODEL, input=[])
    except BadRequestError as error:
        refused = error
    assert refused is not None
    assert refused.param == "input"


@check("rerank in the shapes of Cohere and Jina, by HTTP")
def _() -> None:
    body = {"model": MODEL, "query": "eating", "documents": [TEXTS[1], {"text": TEXTS[0]}], "top_n": 1}
    for path in ("/v1/rerank", "/v2/rerank", "/rerank"):
        (best,) = post(path, body)["results"]
        assert (best["index"], best["document"]["text"]) == (1, TEXTS[0])


@check("score, by HTTP")
def _() -> None:
    body = {"model": MODEL, "text_1": TEXTS[0], "text_2": TEXTS}
    scores = [each["score"] for each in post("/v1/score", body)["data"]]
    assert scores[0] == max(scores)
    assert scores[2] > scores[1]


run()
