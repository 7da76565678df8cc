"""Cut the columns of an engine's response by the session that owns each part."""

from __future__ import annotations

from collections.abc import Callable

from headrace.engine.contract import StepBatch


def split_by_owner(batch: StepBatch, owner_of: Callable[[int], int]) -> dict[int, StepBatch]:
    """Return the parts of `batch` by owner, each with its parts in their order; runs once for each sequence.

    Args:
        batch: whole columns.
        owner_of: the owner of a sequence.
    """
    found: dict[int, StepBatch] = {}
    texts: dict[int, list[bytes]] = {}
    token = byte = alternative = 0
    for seq, count, length in zip(batch.seqs, batch.token_counts, batch.text_lengths, strict=True):
        owner = owner_of(seq)
        part = found.get(owner)
        if part is None:
            part = found[owner] = StepBatch(number=batch.number, steps=batch.steps, ended_ns=batch.ended_ns)
            texts[owner] = []
            if batch.logprobs is not None:
                part.logprobs, part.top_counts, part.top_ids, part.top_logprobs = [], [], [], []
        part.seqs.append(seq)
        part.token_counts.append(count)
        part.text_lengths.append(length)
        part.token_ids += batch.token_ids[token : token + count]
        texts[owner].append(batch.text[byte : byte + length])
        if batch.logprobs is not None:
            alternative = _copy_logprobs(batch, part, token, count, alternative)
        token += count
        byte += length
    for owner, part in found.items():
        part.text = b"".join(texts[owner])
    return found


def _copy_logprobs(batch: StepBatch, part: StepBatch, token: int, count: int, alternative: int) -> int:
    """Append the log probabilities of some tokens; returns where the next ones' alternatives begin."""
    assert batch.logprobs is not None
    assert part.logprobs is not None
    assert part.top_counts is not None
    assert part.top_ids is not None
    assert part.top_logprobs is not None
    counts = (batch.top_counts or [0] * len(batch.logprobs))[token : token + count]
    end = alternative + sum(counts)
    part.logprobs += batch.logprobs[token : token + count]
    part.top_counts += counts
    part.top_ids += (batch.top_ids or [])[alternative:end]
    part.top_logprobs += (batch.top_logprobs or [])[alternative:end]
    return end
