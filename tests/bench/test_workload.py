"""Prompts that no prefix cache can know."""

from __future__ import annotations

from interlace.bench.workload import WorkSource


def test_prompts_never_begin_alike() -> None:
    source = WorkSource(vocab_size=10, seed=1)
    works = [source.make(5, 20, 3) for _ in range(20)]
    prompts = [prompt for work in works for prompt in work.prompts]
    assert len({prompt[:2] for prompt in prompts}) == 100
    assert all(len(prompt) == 20 and 0 <= min(prompt) <= max(prompt) < 10 for prompt in prompts)
    assert (works[0].batch_size, works[0].prompt_tokens, works[0].output_tokens) == (5, 20, 3)


def test_a_seed_fixes_the_prompts() -> None:
    first, second, other = (WorkSource(vocab_size=100, seed=s) for s in (3, 3, 4))
    made = first.make(2, 8, 1)
    assert made == second.make(2, 8, 1)
    assert made != other.make(2, 8, 1)
    assert made != first.make(2, 8, 1)
