"""Connectors that are wrong about what they have: match queries, keys, amounts."""

from __future__ import annotations

import hashlib

from memory_broken import Broken
from memory_connector import MemoryConnector

from interlace.engine.block_hash import BlockHash, extend_hashes, root_hash
from interlace.engine.request import Request


class ReservesAtTheQuery(MemoryConnector):
    """Takes each query for an admission: what it promised once is reserved and not told again.

    The engine asks again whenever the request did not fit, and then computes all of it.
    """

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if request.request_id in self._asked_at:
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class DropsWhatIsAskedFor(MemoryConnector):
    """Moves blocks from the store to a request's own place when it is asked for them, and puts
    them back when they are allocated. A request that is asked about and then waits has them."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        answer = super().get_num_new_matched_tokens(request, num_computed_tokens)
        for index in range(len(request.block_hashes)):
            self.store.forget(self.key_of(request, index))
        return answer


class AsksForPatience(MemoryConnector):
    """Begins a look-up in the background that never comes to an end: None for ever."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        found, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return (None, False) if found else (0, is_async)


class PromisesMoreThanThereIs(MemoryConnector):
    """Rounds up: on a hit of all whole blocks the rest of the prompt counts as stored too, and
    beyond it what would fill the block."""

    def promise(self, request: Request, num_computed_tokens: int, end: int) -> tuple[int, bool]:
        is_full_hit = end > 0 and end == request.num_tokens // self._block_size
        return super().promise(request, num_computed_tokens, end + is_full_hit)


class AsynchronousNothing(MemoryConnector):
    """Says that it loads asynchronously, also when there is nothing to load."""

    def promise(self, request: Request, num_computed_tokens: int, end: int) -> tuple[int, bool]:
        return super().promise(request, num_computed_tokens, end)[0], True


class LeavesOutTheLastBlock(MemoryConnector):
    """Leaves one token to compute on a full hit, and then rounds down: the last block, all but one
    token of which is promised, is not loaded."""

    def promise(self, request: Request, num_computed_tokens: int, end: int) -> tuple[int, bool]:
        num_tokens, is_async = super().promise(request, num_computed_tokens, end)
        most = request.num_tokens - 1 - num_computed_tokens
        num_tokens = min(num_tokens, most)
        return num_tokens, is_async and num_tokens > 0


class KeyForgetsSalt(MemoryConnector):
    """Hashes tokens alone: whoever has another cache salt is served the same KV."""

    def key_of(self, request: Request, index: int) -> bytes:
        hashes: list[BlockHash] = []
        end = (index + 1) * self._block_size
        extend_hashes(hashes, root_hash(), request.all_token_ids[:end], self._block_size)
        return hashes[index]


class KeyForgetsPrefix(MemoryConnector):
    """Hashes a block's own tokens, and not those before it: KV from another context is served."""

    def key_of(self, request: Request, index: int) -> bytes:
        first = index * self._block_size
        own = request.all_token_ids[first : first + self._block_size]
        salt = request.cache_salt or ""
        return hashlib.sha256(f"{salt} {own}".encode()).digest()


class KeysForgetTheAnswer(MemoryConnector):
    """Files blocks beyond the prompt under the prompt and their place: two requests with one prompt
    and different seeds get each other's answers' KV when they are resumed (B15)."""

    def key_of(self, request: Request, index: int) -> bytes:
        if (index + 1) * self._block_size <= request.num_prompt_tokens:
            return request.block_hashes[index]
        named = (request.cache_salt, request.prompt_token_ids, index)
        return hashlib.sha256(repr(named).encode()).digest()


class PopsItsParameter(MemoryConnector):
    """Takes its parameter out of `kv_transfer_params` in the match query: asked again it has
    nothing."""

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        params = request.kv_transfer_params
        if params is not None and not params.pop("do_remote_prefill", False):
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


BROKEN = [
    Broken(ReservesAtTheQuery, "match-has-no-effects"),
    Broken(DropsWhatIsAskedFor, "match-has-no-effects"),
    Broken(AsksForPatience, "bounded-time", seen_in="tokens-hit"),
    Broken(PromisesMoreThanThereIs, "answers-lawful", seen_in="tokens-hit"),
    Broken(AsynchronousNothing, "answers-lawful", seen_in="tokens-cold"),
    Broken(LeavesOutTheLastBlock, "tokens-full-hit"),
    Broken(KeyForgetsSalt, "keys-tell-salts-apart"),
    Broken(KeyForgetsPrefix, "loaded-kv-right", seen_in="tokens-hit"),
    Broken(KeysForgetTheAnswer, "tokens-preempted"),
    Broken(PopsItsParameter, "match-has-no-effects"),
]
