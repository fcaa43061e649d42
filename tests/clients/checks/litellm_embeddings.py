"""`litellm`'s embedding and rerank."""

from __future__ import annotations

import litellm
from reporting import MODEL, URL, V1, check, run

TEXTS = ["A woman is playing the violin.", "A man is eating food."]


@check("embedding")
def _() -> None:
    answer = litellm.embedding(model=f"hosted_vllm/{MODEL}", input=TEXTS, api_base=V1, api_key="none")
    assert [each["index"] for each in answer.data] == [0, 1]


@check("embedding, as OpenAI, with dimensions")
def _() -> None:
    answer = litellm.embedding(
        model=f"openai/{MODEL}",
        input=TEXTS,
        dimensions=16,
        api_base=V1,
        api_key="none",
        allowed_openai_params=["dimensions"],
    )
    assert len(answer.data[0]["embedding"]) == 16


@check("rerank")
def _() -> None:
    answer = litellm.rerank(
        model=f"hosted_vllm/{MODEL}", query="eating", documents=TEXTS, top_n=1, api_base=URL, api_key="none"
    )
    assert answer.results[0]["index"] == 1


run()
