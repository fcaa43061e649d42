"""`OpenAIEmbeddings` of `langchain-openai`."""

from __future__ import annotations

import tiktoken
from langchain_openai import OpenAIEmbeddings
from reporting import MODEL, V1, check, run

TEXTS = ["A man is eating food.", "A woman is playing the violin."]


@check("embed_documents, embed_query (texts)")
def _() -> None:
    texts = OpenAIEmbeddings(base_url=V1, api_key="none", model=MODEL, check_embedding_ctx_length=False)
    first, second = texts.embed_documents(TEXTS)
    assert len(first) == len(second)
    assert max(abs(a - b) for a, b in zip(texts.embed_query(TEXTS[0]), first, strict=True)) < 1e-4


@check("embed_documents (token ids, the default)")
def _() -> None:
    # The default sends ids of OpenAI's tokenizer, which has to be downloaded; bytes stand for it.
    tiktoken.get_encoding = lambda _: tiktoken.Encoding(
        "bytes", pat_str=r".", mergeable_ranks={bytes([byte]): byte for byte in range(256)}, special_tokens={}
    )
    ids = OpenAIEmbeddings(base_url=V1, api_key="none", model=MODEL)
    assert len({len(vector) for vector in ids.embed_documents(TEXTS)}) == 1


@check("aembed_documents")
async def _() -> None:
    texts = OpenAIEmbeddings(base_url=V1, api_key="none", model=MODEL, check_embedding_ctx_length=False, chunk_size=16)
    assert len(await texts.aembed_documents(TEXTS * 30)) == 60


run()
