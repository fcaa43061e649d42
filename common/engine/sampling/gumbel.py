"""Gumbel-max sampling with noise that is a pure function of seed, position and token id; in NumPy for a host, in
tensors for a device.

Token i, of weight w_i, is drawn if w_i / e_i is the highest, where e_i is exponentially distributed: with probability
w_i / sum(w). (In logarithms, -log e_i is the Gumbel noise.) e_i depends only on (seed, position, i), and nothing on the
batch, the node or the attempt.

Inverse-CDF sampling would be less stable: logits that are recomputed in another batch, or as a prompt instead of token
by token, differ in their last bits. Any such difference shifts every CDF boundary; 1 draw in 50 changed token (152,000
tokens, float32). With this noise two distributions at a distance t (total variation) give different tokens with
probability 2 t / (1 + t) at most, the least possible for draws without communication (Bavarian et al., "The Optimality
of Correlated Sampling", 2016).
"""

from __future__ import annotations

import functools
import hashlib
import struct

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NoiseKey = tuple[int, int]
"""Selects the noise of one position of one sequence; two 32-bit numbers."""

_STRIDE, _MIX_1, _MIX_2 = np.uint32(0x9E3779B1), np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35)
"""Odd, so that multiplying by them is invertible. The last two are those of MurmurHash3's finalizer."""
_PART = 2**15
"""Chunk size, so that temporaries stay in cache and malloc reuses their memory."""
_NEAR_ONE = 1.0 - 2.0**-24


def noise_key(seed: int, position: int) -> NoiseKey:
    """The key of the token at `position`."""
    counter = struct.pack("<QQ", seed & (2**64 - 1), position)
    digest = hashlib.blake2b(counter, digest_size=8, person=b"kvrelay-sample-2").digest()
    low, high = struct.unpack("<II", digest)
    return low, high


def gumbel_argmax(weights: NDArray[np.float32], key: NoiseKey, ids: NDArray[np.int64] | None = None) -> int:
    """The index that is drawn. weights: [n], not negative and not all 0; ids: [n], their tokens, by default 0 ... n - 1."""
    strides = _strides_of_all(weights.size) if ids is None else strides_of(ids)
    # w/v bounds w/e from above; take the log only where the bound reaches the leader.
    bound = np.empty_like(weights)
    for lo in range(0, weights.size, _PART):
        part = slice(lo, lo + _PART)
        np.divide(weights[part], uniforms(key, strides[part]), out=bound[part])
    best = bound.argmax()
    least = _ratios(weights[best], uniforms(key, strides[best, None]))
    likely = np.flatnonzero(bound >= (least * (1 - 1e-6)).astype(np.float32))
    if likely.size <= 1:
        return int(best)
    return int(likely[_ratios(weights[likely], uniforms(key, strides[likely])).argmax()])


def uniforms(key: NoiseKey, strides: NDArray[np.uint32]) -> NDArray[np.float32]:
    """One number in (0, 1] for each token. strides: [n], from `strides_of`."""
    x = strides + np.uint32(key[0])
    shifted = x >> 16
    x ^= shifted
    x *= _MIX_1
    x ^= np.uint32(key[1])
    np.right_shift(x, 15, out=shifted)
    x ^= shifted
    x *= _MIX_2
    np.right_shift(x, 16, out=shifted)
    x ^= shifted
    x >>= 1
    v = x.view(np.int32).astype(np.float32)
    v += 0.5
    v *= 2.0**-31
    return v


def strides_of(ids: NDArray[np.int64]) -> NDArray[np.uint32]:
    """The form of token ids that `uniforms` takes."""
    return ids.astype(np.uint32) * _STRIDE


@functools.lru_cache(4)
def _strides_of_all(vocab: int) -> NDArray[np.uint32]:
    return strides_of(np.arange(vocab))


def _ratios(weights: NDArray[np.float32], v: NDArray[np.float32]) -> NDArray[np.float64]:
    """w / e, to the last bits; e = -log(1 - v)."""
    return weights / -np.log1p(-np.minimum(v.astype(np.float64), _NEAR_ONE))


def gumbel_argmax_on_device(weights: Tensor, keys: Tensor) -> Tensor:
    """`gumbel_argmax` for each row. weights: [r, vocab] float32, overwritten; keys: [r, 2] int32. Returns [r] int64."""
    v = uniforms_on_device(keys, weights.size(1)).clamp_(max=_NEAR_ONE)
    return weights.div_(v.neg_().log1p_()).argmin(-1)  # log1p(-v) is -e


def uniforms_on_device(keys: Tensor, vocab: int) -> Tensor:
    """`uniforms` for tokens 0 ... vocab - 1 of each row: [r, vocab]. keys: [r, 2] int32; products wrap around like a uint32's."""
    first, second = keys.split(1, dim=1)
    x = torch.arange(vocab, dtype=torch.int32, device=keys.device) * _signed(_STRIDE) + first
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= _signed(_MIX_1)
    x ^= second
    x ^= (x >> 15).bitwise_and_(0x1FFFF)
    x *= _signed(_MIX_2)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x = x.bitwise_right_shift_(1).bitwise_and_(0x7FFFFFFF)
    return x.float().add_(0.5).mul_(2.0**-31)


def _signed(bits: np.uint32) -> int:
    return int(bits.view(np.int32))
