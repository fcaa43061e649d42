"""`llama-index`, by its OpenAI-like embeddings."""

from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from reporting import MODEL, V1, check, run

model = OpenAILikeEmbedding(model_name=MODEL, api_base=V1, api_key="none", embed_batch_size=10)


@check("get_text_embedding_batch")
def _() -> None:
    vectors = model.get_text_embedding_batch([f"text {number}" for number in range(25)])
    assert len(vectors) == 25


@check("get_query_embedding, asynchronous")
async def _() -> None:
    assert await model.aget_query_embedding("eating")


run()
