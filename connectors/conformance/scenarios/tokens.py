"""Tokens equal those without a connector: cold, after hits, in chunks, with shared prefixes."""

from __future__ import annotations

from interlace.connectors.conformance.harness import Harness
from interlace.connectors.conformance.stage import Scenario, Stage

_OF_LOADS = frozenset(
    (
        "loaded-kv-right",
        "layer-loads-complete",
        "loads-reported-when-done",
        "saves-visible-when-whole",
        "failures-exact",
    )
)


def _cold(stage: Stage) -> None:
    """Prompts of all lengths around the size of a block, alone and together."""
    size = stage.block_size
    with stage.engine() as engine:
        for length in (1, size - 1, size, size + 1, 3 * size + 2):
            engine.add(f"alone{length}", stage.prompt(0, length), max_tokens=size + 2)
            engine.run()
        for number in range(3):
            engine.add(f"together{number}", stage.prompt(2, number), max_tokens=6)
    stage.need_right_kv()


def _hit(stage: Stage) -> None:
    """So many blocks stored, so many of them cached here too, and a rest to compute."""
    with stage.engine() as engine:
        _same_block_elsewhere(stage, engine)
        for num_stored in range(1, 5):
            for num_local in range(num_stored):
                prompt = stage.prompt(num_stored, 2)
                stage.store(engine, prompt)
                if num_local:
                    head = prompt[: num_local * stage.block_size + 1]
                    engine.add(f"local{num_local}of{num_stored}", head, max_tokens=1)
                    engine.run()
                tail = stage.prompt(1, num_local)
                engine.add(f"hit{num_local}of{num_stored}", prompt + tail, max_tokens=3)
                engine.run()
                stage.forget_local(engine)
    stage.need_loads()
    stage.need_right_kv()


def _same_block_elsewhere(stage: Stage, engine: Harness) -> None:
    """A stored block's tokens come again, after other ones: that is other KV."""
    first, second, third = stage.prompt(1), stage.prompt(1), stage.prompt(1)
    stage.store(engine, [*first, *third, 1])
    stage.store(engine, [*second, *first, 1])
    engine.add("elsewhere", [*second, *third, *first, 1], max_tokens=2)
    engine.run()
    stage.forget_local(engine)


def _full_hit(stage: Stage) -> None:
    """All blocks of a prompt are stored; of some the first ones are cached here."""
    with stage.engine() as engine:
        for num_blocks in range(1, 5):
            prompt = stage.prompt(num_blocks)
            stage.store(engine, prompt + stage.prompt(0, 1))
            engine.add(f"all{num_blocks}", prompt, max_tokens=stage.block_size + 1)
            engine.run()
            stage.forget_local(engine)
            engine.add(f"longer{num_blocks}", prompt + stage.prompt(0, 1), max_tokens=2)
            engine.run()
            stage.forget_local(engine)
            if num_blocks > 1:
                engine.add(f"local{num_blocks}", prompt[: stage.block_size + 1], max_tokens=1)
                engine.run()
                engine.add(f"rest{num_blocks}", prompt, max_tokens=2)
                engine.run()
                stage.forget_local(engine)
    stage.need_loads()
    stage.need_right_kv()


def _chunked(stage: Stage) -> None:
    """A budget of a block and a half, so that no chunk ends where a block does; then hits."""
    budget = stage.block_size + stage.block_size // 2
    with stage.engine(max_num_batched_tokens=budget) as engine:
        prompts = [stage.prompt(5, 2), stage.prompt(4, 3)]
        for place, prompt in enumerate(prompts):
            engine.add(f"cold{place}", prompt, max_tokens=5)
        engine.run()
        stage.forget_local(engine)
        for place, prompt in enumerate(prompts):
            engine.add(f"again{place}", prompt, max_tokens=5)
        engine.run()
        stage.forget_local(engine)
        for place, prompt in enumerate(prompts):
            engine.add(f"further{place}", prompt + stage.prompt(3, 1), max_tokens=5)
        engine.run()
    stage.need_right_kv()


def _shared_prefix(stage: Stage) -> None:
    """Requests that begin alike and come together, or a step after each other."""
    with stage.engine() as engine:
        head = stage.prompt(3)
        for place in range(2):
            engine.add(f"cold{place}", head + stage.prompt(1, place), max_tokens=4)
        engine.run()
        for gap in range(4):
            stage.forget_local(engine)
            for place in range(3):
                engine.add(f"gap{gap}no{place}", head + stage.prompt(0, place + 1), max_tokens=4)
                engine.steps(gap)
            engine.run()
    stage.need_right_kv()


def _salts(stage: Stage) -> None:
    """Equal prompts with different salts."""
    with stage.engine() as engine:
        prompt = stage.prompt(3, 2)
        stage.store(engine, prompt, salt="one")
        engine.add("other-salt", prompt, max_tokens=3, salt="other")
        engine.run()
        engine.add("same-salt", prompt, max_tokens=3, salt="one")
        engine.add("third-salt", prompt, max_tokens=3, salt="onex")
        engine.run()
        stage.forget_local(engine)
        engine.add("same-salt-again", prompt, max_tokens=3, salt="one")
        engine.add("other-salt-again", prompt, max_tokens=3, salt="other")
        engine.run()
    stage.need_right_kv()
    stage.need_loads()


SCENARIOS = (
    Scenario("tokens-cold", _cold),
    Scenario("tokens-hit", _hit, in_many_orders=True),
    Scenario("tokens-full-hit", _full_hit, _OF_LOADS, in_many_orders=True),
    Scenario("tokens-chunked", _chunked, _OF_LOADS - {"saves-visible-when-whole"}),
)
SHARING = (
    Scenario("shared-prefix", _shared_prefix, _OF_LOADS, in_many_orders=True),
    Scenario("keys-tell-salts-apart", _salts, frozenset(("loaded-kv-right",))),
)
